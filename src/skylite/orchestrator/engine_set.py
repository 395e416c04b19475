"""The run's vLLM servers: started beside the trainer, for the rank and the modules that its adapters will have."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from skylite.launch.processes import ProcessSpec
from skylite.launch.supervisor import Supervisor
from skylite.launch.vllm_server import EngineSpec, engine_command, engine_env
from skylite.orchestrator.plan import RunPlan
from skylite.rollout.client import VllmClient

MAX_LORAS = 2
"""Version k and, while requests of it are in flight, k + 1."""


@asynccontextmanager
async def open_engines(plan: RunPlan, target_modules: list[str], supervisor: Supervisor) -> AsyncIterator[list[VllmClient]]:
    """Start the engines and yield their clients at once; `wait_ready` says when they serve. The supervisor ends the processes."""
    with tempfile.TemporaryDirectory(prefix="skylite-") as sockets:
        specs = [engine_spec(plan, target_modules, index, Path(sockets)) for index in range(plan.config.engine.num_engines)]
        async with started(specs, plan.run.logs, supervisor) as clients:
            yield clients


@asynccontextmanager
async def started(specs: list[EngineSpec], logs: Path, supervisor: Supervisor) -> AsyncIterator[list[VllmClient]]:
    """Start engines, yield their clients, close the connections at the end."""
    for spec in specs:
        supervisor.start(
            ProcessSpec(name=spec.name, argv=engine_command(spec), env=engine_env(spec, {}), log_path=logs / f"{spec.name}.log")
        )
    clients = [VllmClient(spec.name, Path(spec.uds)) for spec in specs]
    try:
        yield clients
    finally:
        for client in clients:
            await client.aclose()


@asynccontextmanager
async def served(specs: list[EngineSpec], logs: Path, supervisor: Supervisor, timeout_s: float) -> AsyncIterator[list[VllmClient]]:
    """Start engines and yield ready clients."""
    async with started(specs, logs, supervisor) as clients:
        await wait_ready(clients, timeout_s)
        yield clients


async def wait_ready(clients: Sequence[VllmClient], timeout_s: float) -> None:
    """Until all serve. Raises RunFailed."""
    await asyncio.gather(*(c.wait_ready(timeout_s) for c in clients))


def engine_spec(plan: RunPlan, target_modules: list[str], index: int, sockets: Path) -> EngineSpec:
    """One engine's settings. Its socket lies in a 0700 folder, because some of vLLM's routes take no key."""
    config = plan.config
    return EngineSpec(
        name=f"vllm-{index}",
        model_path=Path(plan.resolved.model_path),
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
        cpu_lora_kernels=config.engine.cpu_lora_kernels,
        enable_lora=True,
        seed=config.seed,
    )
