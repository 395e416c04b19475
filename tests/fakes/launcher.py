"""The second implementation of skylite/engine/interface.py: engines that start fast and make tokens up.

    skylite train ... --set engine.launcher=tests/fakes/launcher.py:FakeLauncher

The server (engine.py) is a real process with a Unix socket and a protocol of its own. Its answers depend on
the adapter's weights, the prompt and the seed only, so two runs with the same adapters get the same ones.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skylite.config.engine import CpuLora, Lent
from skylite.config.lora import LoraConfig
from skylite.config.train import TrainConfig
from skylite.data.chat_tokenizer import ChatTokenizer
from skylite.engine.connections import Connections
from skylite.engine.interface import EngineMemory, EngineSpec, Sampling, ServerFacts
from skylite.errors import EngineDead, EngineFailed, RunFailed, SyncFailed
from skylite.run.run_dir import AdapterVersion
from skylite.types import Call, EncodedPrompt

SERVER = Path(__file__).with_name("engine.py")
TIMEOUT_S = 60.0


class FakeEngine:
    """Client of one server."""

    def __init__(self, spec: EngineSpec) -> None:
        self.name = spec.name
        self._connections = Connections(spec.name, spec.address, spec.max_num_seqs)

    async def is_ready(self) -> bool:
        try:
            return (await self._connections.send("GET", "/progress")).is_success
        except EngineFailed:
            return False

    async def progress(self) -> float:
        reply = await self._connections.send("GET", "/progress")
        if not reply.is_success:
            raise EngineDead(f"{self.name} reports that its engine is dead.")
        return float(reply.json())

    async def generate(
        self, model: str, prompt: EncodedPrompt, n: int, sampling: Sampling, version: int
    ) -> list[Call | None]:
        ids = list(prompt.token_ids)
        body = {"model": model, "prompt": ids, "n": n}
        choices = await self._ask(
            "/generate", body | {"max_tokens": sampling.max_tokens, "seed": sampling.seed}
        )
        return [Call(prompt_token_ids=ids, adapter_version=version, **choice) for choice in choices]

    async def score(self, model: str, prompt: EncodedPrompt) -> list[float]:
        logprobs: list[float] = await self._ask("/score", {"model": model, "prompt": list(prompt.token_ids)})
        return logprobs

    async def top_tokens(
        self, model: str, token_ids: Sequence[int], count: int
    ) -> list[list[tuple[int, float]]]:
        raise RunFailed(f"{self.name} gives no other tokens than those that it samples.")

    async def load_adapter(self, adapter: AdapterVersion) -> None:
        body = {"name": adapter.name, "path": str(adapter.path)}
        reply = await self._connections.send("POST", "/load", body, TIMEOUT_S)
        if not reply.is_success:
            raise SyncFailed(f"{self.name} refused adapter {adapter.name}: {reply.text}")

    async def unload_adapter(self, name: str) -> None:
        await self._connections.send("POST", "/unload", {"name": name}, TIMEOUT_S)

    async def sleep(self) -> None:
        await self._ask("/sleep", {})

    async def wake(self) -> None:
        await self._ask("/wake", {})

    async def aclose(self) -> None:
        await self._connections.aclose()

    async def _ask(self, path: str, body: dict[str, Any]) -> Any:
        reply = await self._connections.send_prompt(path, body, TIMEOUT_S)
        if not reply.is_success:
            kind = EngineFailed if reply.is_server_error else RunFailed
            raise kind(f"{self.name} refused a request: {reply.text}")
        return reply.json()


class FakeLauncher:
    """Starts engine.py."""

    name = "fake"

    def check_machine(self, device: str) -> None:
        """It runs everywhere."""

    def check_sleep(self, device: str, lends: Lent) -> None:
        """It sleeps everywhere, and then refuses all requests."""

    def check_model(
        self,
        model_path: Path,
        device: str,
        rank: int | None,
        lora: LoraConfig | None = None,
        max_images: int = 0,
    ) -> str:
        return ""

    def bf16_reason(self, model_path: Path, device: str) -> str:
        return ""

    def choose_cpu_lora(self, config: TrainConfig, dtype: str, model_path: Path) -> CpuLora:
        return "dense"

    def notes(self, config: TrainConfig, device: str, dtype: str, cpu_lora: CpuLora) -> list[str]:
        return ["the fake engine makes tokens up"]

    def memory(
        self, config: TrainConfig, model_path: Path, device: str, dtype: str, cpu_lora: CpuLora
    ) -> EngineMemory:
        return EngineMemory(
            weights=0, lora_slots=0, activations=0, process=1 << 28, kv_per_token=0, block_size=1
        )

    def command(self, spec: EngineSpec) -> list[str]:
        adapter = [] if spec.fixed_adapter is None else [str(spec.fixed_adapter.path)]
        return [sys.executable, str(SERVER), str(spec.address.socket), *adapter]

    def environment(self, spec: EngineSpec) -> dict[str, str]:
        return {}

    def startup_state(self, log: str) -> str:
        return ""

    def connect(self, spec: EngineSpec) -> FakeEngine:
        return FakeEngine(spec)

    async def check_server(
        self, spec: EngineSpec, lora: LoraConfig, probe: AdapterVersion, tokenizer: ChatTokenizer | None
    ) -> ServerFacts:
        return ServerFacts(base_name=spec.base_name, notes=[])
