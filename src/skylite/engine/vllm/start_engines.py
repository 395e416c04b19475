"""Starts the run's vLLM servers next to the trainer, for the LoRA rank and modules of its adapters.

Starting them next to the trainer buys 14 s of start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

from skylite.config.train import RunConfig
from skylite.engine.retrying_client import Engine
from skylite.engine.vllm.server_command import EngineSpec
from skylite.engine.watchdog import RestartPolicy, Watchdog
from skylite.processes.child import Supervisor
from skylite.processes.private_folders import temporary_folder

logger = logging.getLogger(__name__)
MAX_LORAS = 2
"""Version k, and version k + 1 while requests for k are in flight."""


@asynccontextmanager
async def start_engines(
    run_config: RunConfig,
    logs: Path,
    target_modules: list[str],
    supervisor: Supervisor,
    restarts: RestartPolicy,
) -> AsyncIterator[list[Watchdog]]:
    """Start the engines and yield their watchdogs at once; `engines_kept_alive` waits until they serve.

    The supervisor stops the processes.
    """
    with temporary_folder() as sockets:
        specs = [
            engine_spec(run_config, target_modules, index, sockets)
            for index in range(run_config.config.engine.num_engines)
        ]
        yield [Watchdog.start(spec, logs, supervisor, restarts) for spec in specs]


@asynccontextmanager
async def engines_for_modules(
    run_config: RunConfig,
    logs: Path,
    watchdogs: Sequence[Watchdog],
    supervisor: Supervisor,
    *,
    started_for: list[str],
    wanted: list[str],
) -> AsyncIterator[list[Engine]]:
    """Yield the engines once they serve. Restarts them unless they were started for the `wanted` modules."""
    if started_for == wanted or not watchdogs:
        async with engines_kept_alive(watchdogs, supervisor) as engines:
            yield engines
        return
    logger.info(
        f"vLLM was started for LoRA on {', '.join(started_for)}, but the adapter is on {', '.join(wanted)}: "
        "vLLM restarts"
    )
    for watchdog in watchdogs:
        supervisor.stop_child(watchdog.spec.name)
    async with (
        start_engines(run_config, logs, wanted, supervisor, watchdogs[0].restarts) as others,
        engines_kept_alive(others, supervisor) as engines,
    ):
        yield engines


@asynccontextmanager
async def engines_kept_alive(
    watchdogs: Sequence[Watchdog], supervisor: Supervisor
) -> AsyncIterator[list[Engine]]:
    """Yield the engines once all serve, and restart any that fails.

    The supervisor receives the error of an engine that may not restart again.
    """
    engines = await asyncio.gather(*(watchdog.wait_ready() for watchdog in watchdogs))
    tasks = [
        asyncio.ensure_future(watchdog.keep_alive(engine))
        for watchdog, engine in zip(watchdogs, engines, strict=True)
    ]
    for task in tasks:
        task.add_done_callback(partial(_report_failure, supervisor))
    try:
        yield engines
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for engine in engines:
            await engine.aclose()


def _report_failure(supervisor: Supervisor, task: asyncio.Future[NoReturn]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        supervisor.fail(error)


@asynccontextmanager
async def serving_engines(
    specs: list[EngineSpec], logs: Path, supervisor: Supervisor, restarts: RestartPolicy
) -> AsyncIterator[list[Engine]]:
    """Start engines, yield them once all serve, and keep them alive."""
    async with engines_kept_alive(
        [Watchdog.start(spec, logs, supervisor, restarts) for spec in specs], supervisor
    ) as engines:
        yield engines


def engine_spec(run_config: RunConfig, target_modules: list[str], index: int, sockets: Path) -> EngineSpec:
    """The settings of one engine. `sockets` needs mode 0700: some of vLLM's routes ignore API keys."""
    config, resolved = run_config.config, run_config.resolved
    size = config.engine.tensor_parallel
    return EngineSpec(
        name=f"vllm-{index}",
        model_path=Path(resolved.model_path),
        device=resolved.device,
        dtype=resolved.dtype,
        uds=sockets / f"vllm-{index}.sock",
        max_lora_rank=config.lora.vllm_rank,
        target_modules=target_modules,
        max_loras=MAX_LORAS,
        max_cpu_loras=MAX_LORAS + 1,
        max_model_len=config.max_sequence_tokens,
        max_num_seqs=config.engine.max_num_seqs,
        kv_cache_gib=config.engine.kv_cache_gib,
        gpu_memory_utilization=resolved.engine_share or config.engine.gpu_memory_utilization,
        cpu_lora=resolved.cpu_lora,
        enable_lora=True,
        seed=config.seed,
        shared_network=config.shared_network,
        kv_cache_bytes=resolved.kv_cache_bytes,
        gpus=tuple(resolved.engine_gpus[index * size : (index + 1) * size]),
        tensor_parallel=size,
    )
