"""Which GPU each rank and engine gets. Refuses a placement that cannot work, before anything starts.

`assign_gpus` needs no machine: GPUs may be described. `place` adds what nvidia-smi and torch say about those
of this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from skylite.config.engine import EngineConfig
from skylite.config.train import RunConfig, TrainConfig
from skylite.engine.tensor_parallel import check_count, check_shared_memory
from skylite.errors import ConfigError
from skylite.notes import Note, notes_of, warning
from skylite.processes.gpus import (
    VISIBLE,
    Gpu,
    GpuUse,
    check_cuda,
    describe,
    memory_in_use,
    visible_gpus,
    why_no_gpu,
)
from skylite.processes.hardware import choose_device, choose_dtype

Kind = Literal["split", "shared"]
Place = Callable[[TrainConfig], "GpuChoice"]
"""Gives the ranks and engines of these settings their GPUs. Raises ConfigError."""
GIB = 2**30
UNNAMED_BYTES = 1 << 30
"""Memory in use by no process that nvidia-smi shows, that is worth a warning. A driver uses less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuChoice:
    """GPUs of ranks and engines, by nvidia-smi's numbers, and what is free on them. All empty on a CPU."""

    rank_gpus: list[int]
    """Of rank 0, 1, ..."""
    engine_gpus: list[int]
    """Of engine 0, 1, ..., engine.tensor_parallel for each."""
    notes: list[Note]
    gpus: dict[int, Gpu] = field(default_factory=dict)
    """By number; all that ranks and engines have."""
    free_bytes: dict[int, int] = field(default_factory=dict)
    """By GPU; without those whose free memory is unknown."""
    others: dict[int, str] = field(default_factory=dict)
    """Other processes that use a GPU, in words."""

    @property
    def kind(self) -> Kind:
        """shared: some GPU has a rank and an engine."""
        return "shared" if {*self.rank_gpus} & {*self.engine_gpus} else "split"

    def first_engine(self, config: TrainConfig) -> list[int]:
        """The GPUs of the first engine. A teacher's is on them, too."""
        return self.engine_gpus[: config.engine.tensor_parallel]

    @property
    def other_kind(self) -> Kind:
        return "split" if self.kind == "shared" else "shared"


def place(config: TrainConfig, device: str) -> GpuChoice:
    """`assign_gpus` for the visible GPUs, with what others use of them.

    Raises ConfigError too if torch cannot use them, or if other processes hold memory that the engines need;
    plan_memory checks the ranks.
    """
    if device == "cpu":
        refuse_gpu_settings(config)
        return GpuChoice(rank_gpus=[], engine_gpus=[], notes=[])
    gpus = visible_gpus()
    assign_gpus(config, gpus)
    return placer(gpus)(config)


def placer(gpus: Sequence[Gpu]) -> Place:
    """`place` for these GPUs of this machine, which is asked once. Raises ConfigError if torch cannot."""
    torch = check_cuda(gpus)
    machine = f"{describe(gpus)}; driver {gpus[0].driver}, torch {torch.version} for CUDA {torch.cuda}"
    uses = {gpu.index: memory_in_use(gpu) for gpu in gpus}

    def beside_others(config: TrainConfig) -> GpuChoice:
        choice = assign_gpus(config, gpus)
        check_shared_memory(config.engine.tensor_parallel)
        for gpu in choice.gpus.values():
            count = choice.engine_gpus.count(gpu.index)
            check_memory(gpu, uses[gpu.index], count, config.engine.gpu_memory_utilization)
        others = {i: text for i in choice.gpus if (text := users_text(uses[i]))}
        taken = [
            warning(f"GPU {i} ({choice.gpus[i].name}) is not free: {text}") for i, text in others.items()
        ]
        return replace(
            choice,
            notes=[*notes_of(machine), *choice.notes, *taken],
            free_bytes={i: free for i in choice.gpus if (free := uses[i].free_bytes) is not None},
            others=others,
        )

    return beside_others


def assign_gpus(config: TrainConfig, gpus: Sequence[Gpu]) -> GpuChoice:
    """Give each rank and engine its GPUs of these.

    Rank i gets GPU i. The engines get the GPUs `engine.gpus`, `engine.tensor_parallel` each; by default they
    take the GPUs after the ranks' in turn, and then share the ranks'. Raises ConfigError if there are too few
    GPUs, or if the engines' shares of one are more than all of it.
    """
    ranks = gpus[: require_ranks(config, gpus)]
    check_count(config.engine.tensor_parallel, len(gpus), describe(gpus))
    engines = [gpus[i] for i in engine_positions(config, len(gpus))]
    used = dict.fromkeys([*engines, *ranks])
    for gpu in used:
        check_shares(gpu, engines.count(gpu), config.engine.gpu_memory_utilization)
    notes = notes_of(
        f"{_span('rank', len(ranks))} on GPU {_numbers(ranks)}{_engines_text(engines, config.engine)}"
    )
    if idle := [gpu for gpu in gpus if gpu not in used]:
        notes.append(idle_note(config, idle, len(gpus)))
    return GpuChoice(
        rank_gpus=[g.index for g in ranks],
        engine_gpus=[g.index for g in engines],
        notes=notes,
        gpus={g.index: g for g in used},
    )


def place_again(recorded: RunConfig, config: TrainConfig) -> GpuChoice:
    """The placement of a recorded run on this machine, which may be another than at its start.

    Raises ConfigError also if this machine lacks the run's device or its compute type.
    """
    placement = recorded.resolved.placement
    if placement.device == "cuda":
        if choose_device() == "cpu":
            raise ConfigError(
                "The run was started on a GPU, and this machine has none that may be used. "
                f"{why_no_gpu() or ''}".strip(),
                "Continue it on a machine with a GPU: a CPU would round differently.",
            )
        choose_dtype(placement.dtype, placement.device)
    return place(config, placement.device)


def place_ranks(recorded: RunConfig) -> RunConfig:
    """`recorded` with the GPUs of its ranks on this machine, for a trainer without engines."""
    if recorded.resolved.placement.device == "cpu":
        return recorded
    choose_device()
    gpus = visible_gpus()
    ranks = [g.index for g in gpus[: require_ranks(recorded.config, gpus)]]
    placement = recorded.resolved.placement.model_copy(update={"rank_gpus": ranks, "engine_gpus": []})
    return recorded.model_copy(
        update={"resolved": recorded.resolved.model_copy(update={"placement": placement})}
    )


def require_ranks(config: TrainConfig, gpus: Sequence[Gpu]) -> int:
    """The number of ranks. Raises ConfigError if it exceeds the GPUs."""
    ranks = config.trainer.num_ranks
    if ranks > len(gpus):
        raise ConfigError(
            f"trainer.num_ranks={ranks} needs {ranks} GPUs, because every rank trains on its own, and "
            f"{len(gpus)} can be used: {describe(gpus) or 'none'}.",
            f"Use trainer.num_ranks={max(1, len(gpus))}, or make more GPUs visible ({VISIBLE}).",
        )
    return ranks


def engine_positions(config: TrainConfig, num_gpus: int) -> list[int]:
    """The visible GPUs of the engines. Raises ConfigError for engine.gpus that do not fit."""
    chosen, size = config.engine.gpus, config.engine.tensor_parallel
    count = config.engine.num_engines * size
    if not chosen:
        return [(config.trainer.num_ranks + i) % num_gpus for i in range(count)]
    if len(chosen) != count:
        times = f" and engine.tensor_parallel={size}" if size > 1 else ""
        raise ConfigError(
            f"engine.gpus={chosen} names {len(chosen)} GPU(s) for "
            f"engine.num_engines={config.engine.num_engines}{times}.",
            f"Name {f'{count}, {size}' if size > 1 else 'one'} for each engine, or leave it empty.",
        )
    if twice := [part for i in range(0, count, size) if len({*(part := chosen[i : i + size])}) < size]:
        raise ConfigError(
            f"engine.gpus={chosen} names a GPU twice for one engine: {twice[0]}.",
            f"Name {size} different GPUs for each engine, or leave it empty.",
        )
    if beyond := [i for i in chosen if i >= num_gpus]:
        raise ConfigError(
            f"engine.gpus={chosen} names visible GPU {beyond[0]}, and there are {num_gpus}, counted from 0.",
            f"Name 0 to {num_gpus - 1}.",
        )
    return list(chosen)


def check_shares(gpu: Gpu, num_engines: int, share: float) -> None:
    """Raise ConfigError if the GPU's engines may use more than all of it."""
    if num_engines * share >= 1:
        raise ConfigError(
            f"{num_engines} engines share GPU {gpu.index} ({gpu.name}), and each takes "
            f"engine.gpu_memory_utilization={share:g} of its memory.",
            f"Lower it below {1 / num_engines:.2f}, use fewer engines, or place them with engine.gpus.",
        )


def check_memory(gpu: Gpu, use: GpuUse, num_engines: int, share: float) -> None:
    """Raise ConfigError if the GPU's engines do not fit into what is free."""
    if gpu.total_bytes is None or use.free_bytes is None:
        return
    wanted, free = num_engines * share * gpu.total_bytes, use.free_bytes
    if wanted > free:
        raise ConfigError(
            f"GPU {gpu.index} ({gpu.name}) has {free / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free, and "
            f"the engine takes {wanted / GIB:.1f} GiB (engine.gpu_memory_utilization={share:g}"
            f"{f' x {num_engines} engines' if num_engines > 1 else ''}); "
            f"{users_text(use) or 'the driver uses the rest'}.",
            f"End those processes, choose another GPU ({VISIBLE}), or lower engine.gpu_memory_utilization.",
        )


def users_text(use: GpuUse) -> str:
    """Who uses a GPU, such as `process 41 (python3) uses 3.0 GiB`; empty for a free GPU."""
    if not use.processes:
        unseen = f"processes that cannot be seen here use {use.used_bytes / GIB:.1f} GiB"
        return unseen if use.used_bytes > UNNAMED_BYTES else ""
    return ", ".join(
        f"process {p.pid} ({p.name.rpartition('/')[2]})"
        + (f" uses {p.used_bytes / GIB:.1f} GiB" if p.used_bytes is not None else "")
        for p in use.processes
    )


def idle_note(config: TrainConfig, idle: Sequence[Gpu], num_gpus: int) -> Note:
    """Names the GPUs without work, and settings that give each GPU some: half train, half sample."""
    size = config.engine.tensor_parallel
    if not config.engine.num_engines:
        return warning(
            f"GPU {_numbers(idle)} of {num_gpus} stay idle. This uses all: trainer.num_ranks={num_gpus}. "
            f"{VISIBLE} hides those that you do not want to use"
        )
    engines = max(1, num_gpus // 2 // size)
    return warning(
        f"GPU {_numbers(idle)} of {num_gpus} stay idle. This uses all: "
        f"trainer.num_ranks={num_gpus - engines * size} engine.num_engines={engines} "
        f"engine.gpu_memory_utilization=0.9. {VISIBLE} hides those that you do not want to use"
    )


def refuse_gpu_settings(config: TrainConfig) -> None:
    """Raise ConfigError for settings that need GPUs."""
    if config.placement in ("split", "shared"):
        raise ConfigError(
            f"placement={config.placement} divides GPUs among trainer and engines, and this run has none.",
            "Use placement=auto.",
        )
    if config.engine.gpus:
        raise ConfigError(
            f"engine.gpus={config.engine.gpus} places engines on GPUs, and this run has none.",
            "Use engine.gpus=[].",
        )
    if config.engine.tensor_parallel > 1:
        raise ConfigError(
            f"engine.tensor_parallel={config.engine.tensor_parallel} divides a model among GPUs, and this "
            "run has none.",
            "Use engine.tensor_parallel=1.",
        )


def _engines_text(gpus: Sequence[Gpu], config: EngineConfig) -> str:
    """Such as `; engine 0 to 1 on GPU 2, 3`, or with tensor parallelism `; engine 0 on GPU 2+3`."""
    size = config.tensor_parallel
    if not gpus:
        return ""
    parts = ["+".join(str(g.index) for g in gpus[i : i + size]) for i in range(0, len(gpus), size)]
    text = f"; {_span('engine', len(parts))} on GPU {', '.join(parts)}"
    return text if size == 1 else f"{text} (tensor parallel, {size} GPUs each)"


def _span(name: str, count: int) -> str:
    return f"{name} 0 to {count - 1}" if count > 1 else f"{name} 0"


def _numbers(gpus: Sequence[Gpu]) -> str:
    return ", ".join(str(g.index) for g in gpus)
