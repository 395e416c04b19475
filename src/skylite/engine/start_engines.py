"""Starts engines: those of a run next to its trainer, which saves 14 s, or one for another command."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

from skylite.adapters.folder import ServedAdapter
from skylite.config.loading import change_config
from skylite.config.provenance import Provenance
from skylite.config.train import RunConfig, TrainConfig
from skylite.engine.connections import Address
from skylite.engine.interface import Engine, EngineSpec, Launcher, served_versions
from skylite.engine.model_limits import check_context
from skylite.engine.retrying_engine import RetryingEngine
from skylite.engine.tensor_parallel import SETTING, check_count, check_divisible, check_shared_memory
from skylite.engine.watchdog import RestartPolicy, Watchdog
from skylite.errors import ConfigError
from skylite.processes.child import Supervisor
from skylite.processes.gpus import describe, visible_gpus
from skylite.processes.hardware import choose_device, choose_dtype, cpu_cores
from skylite.processes.own_network import check_network
from skylite.processes.private_folders import temporary_folder
from skylite.run.run_dir import AdapterVersion

logger = logging.getLogger(__name__)
T = TypeVar("T")


@asynccontextmanager
async def start_engines(
    launcher: Launcher,
    run_config: RunConfig,
    logs: Path,
    target_modules: list[str],
    supervisor: Supervisor,
    restarts: RestartPolicy,
    for_all: Callable[[EngineSpec], EngineSpec] = lambda spec: spec,
) -> AsyncIterator[list[Watchdog]]:
    """Start the engines and yield their watchdogs at once; `engines_kept_alive` waits until they serve.

    The supervisor stops the processes. `for_all` widens the settings for other runs that share the engines.
    """
    with temporary_folder() as sockets:
        specs = [
            for_all(engine_spec(run_config, target_modules, index, sockets))
            for index in range(run_config.config.engine.num_engines)
        ]
        yield [Watchdog.start(launcher, spec, logs, supervisor, restarts) for spec in specs]


@asynccontextmanager
async def engines_for_modules(
    run_config: RunConfig,
    logs: Path,
    watchdogs: Sequence[Watchdog],
    supervisor: Supervisor,
    *,
    started_for: list[str],
    wanted: list[str],
) -> AsyncIterator[list[RetryingEngine]]:
    """Yield the engines once they serve. Restarts them unless they were started for the `wanted` modules."""
    if started_for == wanted or not watchdogs:
        async with engines_kept_alive(watchdogs, supervisor) as engines:
            yield engines
        return
    logger.info(
        f"the engine was started for LoRA on {', '.join(started_for)}, but the adapter is on "
        f"{', '.join(wanted)}: it restarts"
    )
    for watchdog in watchdogs:
        supervisor.stop_child(watchdog.spec.name)
    async with (
        start_engines(
            watchdogs[0].launcher, run_config, logs, wanted, supervisor, watchdogs[0].restarts
        ) as others,
        engines_kept_alive(others, supervisor) as engines,
    ):
        yield engines


class Keeper(Protocol):
    """Keeps one engine in the run: a Watchdog, or for engine.urls a UrlWatchdog."""

    async def wait_ready(self) -> RetryingEngine:
        """The engine, once it serves."""

    async def keep_alive(self, engine: RetryingEngine) -> NoReturn:
        """Raises RunFailed once the run must end."""


@asynccontextmanager
async def engines_kept_alive(
    watchdogs: Sequence[Keeper], supervisor: Supervisor
) -> AsyncIterator[list[RetryingEngine]]:
    """Yield the engines once all serve, and keep them so.

    The supervisor receives the error of an engine that fails for good.
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


def engine_spec(run_config: RunConfig, target_modules: list[str], index: int, sockets: Path) -> EngineSpec:
    """The settings of one engine of a run. `sockets` needs mode 0700: nothing else keeps other users out."""
    config, placement = run_config.config, run_config.resolved.placement
    memory, size = run_config.resolved.memory, config.engine.tensor_parallel
    name = f"engine-{index}"
    return EngineSpec(
        name=name,
        model_path=run_config.resolved.model.path,
        device=placement.device,
        dtype=placement.dtype,
        address=Address.of_socket(sockets / f"{name}.sock"),
        lora_rank=config.lora.max_rank,
        target_modules=target_modules,
        max_loras=served_versions(config),
        max_model_len=config.engine_sequence_tokens,
        max_num_seqs=config.engine.max_num_seqs,
        kv_cache_gib=config.engine.kv_cache_gib,
        gpu_memory_utilization=memory.engine_share or config.engine.gpu_memory_utilization,
        lends=config.engine.lends,
        cpu_cores=cores_beside_trainer(config),
        cpu_lora=placement.cpu_lora,
        seed=config.seed,
        shared_network=config.shared_network,
        max_images=run_config.resolved.model.max_images,
        tower_lora=bool(config.lora.unfrozen),
        kv_cache_bytes=memory.kv_cache_bytes,
        gpus=tuple(placement.engine_gpus[index * size : (index + 1) * size]),
        tensor_parallel=size,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherEngine:
    """An engine that a run starts for a teacher."""

    spec: EngineSpec
    engine: RetryingEngine
    """To watch it by. The teacher has a client of its own."""
    log: Path
    start_timeout_s: float


@asynccontextmanager
async def teacher_engine(
    launcher: Launcher, run_config: RunConfig, logs: Path, supervisor: Supervisor, restarts: dict[str, int]
) -> AsyncIterator[TeacherEngine]:
    """Start the engine of a teacher that is a whole model, and yield it once it serves.

    It restarts as the other engines do; `restarts`: see RestartPolicy.counts. The supervisor stops it.
    """
    policy = RestartPolicy(config=run_config.config.engine, verify=_skip_verification, counts=restarts)
    with temporary_folder() as sockets:
        spec = teacher_spec(run_config, sockets)
        watchdog = Watchdog.start(launcher, spec, logs, supervisor, policy)
        async with engines_kept_alive([watchdog], supervisor) as (engine,):
            yield TeacherEngine(
                spec=spec,
                engine=engine,
                log=watchdog.child.spec.log_path,
                start_timeout_s=policy.config.start_timeout_s,
            )


def teacher_spec(run_config: RunConfig, sockets: Path) -> EngineSpec:
    """As the first engine of the run, for the teacher's model and without LoRA."""
    teacher, memory = run_config.resolved.teacher, run_config.resolved.memory
    assert teacher is not None, "the caller checks this"
    first = engine_spec(run_config, [], 0, sockets)
    return replace(
        first,
        name="teacher",
        model_path=teacher.path,
        dtype=teacher.dtype,
        address=Address.of_socket(sockets / "teacher.sock"),
        lora_rank=None,
        target_modules=None,
        max_model_len=teacher.max_tokens,
        gpu_memory_utilization=memory.teacher_share or first.gpu_memory_utilization,
        kv_cache_bytes=memory.teacher_kv_cache_bytes,
        lends=None,
        cpu_lora="dense",
        max_images=0,
        tower_lora=False,
        max_logprobs=run_config.config.algorithm.teacher_top_k or None,
    )


def cores_beside_trainer(config: TrainConfig) -> int | None:
    """CPU cores of an engine that samples while the trainer computes. None: all, for the two take turns."""
    trainer = config.trainer
    if config.engine.policies == 1 or trainer.num_threads is None:
        return None
    return max(1, cpu_cores() - trainer.num_ranks * trainer.num_threads)


def single_engine_spec(
    launcher: Launcher,
    config: TrainConfig,
    adapter: ServedAdapter | None,
    model_path: Path,
    address: Address,
    *,
    max_loras: int = 1,
    max_images: int = 0,
) -> EngineSpec:
    """An engine for adapters like this one, `max_loras` at once. Without one: for the base, LoRA disabled.

    It reads as many images of a prompt as the adapter's run, and `max_images`.

    Raises SkyliteError.
    """
    device = choose_device()
    launcher.check_machine(device)
    if adapter is not None and adapter.run_config is not None:
        max_images = max(max_images, adapter.run_config.resolved.model.max_images)
    if adapter is not None and (
        note := launcher.check_model(model_path, device, adapter.rank, max_images=max_images)
    ):
        logger.info(note)
    check_context(config, model_path)
    bf16_reason = launcher.bf16_reason(model_path, device)
    dtype = choose_dtype(config.model.dtype, device, lora=adapter is not None, bf16_reason=bf16_reason)[0]
    if device == "cuda":
        check_network(config, ranks=False)
    gpus = _gpus(config.engine.tensor_parallel, model_path) if device == "cuda" else ()
    if device == "cpu" and config.engine.tensor_parallel > 1:
        logger.info(f"{SETTING}={config.engine.tensor_parallel} is for GPUs: one engine uses this CPU")
    return EngineSpec(
        name="engine",
        model_path=model_path,
        device=device,
        dtype=dtype,
        address=address,
        lora_rank=adapter.rank if adapter is not None else None,
        target_modules=adapter.target_modules if adapter is not None else None,
        max_loras=max_loras,
        max_model_len=config.engine_sequence_tokens,
        max_num_seqs=config.engine.max_num_seqs,
        kv_cache_gib=config.engine.kv_cache_gib,
        gpu_memory_utilization=config.engine.gpu_memory_utilization,
        cpu_lora=launcher.choose_cpu_lora(config, dtype, model_path),
        seed=config.seed,
        shared_network=config.shared_network,
        max_images=max_images,
        tower_lora=adapter is not None and adapter.is_on_tower,
        gpus=gpus,
        tensor_parallel=max(1, len(gpus)),
    )


def _gpus(count: int, model_path: Path) -> tuple[int, ...]:
    """The first visible GPUs. Raises ConfigError if there are fewer or the model cannot be divided so."""
    visible = visible_gpus()
    check_count(count, len(visible), describe(visible))
    check_shared_memory(count)
    check_divisible(model_path, count)
    return tuple(gpu.index for gpu in visible[:count])


def refuse_urls(config: TrainConfig, command: str) -> None:
    """Raise ConfigError if engine.urls is set: the command starts its engines itself."""
    if config.engine.urls:
        raise _only_for_train(f"engine.urls={config.engine.urls}", command, "starts its own engine")


def require_awake(config: TrainConfig, command: str) -> None:
    """Raise ConfigError if the engines are to sleep: another policy may sample while one trains."""
    if config.engine.lends:
        why = "samples for one policy while it trains another"
        raise _only_for_train(f"engine.sleep={config.engine.sleep}", command, why)


def _only_for_train(setting: str, command: str, why: str) -> ConfigError:
    return ConfigError(f"{setting} is for `skylite train`; `skylite {command}` {why}.", "Leave it out.")


def engine_config(adapter: ServedAdapter, provenance: Provenance, command: str) -> TrainConfig:
    """The settings of the adapter's run, or the defaults, with what the user typed. Raises ConfigError."""
    config = adapter.run_config.config.on_own_engine() if adapter.run_config is not None else TrainConfig()
    config = change_config(config, provenance) if provenance.typed else config
    refuse_urls(config, command)
    return config


async def run_on_engine(
    launcher: Launcher,
    config: TrainConfig,
    make_spec: Callable[[Address], EngineSpec],
    work: Callable[[RetryingEngine], Awaitable[T]],
) -> T:
    """Start an engine, await `work` on it, and end it. `make_spec` gets its address.

    An engine that dies restarts with its adapters, as in a run.
    """
    restarts = RestartPolicy(config=config.engine, verify=_skip_verification, counts={})
    with temporary_folder() as folder:
        async with Supervisor() as supervisor:
            spec = make_spec(Address.of_socket(folder / "engine.sock"))

            async def run() -> T:
                watchdog = Watchdog.start(launcher, spec, folder, supervisor, restarts)
                async with engines_kept_alive([watchdog], supervisor) as engines:
                    return await work(engines[0])

            running = asyncio.ensure_future(run())
            watching = asyncio.ensure_future(supervisor.watch())
            await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                running.cancel()
                watching.result()
            watching.cancel()
            return running.result()


async def _skip_verification(engine: Engine, adapter: AdapterVersion) -> None:
    """An adapter from elsewhere has no canary to verify against."""
