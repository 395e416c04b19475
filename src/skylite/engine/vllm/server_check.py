"""Ask a running `vllm serve`, which skylite did not start, for all that a run needs of it.

Nothing is assumed: an adapter like those of the run is loaded, sampled from, scored with and unloaded. A
server does not tell its weights and their type: the canary of the first adapter finds others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from skylite.config.lora import LoraConfig
from skylite.data.chat_tokenizer import ChatTokenizer
from skylite.engine.connections import Connections
from skylite.engine.interface import EngineSpec, Sampling, ServerFacts
from skylite.engine.same_tokenizer import tokenizer_difference
from skylite.engine.vllm.client import VllmClient, load_request, reason
from skylite.engine.vllm.memory import served_rank
from skylite.engine.vllm.models import check_lora, tested_version
from skylite.errors import ConfigError, EngineFailed, RunFailed
from skylite.notes import Note, notes_of, warning
from skylite.run.run_dir import AdapterVersion
from skylite.types import EncodedPrompt
from skylite.untrusted_text import plain

RUNTIME_LORA = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
TIMEOUT_S = 30.0
"""For what the server answers without its engine. One that starts listens before it answers."""
LOAD_TIMEOUT_S = 120.0
"""For loading an adapter, and for sampling. A server that works on other requests takes some seconds."""
PROMPT = EncodedPrompt((1, 2, 3))
GREEDY = Sampling(
    temperature=1.0, top_p=1.0, top_k=1, max_tokens=8, stop_token_ids=(), ignore_eos=True, seed=0
)
"""Of one candidate a token the logprob is 0 after top-k, which is what a run needs, and less before it."""
LARGEST_LOGPROB = 1e-3
IF_NOT_SEEN = (
    "Share that folder with its machine at the same path, readable for the engine's user, or choose one that "
    "is so (lora.lora_sync_path). Where there is none, push adapters (engine.push_urls)."
)
_MAX_LORAS = re.compile(r'^vllm:lora_requests_info\{[^}]*max_lora="(\d+)"', re.MULTILINE)


class _Model(BaseModel):
    model_config = ConfigDict(strict=True)

    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _Models(BaseModel):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class ServerCheck:
    """One server, and what it is asked with."""

    spec: EngineSpec
    lora: LoraConfig
    probe: AdapterVersion
    """An adapter like those of the run, in their folder."""
    start: str
    """A command that starts such a server, for messages."""

    @property
    def name(self) -> str:
        return self.spec.name

    async def facts(self, tokenizer: ChatTokenizer | None) -> ServerFacts:
        """What the server is. Raises ConfigError or ModelError with the first thing that is missing.

        `tokenizer`: None: it is not compared.
        """
        connections = Connections(self.name, self.spec.address)
        try:
            base = await self._base(connections)
            version, notes = await self._version(connections)
            if tokenizer is not None:
                await self._compare(connections, base.id, tokenizer)
            client = VllmClient(self.name, self.spec.address, LOAD_TIMEOUT_S, base_name=base.id)
            try:
                await self._load(connections)
                await self._sample(client)
                await self._check_max_loras(connections)
            finally:
                with suppress(RunFailed):
                    await client.unload_adapter(self.probe.name)
                await client.aclose()
        except EngineFailed as error:
            raise ConfigError(
                error.what, f"Start it so, or leave it out of engine.urls: {self.start}"
            ) from None
        finally:
            await connections.aclose()
        longest = f"up to {base.max_model_len:,} tokens" if base.max_model_len else "of unknown length"
        text = f"{self.name}: vLLM {version} serves {plain(base.id)}, {longest}, and loads the run's adapters"
        return ServerFacts(base_name=base.id, notes=[*notes_of(text), *notes])

    async def _base(self, connections: Connections) -> _Model:
        """The model without an adapter."""
        reply = await connections.send("GET", "/v1/models", timeout_s=TIMEOUT_S)
        if reply.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            does = "refuses the key of" if self.spec.address.token else "asks for a key, and gets none by"
            raise ConfigError(
                f"{self.name} {does} engine.key_env (HTTP {reply.status_code}).",
                "Export its key (VLLM_API_KEY or --api-key there) as a variable, and name that variable.",
            )
        try:
            models = _Models.model_validate_json(reply.content).data if reply.is_success else []
        except ValidationError:
            models = []
        base = next((model for model in models if model.parent is None), None)
        if base is None:
            raise ConfigError(
                f"{self.name} does not answer as vLLM: /v1/models (HTTP {reply.status_code}) lists no model.",
                f"Start one: {self.start}",
            )
        if base.max_model_len is not None and base.max_model_len < self.spec.max_model_len:
            raise ConfigError(
                f"{self.name} takes {base.max_model_len:,} tokens, and a sequence of this run may have "
                f"{self.spec.max_model_len:,}.",
                f"Start it with --max-model-len {self.spec.max_model_len}, or lower "
                "rollout.max_completion_tokens.",
            )
        return base

    async def _version(self, connections: Connections) -> tuple[str, list[Note]]:
        """Its version, with a warning if skylite was not tested with it.

        Another version is no reason to refuse: what a run needs of it is tried here, and the canary compares
        every adapter. Raises ModelError for what the version cannot serve.
        """
        reply = await connections.send("GET", "/version", timeout_s=TIMEOUT_S)
        try:
            version = plain(str(reply.json()["version"]))
        except (ValueError, KeyError, TypeError):
            return "of unknown version", [warning(f"{self.name} does not tell its version (/version)")]
        release, tested = version.partition("+")[0], tested_version()
        note = check_lora(self.spec.model_path, self.spec.device, self.lora, version=release)
        return version, [warning(f"{self.name}: {note}")] if release != tested else notes_of(note)

    async def _compare(self, connections: Connections, model: str, tokenizer: ChatTokenizer) -> None:
        """It turns sampled tokens into the text that the reward gets."""

        async def ask(route: str, body: Mapping[str, Any], field: str) -> Any:
            reply = await connections.send("POST", f"/{route}", {"model": model, **body}, TIMEOUT_S)
            try:
                return reply.json()[field]
            except (ValueError, KeyError, TypeError):
                raise EngineFailed(
                    f"{self.name} gives no {field} at /{route} (HTTP {reply.status_code})."
                ) from None

        if how := await tokenizer_difference(ask, tokenizer):
            raise ConfigError(
                f"{self.name} has another tokenizer than {tokenizer.model_path.name}: it {how}.",
                f"Serve the run's model: {self.start}",
            )

    async def _load(self, connections: Connections) -> None:
        async def post(body: dict[str, Any]) -> httpx.Response:
            return await connections.send("POST", "/v1/load_lora_adapter", body, LOAD_TIMEOUT_S)

        if (await post({})).status_code == httpx.codes.NOT_FOUND:  # only runtime updating has the route
            raise ConfigError(
                f"{self.name} cannot load adapters while it runs ({RUNTIME_LORA} is not set there).",
                f"Start it so: {self.start}",
            )
        reply = await post(load_request(self.probe))
        if reply.is_success:
            return
        why = plain(reason(reply)).rstrip(".")
        refused = reply.status_code in (httpx.codes.NOT_FOUND, httpx.codes.BAD_REQUEST)
        if refused or "Permission denied" in why:
            whose, remedy = "the run's folder of adapters", IF_NOT_SEEN
            if self.spec.receiver is not None:
                whose, remedy = (
                    "its receiver's folder",
                    "Start `skylite receive` beside it, as the same user.",
                )
            raise ConfigError(
                f"{self.name} does not see {whose}, {self.probe.path.parent} (HTTP {reply.status_code}: "
                f"{why}).",
                remedy,
            )
        if "max_lora_rank" in why:
            raise ConfigError(
                f"{self.name} takes no LoRA of rank {self.lora.max_rank}: {why}.",
                f"Start it with --max-lora-rank {served_rank(self.lora.max_rank)}, or lower lora.rank.",
            )
        raise ConfigError(
            f"{self.name} does not load an adapter like this run's: {why}.", f"Start it so: {self.start}"
        )

    async def _sample(self, client: VllmClient) -> None:
        """Sample from the adapter, and score with it."""
        try:
            (call,) = await client.generate(self.probe.name, PROMPT, 1, GREEDY, self.probe.version)
            await client.score(self.probe.name, PROMPT)
        except EngineFailed:
            raise
        except RunFailed as error:
            raise ConfigError(error.what, f"Start it so: {self.start}") from None
        logprobs = () if call is None else call.sampling_logprobs
        if not logprobs or max(map(abs, logprobs)) > LARGEST_LOGPROB:
            raise ConfigError(
                f"{self.name} gives logprobs from before temperature, top-p and top-k, and a run needs those "
                "of the distribution that was sampled from.",
                "Start it with --logprobs-mode processed_logprobs.",
            )

    async def _check_max_loras(self, connections: Connections) -> None:
        """vLLM tells it after the first request with an adapter."""
        told = _MAX_LORAS.search((await connections.send("GET", "/metrics", timeout_s=TIMEOUT_S)).text)
        most = self.spec.max_loras
        if told is not None and int(told[1]) < most:
            raise ConfigError(
                f"{self.name} samples from {told[1]} adapter(s) at once, and this run from {most} "
                "(rollout.max_staleness).",
                f"Start it with --max-loras {most} --max-cpu-loras {most + 1}.",
            )
