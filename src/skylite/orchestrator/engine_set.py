"""The run's vLLM servers: started beside the trainer, for the rank and the modules that its adapters will have."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

from skylite.launch.supervisor import Supervisor
from skylite.launch.vllm_server import EngineSpec
from skylite.orchestrator.keeper import Keeper, Restarts
from skylite.orchestrator.plan import RunPlan
from skylite.rollout.engine import Engine

MAX_LORAS = 2
"""Version k and, while requests of it are in flight, k + 1."""


@asynccontextmanager
async def open_engines(plan: RunPlan, target_modules: list[str], supervisor: Supervisor, restarts: Restarts) -> AsyncIterator[list[Keeper]]:
    """Start the engines and yield their keepers at once; `kept` says when they serve. The supervisor ends the processes."""
    with tempfile.TemporaryDirectory(prefix="skylite-") as sockets:
        specs = [engine_spec(plan, target_modules, index, Path(sockets)) for index in range(plan.config.engine.num_engines)]
        yield [Keeper.start(spec, plan.run.logs, supervisor, restarts) for spec in specs]


@asynccontextmanager
async def ready_engines(
    plan: RunPlan,
    keepers: Sequence[Keeper],
    supervisor: Supervisor,
    *,
    started_for: list[str],
    wanted: list[str],
    say: Callable[[str], None],
) -> AsyncIterator[list[Engine]]:
    """The engines when they serve, for exactly the `wanted` modules: started again where they were `started_for` others."""
    if started_for == wanted:
        async with kept(keepers, supervisor) as engines:
            yield engines
        return
    say(f"vLLM was started for LoRA on {', '.join(started_for)}, and the adapter is on {', '.join(wanted)}: it is started again")
    for keeper in keepers:
        supervisor.stop_child(keeper.spec.name)
    async with open_engines(plan, wanted, supervisor, keepers[0].restarts) as others, kept(others, supervisor) as engines:
        yield engines


@asynccontextmanager
async def kept(keepers: Sequence[Keeper], supervisor: Supervisor) -> AsyncIterator[list[Engine]]:
    """The engines once all serve. Each is kept alive by itself; the supervisor gets the error of one that gives up."""
    engines = await asyncio.gather(*(keeper.wait_ready() for keeper in keepers))
    tasks = [asyncio.ensure_future(keeper.keep(engine)) for keeper, engine in zip(keepers, engines, strict=True)]
    for task in tasks:
        task.add_done_callback(partial(_gave_up, supervisor))
    try:
        yield engines
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for engine in engines:
            await engine.aclose()


def _gave_up(supervisor: Supervisor, task: asyncio.Future[NoReturn]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        supervisor.fail(error)


@asynccontextmanager
async def served(specs: list[EngineSpec], logs: Path, supervisor: Supervisor, restarts: Restarts) -> AsyncIterator[list[Engine]]:
    """Start engines and yield them when all serve."""
    async with kept([Keeper.start(spec, logs, supervisor, restarts) for spec in specs], supervisor) as engines:
        yield engines


def engine_spec(plan: RunPlan, target_modules: list[str], index: int, sockets: Path) -> EngineSpec:
    """One engine's settings. Its socket lies in a 0700 folder, because some of vLLM's routes take no key."""
    config = plan.config
    return EngineSpec(
        name=f"vllm-{index}",
        model_path=Path(plan.resolved.load_path),
        device=plan.resolved.device,
        dtype=plan.resolved.dtype,
        uds=sockets / f"vllm-{index}.sock",
        max_lora_rank=config.lora.vllm_rank,
        target_modules=target_modules,
        max_loras=MAX_LORAS,
        max_cpu_loras=MAX_LORAS + 1,
        max_model_len=config.rollout.max_prompt_tokens + config.rollout.max_completion_tokens,
        max_num_seqs=config.engine.max_num_seqs,
        kv_cache_gib=config.engine.kv_cache_gib,
        gpu_memory_utilization=config.engine.gpu_memory_utilization,
        cpu_lora=plan.resolved.cpu_lora,
        enable_lora=True,
        seed=config.seed,
    )
