"""The vLLM server of `eval`, `serve`, `chat` and `export`: the adapters of one run, or the base."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from skylite.adapters.folder import ServedAdapter
from skylite.config.lora import served_rank
from skylite.config.train import TrainConfig
from skylite.engine.client import VllmClient
from skylite.engine.cpu_lora import choose_cpu_lora
from skylite.engine.retrying_client import Engine
from skylite.engine.servable_models import check_build, check_lora, check_torchvision
from skylite.engine.server_command import EngineSpec
from skylite.engine.start_engines import serving_engines
from skylite.engine.watchdog import RestartPolicy
from skylite.processes.gpus import visible_gpus
from skylite.processes.hardware import choose_device, choose_dtype
from skylite.processes.supervisor import Supervisor
from skylite.processes.temporary_folder import temporary_folder
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
    dtype = choose_dtype(config.model.dtype, device)[0]
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
        gpus=tuple(g.index for g in visible_gpus()[:1]) if device == "cuda" else (),
    )


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
