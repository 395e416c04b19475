"""A real vLLM CPU server for tests, and random PEFT adapters to load into it."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import torch
from safetensors.torch import save_file

from skylite.config.engine import CpuLora
from skylite.engine.connections import Address
from skylite.engine.interface import BASE_NAME, EngineSpec
from skylite.engine.vllm.launcher import VllmLauncher
from skylite.hub.quantised import widened_shapes
from skylite.hub.resolve import tensor_shapes
from skylite.hub.text_model import quantised_format
from skylite.processes.child import Child, ProcessSpec, child_died, kill, poll, start

TARGET_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EMBEDDING_AND_HEAD = ["embed_tokens", "lm_head"]
MAX_LORA_RANK = 8
START_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion: what was sampled and its logprobs."""

    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: greedy, of exactly `max_tokens` tokens.

    A `salt` keeps it from sharing cache blocks with requests of another salt.
    """

    model: str
    prompt: list[int]
    max_tokens: int = 48
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class EngineServer:
    """A running server. `http` talks to it over its Unix socket."""

    model_path: Path
    address: Address
    http: httpx.Client
    base: str = BASE_NAME

    def load(self, name: str, path: Path) -> httpx.Response:
        """POST /v1/load_lora_adapter."""
        body = {"lora_name": name, "lora_path": str(path), "is_3d_lora_weight": True}
        return self.http.post("/v1/load_lora_adapter", json=body)

    def unload(self, name: str) -> httpx.Response:
        """POST /v1/unload_lora_adapter."""
        return self.http.post("/v1/unload_lora_adapter", json={"lora_name": name})

    def ask(self, ask: Ask) -> Answer:
        """The answer to one request; any HTTP error raises."""
        body: dict[str, Any] = {
            "model": ask.model,
            "prompt": ask.prompt,
            "max_tokens": ask.max_tokens,
            "temperature": 0.0,
        }
        body |= {"ignore_eos": True, "logprobs": 0, "return_token_ids": True} | (
            {"cache_salt": ask.salt} if ask.salt else {}
        )
        reply = self.http.post("/v1/completions", json=body).raise_for_status().json()
        choice = reply["choices"][0]
        return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"])

    def ask_together(self, asks: Sequence[Ask]) -> list[Answer]:
        """The answers to requests sent at once, so that vLLM decodes them in one batch."""
        with ThreadPoolExecutor(len(asks)) as pool:
            return list(pool.map(self.ask, asks))


@contextmanager
def running_server(
    model_path: Path,
    *,
    cpu_lora: CpuLora = "merged",
    target_modules: list[str] | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    env: Mapping[str, str] | None = None,
    max_images: int = 0,
) -> Iterator[EngineServer]:
    """Start a server for a tiny model (two adapters in a batch, rank up to 8), yield it when it serves, kill
    it at the end. With `max_images`, adapters may change what reads images.
    """
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        spec = EngineSpec(
            name="vllm-test",
            model_path=model_path,
            device="cpu",
            dtype=dtype,
            address=Address.of_socket(Path(folder, "vllm.sock")),
            lora_rank=MAX_LORA_RANK,
            target_modules=target_modules or TARGET_MODULES,
            max_loras=2,
            max_model_len=1024,
            max_num_seqs=32,
            kv_cache_gib=0.25,
            gpu_memory_utilization=0.5,
            cpu_lora=cpu_lora,
            seed=0,
            max_images=max_images,
            tower_lora=max_images > 0,
        )
        child = start(
            ProcessSpec(
                name=spec.name,
                argv=VllmLauncher().command(spec),
                env={**(env or {}), **VllmLauncher().environment(spec)},
                log_path=Path(folder, "vllm.log"),
                own_network=True,  # as in a run
            )
        )
        try:
            with spec.address.client(120.0) as http:
                _wait_ready(child, http)
                yield EngineServer(model_path, spec.address, http)
        finally:
            kill(child)


def write_random_adapter(
    folder: Path,
    model_path: Path,
    *,
    rank: int = 4,
    seed: int = 1,
    scale: float = 0.5,
    target_modules: Sequence[str] = TARGET_MODULES,
) -> Path:
    """A PEFT folder with Gaussian A and B (B is not zero), alpha = 2 * rank.

    `scale` is the update's size relative to random weights'.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    form = quantised_format(model_path)
    shapes = tensor_shapes(model_path) if form is None else widened_shapes(form, model_path)
    for name, shape in sorted(shapes.items()):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in target_modules:
            tensors |= _random_pair(f"base_model.model.{module}", shape, rank, scale, generator)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model_path),
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(target_modules),
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _random_pair(
    module: str, shape: Sequence[int], rank: int, scale: float, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """PEFT's two tensors of one layer; an embedding's weight is [vocabulary, hidden], and its A is looked up
    by token.
    """
    embedding = module.endswith("embed_tokens")
    outputs, inputs = reversed(shape) if embedding else shape
    a = torch.randn(rank, inputs, generator=generator) / (1.0 if embedding else inputs**0.5)
    b = torch.randn(outputs, rank, generator=generator) * (scale / rank**0.5)
    names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
    return {f"{module}.{names[0]}": a, f"{module}.{names[1]}": b}


def _wait_ready(child: Child, http: httpx.Client) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        if poll(child) is not None:
            error = child_died(child)
            raise RuntimeError(f"{error}\n{error.log_tail}")
        try:
            if http.get("/health").status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"vLLM did not serve within {START_TIMEOUT_S:.0f} s:\n{child_died(child).log_tail}"
            )
        time.sleep(0.2)
