"""The vLLM server of `eval`, `serve`, `chat` and `export`: the adapters of one run, or the base."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from skylite.adapters.folder import ServedAdapter
from skylite.config.loading import change_config
from skylite.config.lora import served_rank
from skylite.config.provenance import Provenance
from skylite.config.train import TrainConfig
from skylite.engine.retrying_client import Engine
from skylite.engine.tensor_parallel import SETTING, check_divisible, check_machine
from skylite.engine.vllm.client import VllmClient
from skylite.engine.vllm.context_length import check_context
from skylite.engine.vllm.cpu_lora import choose_cpu_lora
from skylite.engine.vllm.servable_models import check_build, check_lora, check_torchvision
from skylite.engine.vllm.server_command import EngineSpec
from skylite.engine.vllm.start_engines import serving_engines
from skylite.engine.watchdog import RestartPolicy
from skylite.processes.child import Supervisor
from skylite.processes.gpus import describe, visible_gpus
from skylite.processes.hardware import choose_device, choose_dtype
from skylite.processes.own_network import check_network
from skylite.processes.private_folders import temporary_folder
from skylite.run.run_dir import AdapterVersion

logger = logging.getLogger(__name__)
T = TypeVar("T")


def single_engine_spec(
    config: TrainConfig, adapter: ServedAdapter | None, model_path: Path, uds: Path, *, max_loras: int = 1
) -> EngineSpec:
    """An engine for adapters like this one, `max_loras` at once. Without one: for the base, LoRA disabled.

    Raises SkyliteError.
    """
    device = choose_device()
    check_build(device)
    check_torchvision()
    if adapter is not None and (note := check_lora(model_path, device)):
        logger.info(note)
    check_context(config, model_path)
    dtype = choose_dtype(config.model.dtype, device, lora=adapter is not None)[0]
    if device == "cuda":
        check_network(config, ranks=False)
    gpus = _gpus(config.engine.tensor_parallel, model_path) if device == "cuda" else ()
    if device == "cpu" and config.engine.tensor_parallel > 1:
        logger.info(f"{SETTING}={config.engine.tensor_parallel} is for GPUs: one vLLM process uses this CPU")
    return EngineSpec(
        name="vllm",
        model_path=model_path,
        device=device,
        dtype=dtype,
        uds=uds,
        max_lora_rank=served_rank(adapter.rank if adapter is not None else 1),
        target_modules=adapter.target_modules if adapter is not None else None,
        max_loras=max_loras,
        max_cpu_loras=max_loras + 1,
        max_model_len=config.max_sequence_tokens,
        max_num_seqs=config.engine.max_num_seqs,
        kv_cache_gib=config.engine.kv_cache_gib,
        gpu_memory_utilization=config.engine.gpu_memory_utilization,
        cpu_lora=choose_cpu_lora(config.engine.cpu_lora, dtype, model_path),
        enable_lora=adapter is not None,
        seed=config.seed,
        shared_network=config.shared_network,
        gpus=gpus,
        tensor_parallel=max(1, len(gpus)),
    )


def _gpus(count: int, model_path: Path) -> tuple[int, ...]:
    """The first visible GPUs. Raises ConfigError if there are fewer or the model cannot be divided so."""
    visible = visible_gpus()
    check_machine(count, len(visible), describe(visible))
    check_divisible(model_path, count)
    return tuple(gpu.index for gpu in visible[:count])


def engine_config(adapter: ServedAdapter, provenance: Provenance) -> TrainConfig:
    """The settings of the adapter's run, or the defaults, with what the user typed. Raises ConfigError."""
    config = adapter.run_config.config if adapter.run_config is not None else TrainConfig()
    return change_config(config, provenance) if provenance.typed else config


async def run_on_engine(
    config: TrainConfig, make_spec: Callable[[Path], EngineSpec], work: Callable[[Engine], Awaitable[T]]
) -> T:
    """Start an engine, await `work` on it, and end it. `make_spec` gets the path of its socket.

    An engine that dies restarts with its adapters, as in a run.
    """
    restarts = RestartPolicy(config=config.engine, verify=_skip_verification, counts={})
    with temporary_folder() as folder:
        async with Supervisor() as supervisor:
            spec = make_spec(folder / "vllm.sock")

            async def run() -> T:
                async with serving_engines([spec], folder, supervisor, restarts) as engines:
                    return await work(engines[0])

            running = asyncio.ensure_future(run())
            watching = asyncio.ensure_future(supervisor.watch())
            await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                running.cancel()
                watching.result()
            watching.cancel()
            return running.result()


async def _skip_verification(client: VllmClient, adapter: AdapterVersion) -> None:
    """An adapter from elsewhere has no canary to verify against."""
