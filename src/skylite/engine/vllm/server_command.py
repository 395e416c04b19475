"""vLLM's command line and environment. Only this file and external_server_command.py know its flags.

benchmarks/lora_sampling.py --variant compares other CPU settings on your machine.
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

from skylite.config.engine import CpuLora
from skylite.data.chat_tokenizer import ChatTemplate
from skylite.engine.vllm.plugin import CPU_SERVER, STOCK_SERVER, SWITCH, exit_with_parent
from skylite.engine.vllm.plugin import api_key as api_keys
from skylite.errors import ModelError
from skylite.processes.child_env import FEW_PRODUCTS, INTEL_OPENMP, LOOPBACK_ONLY, preload_env
from skylite.processes.gpus import cuda_env
from skylite.processes.hardware import cpu_cores

RUNTIME_LORA = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
FLASHINFER_SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"
"""vLLM's other sampler. Its kernels are compiled at the start by nvcc, which pip does not install."""
SERVE_MIDDLEWARE = "skylite.engine.vllm.plugin.serve_middleware.RequireKey"
"""By its name: the file imports the HTTP server."""
HEADER_BYTES = 64 << 10
"""Largest request line with its headers that a server of ours takes."""
BASE_NAME = "base"
"""Served name of the model without an adapter."""
CPU_BLOCK_SIZE = 32
"""Tokens per KV cache block; vLLM's CPU default is 128. The samples of a prompt share full blocks only.

Buys time: with 128, sampling gives 24 % fewer tokens per second."""
ENGINE_COMMAND = "SKYLITE_ENGINE_COMMAND"
"""Environment variable for tests: a command to start instead of vLLM, with --uds. The run prints a warning.

See docs/explanation/fault-tolerance.md.
"""
CPU_BATCHED_TOKENS = 2048
"""Tokens per forward pass, vLLM's choice for CPU servers; raised to the longest sequence."""
CPU_CUSTOM_OPS = ("none", "+rms_norm", "+rotary_embedding")
"""Faster decoding: vLLM's own kernels for norms (with our plugin's help) and rotary embeddings.

With adapters vLLM does not compile on a CPU, and by default it still runs these as single torch operations.
Buys time: without the flag, sampling gives 9 % fewer tokens per second.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """The settings of one vLLM server."""

    name: str
    """Its name in logs and errors."""
    model_path: Path
    """Local folder."""
    device: Literal["cpu", "cuda"]
    dtype: Literal["bfloat16", "float32"]
    uds: Path
    """Unix socket to serve on. Its folder needs mode 0700, because some of vLLM's routes ignore API keys."""
    max_lora_rank: int
    """One of vLLM's sizes (config.lora.VLLM_LORA_RANKS)."""
    target_modules: list[str] | None
    """Module names that the adapters change. None: all layers and embeddings, which is slower."""
    max_loras: int
    """Largest number of adapters in one batch."""
    max_cpu_loras: int
    """Adapters kept in CPU memory. More than max_loras, or vLLM reads an evicted adapter from disk again."""
    max_model_len: int
    """Prompt and completion tokens together. -1: what the model was made for and the GPU holds (GPU only)."""
    max_num_seqs: int
    kv_cache_gib: float
    """CPU only."""
    gpu_memory_utilization: float
    """GPU only. vLLM starts only if this share of the GPU is free, even with kv_cache_bytes."""
    kv_cache_bytes: int | None = None
    """GPU only, on each GPU. None: what vLLM finds free within gpu_memory_utilization when it starts."""
    cpu_lora: CpuLora
    """CPU only: how vLLM computes LoRA, see EngineConfig.cpu_lora."""
    enable_lora: bool
    seed: int
    gpus: tuple[int, ...] = ()
    """GPUs by nvidia-smi's numbers; empty: all that the environment makes visible."""
    tensor_parallel: int = 1
    """GPU only: how many of them share the model."""
    shared_network: bool = False
    """TrainConfig.shared_network."""


def engine_command(spec: EngineSpec) -> list[str]:
    """The command line of an engine, which serves on its socket."""
    if command := os.environ.get(ENGINE_COMMAND):
        return [*shlex.split(command), "--uds", str(spec.uds)]
    # vLLM's default logprobs ignore temperature, top-p and top-k. We need those of the sampled distribution.
    return [*_server_command(spec), "--uds", str(spec.uds), "--logprobs-mode", "processed_logprobs"]


def serve_command(
    spec: EngineSpec,
    *,
    adapter_name: str,
    adapter_path: Path,
    port: int,
    host: str = "127.0.0.1",
    template: ChatTemplate | None = None,
) -> list[str]:
    """The command line of `skylite serve`: one fixed adapter, behind an API key (`serve_env`).

    It keeps vLLM's default kind of logprobs. `template`: how chats are rendered; None: as the model says.
    """
    # As JSON: vLLM splits NAME=PATH, and takes a path with a comma for JSON.
    lora = ["--lora-modules", json.dumps({"name": adapter_name, "path": str(adapter_path)})]
    return [
        *_server_command(spec),
        "--host",
        host,
        "--port",
        str(port),
        *lora,
        *(template_flags(template) if template is not None else []),
        "--h11-max-incomplete-event-size",
        str(HEADER_BYTES),
        "--middleware",
        SERVE_MIDDLEWARE,
    ]


def template_flags(template: ChatTemplate) -> list[str]:
    """vLLM's flags for rendering chats with this template. Raises ModelError."""
    flags = []
    if template.text is not None:
        # vLLM takes a text without these characters, or with the name of a file, for a path.
        if "{" not in template.text or os.path.exists(template.text):
            raise ModelError("The run's chat template is a path, not a template.", "Start a new run.")
        flags.append(f"--chat-template={template.text}")
    if template.args:
        flags.append(f"--default-chat-template-kwargs={json.dumps(dict(template.args))}")
    return flags


def _server_command(spec: EngineSpec) -> list[str]:
    command = [sys.executable, "-m", CPU_SERVER if spec.device == "cpu" else STOCK_SERVER]
    command += ["--model", str(spec.model_path), "--served-model-name", BASE_NAME]
    command += ["--dtype", spec.dtype, "--seed", str(spec.seed)]
    command += ["--max-model-len", str(spec.max_model_len), "--max-num-seqs", str(spec.max_num_seqs)]
    # "vllm": ignore the sampling defaults in the model's generation_config.json.
    command += ["--generation-config", "vllm", "--enable-prefix-caching"]
    command += ["--no-trust-remote-code", "--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"]
    command += _memory_flags(spec)
    if spec.enable_lora:
        command += _lora_flags(spec)
    elif spec.device == "cpu":
        # A compiled model samples 4 to 9 % faster, but starts 87 s later, or 55 s with vLLM's cache.
        command.append("--enforce-eager")
    return command


def engine_env(spec: EngineSpec, base_env: Mapping[str, str]) -> dict[str, str]:
    """`base_env` and the environment variables that an engine needs."""
    env = {
        **base_env,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        exit_with_parent.SWITCH: "1",
        **LOOPBACK_ONLY,
        "VLLM_HOST_IP": "127.0.0.1",
        # Overrides the user's own vLLM settings: our client sends no key, `skylite serve` checks its key
        # itself, and development routes ignore the key.
        api_keys.KEY_VARIABLE: "",
        "VLLM_SERVER_DEV_MODE": "0",
    }
    if spec.enable_lora:
        env[RUNTIME_LORA] = "1"
    if spec.device == "cpu":
        env |= _cpu_env(spec, base_env)
    else:
        env.setdefault(FLASHINFER_SAMPLER, os.environ.get(FLASHINFER_SAMPLER, "0"))
    return env | cuda_env(spec.gpus)


def serve_env(spec: EngineSpec, base_env: Mapping[str, str], api_key: str) -> dict[str, str]:
    """The environment of `skylite serve`: with an API key, without adapter routes (some ignore the key)."""
    return {**engine_env(spec, base_env), RUNTIME_LORA: "0", api_keys.SERVER_VARIABLE: api_key}


def worker_cpus() -> list[int]:
    """The first hardware thread of every core of this process. A second one does not help matrix products."""
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
        # Chunked prefill of a seeded request kills the CPU engine of vLLM 0.32:
        # "CPU Generator does not use offset".
        return [
            *flags,
            "--no-enable-chunked-prefill",
            "--max-num-batched-tokens",
            str(max(CPU_BATCHED_TOKENS, spec.max_model_len)),
        ]
    flags = ["--tensor-parallel-size", str(spec.tensor_parallel)]
    flags += ["--gpu-memory-utilization", str(spec.gpu_memory_utilization)]
    if spec.kv_cache_bytes is not None:
        flags += ["--kv-cache-memory-bytes", str(spec.kv_cache_bytes)]
    return flags


def _lora_flags(spec: EngineSpec) -> list[str]:
    flags = ["--enable-lora", "--max-lora-rank", str(spec.max_lora_rank)]
    flags += ["--max-loras", str(spec.max_loras), "--max-cpu-loras", str(spec.max_cpu_loras)]
    if spec.device == "cpu":
        flags += ["--compilation-config", json.dumps({"custom_ops": CPU_CUSTOM_OPS})]
    # Names can come from a downloaded adapter or model, and vLLM would parse such a name as a flag.
    if flag_like := [name for name in spec.target_modules or [] if name.startswith("-")]:
        raise ModelError(
            f"{flag_like[0]!r} is not a valid module name: vLLM would parse it as a flag.",
            "Use another adapter or model.",
        )
    return flags + (["--lora-target-modules", *spec.target_modules] if spec.target_modules else [])


def _cpu_env(spec: EngineSpec, base_env: Mapping[str, str]) -> dict[str, str]:
    # Bind all cores by number: "auto" reserves one for the scheduler, which is half of a 2-core machine.
    env = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, worker_cpus()))}
    env[SWITCH] = spec.cpu_lora
    if spec.dtype == "bfloat16":
        env |= FEW_PRODUCTS
    # vLLM refuses two OpenMP runtimes in one process, so a runtime that the user preloads stays.
    return env | preload_env([INTEL_OPENMP], base_env, "libgomp", "libomp", "libiomp")
