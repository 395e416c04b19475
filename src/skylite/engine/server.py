"""vLLM's command line and environment: the only file that knows its flags.

Binding all cores by number and the Intel OpenMP runtime were the fastest of the CPU settings on a Zen 4 machine in bfloat16;
benchmarks/lora_sampling.py --variant compares others on the machine at hand.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from skylite.config.train import CpuLora
from skylite.errors import ModelError
from skylite.processes.machine import LOOPBACK_ONLY, cpu_cores, total_memory
from skylite.processes.preload import INTEL_OPENMP, has_library, preload_env
from skylite.vllm_plugin import CPU_SERVER, STOCK_SERVER, SWITCH, key, lifetime

RUNTIME_LORA = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
BASE_NAME = "base"
"""Served name of the model without an adapter."""
CPU_BLOCK_SIZE = 32
"""Tokens a KV cache block. Only whole blocks are shared between samples of a prompt, and vLLM's CPU default is 128."""
ENGINE_COMMAND = "SKYLITE_ENGINE_COMMAND"
"""For tests alone: a command that is started instead of vLLM, with --uds (docs/explanation/fault-tolerance.md). The run says so."""
CPU_BATCHED_TOKENS = 2048
"""Tokens of one forward pass, as vLLM chooses for CPU servers; never less than a whole prompt."""
CPU_CUSTOM_OPS = ("none", "+rms_norm", "+rotary_embedding")
"""Operations by vLLM's own kernels (the norms with our plugin's help): with adapters vLLM compiles nothing on a CPU, and takes torch's
operations one by one all the same."""
MERGED_MEMORY = 3.0
"""Bytes that merged weights take for each byte of a bfloat16 model's files: a copy as they are and a float32 one with the adapter in it."""
MERGED_MEMORY_SHARE = 0.25
"""Of the machine's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One vLLM server."""

    name: str
    """As logs and errors call it."""
    model_path: Path
    """Local folder."""
    device: Literal["cpu", "cuda"]
    dtype: Literal["bfloat16", "float32"]
    uds: Path
    """Unix socket it serves on. Its folder should be 0700: some of vLLM's routes ignore an API key."""
    max_lora_rank: int
    """One of vLLM's sizes (config.VLLM_LORA_RANKS)."""
    target_modules: list[str] | None
    """Module names the adapters change; None makes vLLM reserve LoRA for every layer, embeddings included, which costs speed."""
    max_loras: int
    """Adapters that can be in one batch."""
    max_cpu_loras: int
    """Adapters kept in memory; above max_loras, or an evicted one is read from disk again."""
    max_model_len: int
    """Prompt and completion tokens together."""
    max_num_seqs: int
    kv_cache_gib: float
    """CPU only."""
    gpu_memory_utilization: float
    """GPU only."""
    cpu_lora: CpuLora
    """CPU only: how LoRA is computed, see EngineConfig.cpu_lora."""
    enable_lora: bool
    seed: int
    gpus: tuple[int, ...] = ()
    """Device indices; empty: those the environment shows."""


def engine_command(spec: EngineSpec) -> list[str]:
    """The argument vector that starts a server for us, on its socket."""
    if command := os.environ.get(ENGINE_COMMAND):
        return [*shlex.split(command), "--uds", str(spec.uds)]
    # vLLM's default is logprobs before temperature, top-p and top-k: not those of the distribution that tokens were drawn from.
    return [*_server_command(spec), "--uds", str(spec.uds), "--logprobs-mode", "processed_logprobs"]


def serve_command(spec: EngineSpec, *, adapter_name: str, adapter_path: Path, port: int) -> list[str]:
    """A server for people: one fixed adapter, on 127.0.0.1 with a key (`serve_env`) instead of the socket, vLLM's own kind of logprobs."""
    lora = ["--lora-modules", f"{adapter_name}={adapter_path}"]
    return [
        *_server_command(spec),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *lora,
        "--middleware",
        f"{key.__name__}.RequireKey",
    ]


def _server_command(spec: EngineSpec) -> list[str]:
    command = [sys.executable, "-m", CPU_SERVER if spec.device == "cpu" else STOCK_SERVER]
    command += ["--model", str(spec.model_path), "--served-model-name", BASE_NAME]
    command += ["--dtype", spec.dtype, "--seed", str(spec.seed)]
    command += ["--max-model-len", str(spec.max_model_len), "--max-num-seqs", str(spec.max_num_seqs)]
    # "vllm": sampling defaults come from the request alone, not from the model's generation_config.json.
    command += ["--generation-config", "vllm", "--enable-prefix-caching"]
    command += ["--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"]
    return command + _memory_flags(spec) + (_lora_flags(spec) if spec.enable_lora else [])


def engine_env(spec: EngineSpec, base_env: Mapping[str, str]) -> dict[str, str]:
    """`base_env` and what vLLM needs on top of it."""
    env = {
        **base_env,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        lifetime.SWITCH: "1",
        **LOOPBACK_ONLY,
        "VLLM_HOST_IP": "127.0.0.1",
        # What the user set for servers of their own: our client sends no key, and the development routes take none.
        key.KEY_VARIABLE: "",
        "VLLM_SERVER_DEV_MODE": "0",
    }
    if spec.enable_lora:
        env[RUNTIME_LORA] = "1"
    if spec.device == "cpu":
        env |= _cpu_env(spec, base_env)
    if spec.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, spec.gpus))
    return env


def serve_env(spec: EngineSpec, base_env: Mapping[str, str], api_key: str) -> dict[str, str]:
    """The same for a server for people: with the key, and without the routes that load adapters, some of which take none."""
    return {**engine_env(spec, base_env), RUNTIME_LORA: "0", key.KEY_VARIABLE: api_key}


def choose_cpu_lora(
    setting: CpuLora | Literal["auto"], dtype: str, model_path: Path, *, deterministic: bool = False
) -> CpuLora:
    """What `auto` is for this model on this machine: merged weights where they are exact and take no more than a quarter of its memory.

    Never where the same bits are asked for every time: whether a batch finds its version merged depends on what came before it, and
    when (`vllm_plugin/merged.py`).
    """
    if setting != "auto":
        return setting
    if deterministic:
        return "dense"
    files = sum(file.stat().st_size for file in model_path.glob("*.safetensors"))
    return (
        "merged"
        if dtype == "float32" and files * MERGED_MEMORY <= total_memory() * MERGED_MEMORY_SHARE
        else "dense"
    )


def engine_notes(
    device: str,
    dtype: str,
    setting: CpuLora | Literal["auto"],
    chosen: CpuLora,
    *,
    deterministic: bool = False,
) -> list[str]:
    """What makes a LoRA server slower than it could be, in words for the user; empty when nothing does."""
    notes = []
    if command := os.environ.get(ENGINE_COMMAND):
        notes.append(
            f"warning: {ENGINE_COMMAND} is set: {command} samples instead of vLLM; this is for tests alone"
        )
    if device != "cpu":
        return notes
    if not has_library(INTEL_OPENMP):
        notes.append(
            f"{INTEL_OPENMP} was not found, so vLLM starts and may sample slower; `pip install intel-openmp` brings it."
        )
    if chosen == "dense" and setting == "auto":
        why = (
            "bfloat16 sums would round the adapter away"
            if dtype == "bfloat16"
            else "their copy would take over a quarter of the memory"
        )
        if deterministic:
            why = "whether a batch finds them made depends on time (trainer.deterministic)"
        notes.append(
            f"vLLM computes LoRA beside the base (engine.cpu_lora=dense): merged weights sample about 10 % faster, but {why}."
        )
    if chosen == "merged" and dtype == "bfloat16":
        notes.append(
            "engine.cpu_lora=merged works in float32 alone; the engine computes in bfloat16, so it does as with dense."
        )
    if chosen == "stock":
        notes.append(
            "engine.cpu_lora=stock: LoRA sampling is several times slower, and base requests in a mixed batch are wrong."
        )
    return notes


def worker_cpus() -> list[int]:
    """The first hardware thread of every core this process may use: matrix products gain nothing from a core's second one."""
    allowed = os.sched_getaffinity(0)
    return sorted({min(_siblings(cpu) & allowed) for cpu in allowed})[: cpu_cores()]


def _siblings(cpu: int) -> set[int]:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    if not path.exists():
        return {cpu}
    found = {cpu}
    for part in path.read_text(encoding="ascii").strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _memory_flags(spec: EngineSpec) -> list[str]:
    if spec.device == "cpu":
        flags = [
            "--block-size",
            str(CPU_BLOCK_SIZE),
            "--kv-cache-memory-bytes",
            str(int(spec.kv_cache_gib * 2**30)),
        ]
        # A seeded request whose prefill is cut in two kills vLLM 0.32's CPU engine ("CPU Generator does not use offset").
        return [
            *flags,
            "--no-enable-chunked-prefill",
            "--max-num-batched-tokens",
            str(max(CPU_BATCHED_TOKENS, spec.max_model_len)),
        ]
    return ["--gpu-memory-utilization", str(spec.gpu_memory_utilization)]


def _lora_flags(spec: EngineSpec) -> list[str]:
    flags = ["--enable-lora", "--max-lora-rank", str(spec.max_lora_rank)]
    flags += ["--max-loras", str(spec.max_loras), "--max-cpu-loras", str(spec.max_cpu_loras)]
    if spec.device == "cpu":
        flags += ["--compilation-config", json.dumps({"custom_ops": CPU_CUSTOM_OPS})]
    # The names can come out of an adapter or a model that somebody gave away, and vLLM would take such a one for a setting.
    if taken := [name for name in spec.target_modules or [] if name.startswith("-")]:
        raise ModelError(
            f"{taken[0]!r} is no name of a module that vLLM could adapt.", "Use another adapter or model."
        )
    return flags + (["--lora-target-modules", *spec.target_modules] if spec.target_modules else [])


def _cpu_env(spec: EngineSpec, base_env: Mapping[str, str]) -> dict[str, str]:
    # All cores by number: "auto" keeps one for the scheduler, half of a small machine.
    env = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, worker_cpus()))}
    env[SWITCH] = spec.cpu_lora
    # Two OpenMP runtimes in one process do not get along (vLLM refuses it), so one that the user preloads stays.
    return env | preload_env([INTEL_OPENMP], base_env, "libgomp", "libomp", "libiomp")
