"""The run's vLLM servers: started from the first published adapter, so that rank and modules are the trainer's own."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from skylite.launch.processes import ProcessSpec
from skylite.launch.supervisor import Supervisor
from skylite.launch.vllm_server import EngineSpec, engine_command, engine_env
from skylite.orchestrator.plan import RunPlan
from skylite.rollout.client import VllmClient
from skylite.run.manifest import Manifest

MAX_LORAS = 2
"""Version k and, while requests of it are in flight, k + 1."""


@asynccontextmanager
async def open_engines(plan: RunPlan, manifest: Manifest, supervisor: Supervisor) -> AsyncIterator[list[VllmClient]]:
    """Start the engines, yield their clients when all serve, close the connections at the end (the supervisor ends the processes)."""
    with tempfile.TemporaryDirectory(prefix="skylite-") as sockets:
        specs = [engine_spec(plan, manifest, index, Path(sockets)) for index in range(plan.config.engine.num_engines)]
        async with served(specs, plan.run.logs, supervisor, plan.config.engine.start_timeout_s) as clients:
            yield clients


@asynccontextmanager
async def served(specs: list[EngineSpec], logs: Path, supervisor: Supervisor, timeout_s: float) -> AsyncIterator[list[VllmClient]]:
    """Start engines and yield ready clients."""
    for spec in specs:
        supervisor.start(
            ProcessSpec(name=spec.name, argv=engine_command(spec), env=engine_env(spec, {}), log_path=logs / f"{spec.name}.log")
        )
    clients = [VllmClient(spec.name, Path(spec.uds)) for spec in specs]
    try:
        await asyncio.gather(*(c.wait_ready(timeout_s) for c in clients))
        yield clients
    finally:
        for client in clients:
            await client.aclose()


def engine_spec(plan: RunPlan, manifest: Manifest, index: int, sockets: Path) -> EngineSpec:
    """One engine's settings. Its socket lies in a 0700 folder, because some of vLLM's routes take no key."""
    config = plan.config
    return EngineSpec(
        name=f"vllm-{index}",
        model_path=Path(plan.resolved.model_path),
        device=plan.resolved.device,
        dtype=plan.resolved.dtype,
        uds=sockets / f"vllm-{index}.sock",
        max_lora_rank=config.lora.vllm_rank,
        target_modules=manifest.target_modules,
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
