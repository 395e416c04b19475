"""What fits on GPUs: those of a run, and described ones, such as 8x80, for `skylite plan`.

The sums are those of a real run (gpu_placement.py, gpu_memory_plan.py). Of what the settings leave open, the
first that fits is taken: GPUs of their own for trainer and engines (split), all GPUs for both (shared), the
same with engines that sleep while the trainer computes, and then all of it with trainer.offload.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from skylite.config.resolved import MemoryPlan
from skylite.config.train import TrainConfig
from skylite.engine.interface import EngineMemory
from skylite.errors import ConfigError, DoesNotFit
from skylite.notes import Note
from skylite.processes.gpus import Gpu
from skylite.resources.gpu_memory_plan import (
    Setup,
    TeacherMemory,
    TrainerMemory,
    fit_memory,
    micro_batch_tokens,
    most_tokens,
    trainer_memory,
)
from skylite.resources.gpu_placement import GpuChoice, Kind, Place, assign_gpus

GIB = 2**30
ENOUGH = 32
"""Sequences that an engine holds at once. With fewer, sampling takes most of the time."""
OWN_SHARES = (0.9,)
"""engine.gpu_memory_utilization to try for an engine alone on its GPUs."""
SHARED_SHARES = (0.45, 0.35, 0.3, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85)
SLEEPS = ("auto", "kv_cache", "weights")
"""engine.sleep to try; auto that stays so: never."""
MOST_GPUS = 16
"""Of one machine."""
USUAL_GIB = (24, 48, 80, 141)
"""GPUs that people have."""
CHOSEN = (
    "trainer.num_ranks", "engine.num_engines", "engine.tensor_parallel", "engine.gpu_memory_utilization",
    "engine.sleep", "trainer.offload",
)  # fmt: skip
"""Settings that are chosen where nobody set them."""
FREED = (*CHOSEN, "engine.gpus", "trainer.checkpointing", "trainer.replicate_base")
"""Settings that may be the reason why a run does not fit."""
COMPLETION = "rollout.max_completion_tokens"
IN_TURNS = ", in turns"
"""Of parts that trainer and engines have in turns."""
FREE = "free"
"""What no part takes. Larger micro-batches use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Settings with which a run fits, and what is left then."""

    config: TrainConfig
    settings: dict[str, Any]
    """What was changed for it, such as trainer.num_ranks -> 4."""
    placement: GpuChoice
    memory: MemoryPlan
    trainer: TrainerMemory
    engine: EngineMemory
    teacher: TeacherMemory | None
    """Of its own engine."""
    notes: list[Note]
    tokens: int
    """Most tokens of a micro-batch."""

    @property
    def sequences(self) -> int:
        """Of the longest, that an engine holds at once. 0 without engines."""
        if not self.placement.engine_gpus:
            return 0
        return self.engine.sequences(self.memory.kv_cache_bytes or 0, self.config.max_sequence_tokens)

    @property
    def leaves(self) -> str:
        """What the memory leaves for speed, in words."""
        each = f"{self.sequences} sequences at once to an engine and " if self.placement.engine_gpus else ""
        return f"{each}micro-batches of up to {self.tokens:,} tokens"

    @property
    def is_slow(self) -> bool:
        """Whether sampling takes most of the time."""
        return bool(self.placement.engine_gpus) and self.sequences < ENOUGH

    def table(self) -> dict[int, dict[str, int]]:
        """The parts of each GPU that ranks or engines have."""
        return {gpu: self.parts(gpu) for gpu in sorted(self.placement.gpus)}

    def parts(self, gpu: int) -> dict[str, int]:
        """Predicted bytes on a GPU: of the trainer at `micro_batch_tokens`, and of its engines.

        FREE is what is left at the fuller time: with engine.sleep, parts IN_TURNS are not there at once.
        """
        engines, tokens = self.placement.engine_gpus.count(gpu), micro_batch_tokens(self.config)
        has_rank, lends = gpu in self.placement.rank_gpus, self.config.engine.lends
        parts, kv_cache = dict[str, int](), self.memory.kv_cache_bytes or 0
        lent, base = IN_TURNS * bool(lends), IN_TURNS * (lends == "weights")
        if has_rank:
            parts |= {
                f"trainer: weights{base}": self.trainer.weights,
                "trainer: adapter, gradient, AdamW": self.trainer.adapter,
                f"trainer: {tokens:,} tokens{lent}": self.trainer.total(tokens) - self.trainer.state(),
                "trainer: CUDA": self.trainer.process,
            }
        each = {
            f"vLLM: weights{base}": self.engine.weights,
            f"vLLM: LoRA slots{base}": self.engine.lora_slots,
            "vLLM: activations": self.engine.activations,
            f"vLLM: KV cache, {self.sequences} sequences{lent}": kv_cache,
            "vLLM: CUDA": self.engine.process,
        }
        parts |= {name: count * engines for name, count in each.items() if engines}
        if self.teacher is not None and gpu in self.placement.first_engine(self.config):
            parts["teacher: vLLM"] = self.teacher.total()
        taken = sum(parts.values())
        if lends is not None:
            sampling = self.trainer.total(tokens) - self.trainer.waiting(lends) if has_rank else 0
            computing = engines * (self.engine.before_kv() + kv_cache - self.engine.asleep(lends))
            taken -= min(sampling, computing)  # the fuller time lacks less
        return parts | {FREE: (self.placement.gpus[gpu].total_bytes or 0) - taken}


def described_machines(text: str) -> tuple[int, list[Gpu]]:
    """The number of machines, and the GPUs of each, from a text like 2x8x80, or 8x80. Raises ConfigError."""
    machines, _, each = text.partition("x") if text.count("x") == 2 else ("1", "", text)
    if not re.fullmatch(r"[1-9]\d{0,3}", machines, re.ASCII):
        raise ConfigError(
            f"--gpus {text} does not begin with a number of machines.",
            "Write it like 2x8x80, or 8x80 for one.",
        )
    return int(machines), described_gpus(each)


def described_gpus(text: str) -> list[Gpu]:
    """GPUs of one machine from a text like 8x80: 8 of 80 GiB; 80 is 1x80. Raises ConfigError."""
    match = re.fullmatch(r"(?:(\d{1,4})x)?(\d{1,4}(?:\.\d+)?)", text, re.ASCII)
    count, size = (int(match[1] or 1), float(match[2])) if match else (0, 0.0)
    if not 1 <= count <= MOST_GPUS or size < 1:
        raise ConfigError(
            f"--gpus {text} does not describe 1 to {MOST_GPUS} GPUs and the GiB of each.",
            "Write it like 8x80, or 24 for one GPU.",
        )
    return [Gpu(i, f"GPU-{i}", f"{size:g} GiB", 9.0, int(size * GIB), "", mig=False) for i in range(count)]


def chosen_fit(config: TrainConfig, setup: Setup, gpus: Sequence[Gpu], place: Place) -> Fit:
    """The best fit of the setting `placement`, with a note on it. Raises ConfigError if nothing fits."""
    kind = wanted_kind(config)
    found = best_fit(config, setup, gpus, kind, place)
    if isinstance(found, DoesNotFit):
        if kind is not None:
            best_fit(config, setup, gpus)  # raises if the settings are wrong for any placement
        raise found
    if not found.settings:
        return found
    chosen = " ".join(f"{name}={json.dumps(value)}" for name, value in found.settings.items())
    text = f"placement={config.placement}: {found.placement.kind}, {chosen}; {found.leaves}, as predicted"
    other = best_fit(config, setup, gpus, found.placement.other_kind, place) if kind is None else None
    if isinstance(other, Fit):
        text += f". placement={other.placement.kind} would leave {other.leaves}"
    return replace(found, notes=[Note(text), *found.notes])


def wanted_kind(config: TrainConfig) -> Kind | None:
    """The only kind of placement that the settings allow; None: each."""
    return config.placement if config.placement in ("split", "shared") else None


def best_fit(
    config: TrainConfig,
    setup: Setup,
    gpus: Sequence[Gpu],
    kind: Kind | None = None,
    place: Place | None = None,
) -> Fit | DoesNotFit:
    """The first settings that leave ENOUGH sequences, else those with the most; the first refusal if none.

    Args:
        setup: of the model; its placement is not used.
        kind: take no other placement.
        place: what places on these GPUs; by default they have nothing else to do.

    Without `kind`, raises ConfigError if the settings are wrong for any GPUs.
    """
    slow, refusals, place = list[Fit](), list[ConfigError](), place or partial(assign_gpus, gpus=gpus)
    for settings in attempts(config, len(gpus), is_quantised=bool(setup.sizes(config).quantised)):
        changed = with_settings(config, settings)
        try:
            placement = place(changed)
            if kind not in (None, placement.kind):
                continue
            found = fit_with(changed, settings, replace(setup, placement=placement))
        except ConfigError as refusal:
            refusals.append(refusal)
            continue
        if not found.is_slow:
            return found
        slow.append(found)
    if slow:
        return max(slow, key=lambda found: found.sequences)
    too_small = [refusal for refusal in refusals if isinstance(refusal, DoesNotFit)]
    if refusals and not too_small and kind is None:
        raise refusals[0]
    if too_small:
        return too_small[0]
    return DoesNotFit(f"{len(gpus)} GPU(s) with these settings have no placement that is {kind}.")


def fit_with(config: TrainConfig, settings: dict[str, Any], setup: Setup) -> Fit:
    """What a run with this placement has. Raises DoesNotFit, and ConfigError as a run does."""
    found = measured(config, settings, setup)
    if not found.tokens:
        raise DoesNotFit(found.notes[-1].text)
    return found


def measured(config: TrainConfig, settings: dict[str, Any], setup: Setup) -> Fit:
    """The same for a run that need not fit."""
    config, memory, notes = fit_memory(config, setup)
    trainer = trainer_memory(setup.sizes(config), config, "cuda", setup.dtype)
    return Fit(
        config=config,
        settings=settings,
        placement=setup.placement,
        memory=memory,
        trainer=trainer,
        engine=setup.engine(config),
        teacher=setup.teacher(config),
        notes=notes,
        tokens=most_tokens(config, trainer, (memory.trainer_bytes or 0) + trainer.process),
    )


def attempts(config: TrainConfig, count: int, *, is_quantised: bool) -> Iterator[dict[str, Any]]:
    """Settings to try on `count` GPUs, the cheapest first, without those that are set or stay as they are."""
    if config.placement == "explicit":
        yield {}
        return
    tried = list[dict[str, Any]]()
    offloads = (False,) if is_quantised or config.trainer.replicate_base else (False, True)
    for offload, sleep in itertools.product(offloads, SLEEPS[:1] if config.why_awake else SLEEPS):
        for ranks, engines, size, share in layouts(config, count):
            if sleep != SLEEPS[0] and ranks + engines * size <= count:  # no GPU has both
                continue
            chosen = (ranks, engines, size, share, sleep, offload)
            settings = {
                name: value
                for name, value in zip(CHOSEN, chosen, strict=True)
                if not _is_set(config, name) and value != value_of(config, name)
            }
            if settings not in tried:
                tried.append(settings)
                yield settings


def layouts(config: TrainConfig, count: int) -> Iterator[tuple[int, int, int, float]]:
    """Ranks, engines, GPUs of an engine, its share: some GPUs train and the others sample (half of them each,
    unless ranks or engines are set), then all do both.

    If what is set leaves no such layout, the settings as they are.
    """
    own, engine = config.trainer.num_ranks, config.engine
    if not engine.num_engines:
        yield count, 0, 1, engine.gpu_memory_utilization
        return
    has_ranks, has_engines = _is_set(config, "trainer.num_ranks"), _is_set(config, "engine.num_engines")
    sizes = [2**k for k in range(count.bit_length())]
    if _is_set(config, "engine.tensor_parallel"):
        sizes = [engine.tensor_parallel]
    found = False
    for is_split, shares in ((True, OWN_SHARES), (False, SHARED_SHARES)):
        for size in sizes:
            sampling = (count - own if has_ranks else count // 2) if is_split else count
            sampling = engine.num_engines * size if has_engines else sampling
            ranks = own if has_ranks else count - sampling if is_split else count
            fits = min(ranks, sampling) > 0 and ranks + sampling * is_split <= count and not sampling % size
            if fits:
                found = True
                yield from ((ranks, sampling // size, size, share) for share in shares)
    if not found:
        yield own, engine.num_engines, engine.tensor_parallel, engine.gpu_memory_utilization


def what_helps(
    config: TrainConfig, setup: Setup, gpus: Sequence[Gpu], quantise: Callable[[], Path | None]
) -> tuple[str, Fit] | None:
    """The first change with which a run fits, in words; None: none that is tried.

    `quantise`: makes the model in 4 bits; None if skylite does not train it so.
    """
    for words, change, freed, *where in _changes(config, setup, gpus, quantise):
        found = best_fit(*where)
        if isinstance(found, Fit):
            instead = {name: value_of(found.config, name) for name in freed}
            return words, replace(found, settings={**change, **instead, **found.settings})
    return None


def _changes(
    config: TrainConfig, setup: Setup, gpus: Sequence[Gpu], quantise: Callable[[], Path | None]
) -> Iterator[Any]:
    """In words, new settings, settings that are chosen again, and the arguments of `best_fit`."""
    if fixed := [name for name in FREED if _is_set(config, name)]:
        yield f"without {', '.join(fixed)}", {}, fixed, without(config, fixed), setup, gpus
    if (model := quantise()) is not None:
        change = {"model.name": f"{config.model.name.removesuffix('/config.json')}-AWQ"}
        whole = [name for name in ("trainer.offload", "trainer.replicate_base") if _is_set(config, name)]
        with_base = replace(setup, model_path=model)
        yield "with the base in 4 bits (AWQ)", change, whole, without(config, whole), with_base, gpus
    for part in (2, 4) if config.source.shorter == COMPLETION else ():
        length = {COMPLETION: max(1, config.rollout.max_completion_tokens // part)}
        shorter = with_settings(config, length)
        yield f"with sequences of {shorter.max_sequence_tokens:,} tokens", length, [], shorter, setup, gpus
    each = f"{config.trainer.hosts}x" if config.trainer.hosts > 1 else ""
    own, counts = (gpus[0].total_bytes or 0) / GIB, [n for n in (2, 4, 8, 16) if n > len(gpus)]
    larger = [(len(gpus), size) for size in USUAL_GIB if size > own]
    for n, size in [*((n, own) for n in counts), *larger, *((n, USUAL_GIB[-1]) for n in counts)]:
        yield f"on {each}{n}x{size:g}", {}, [], config, setup, described_gpus(f"{n}x{size:g}")


def with_settings(config: TrainConfig, settings: dict[str, Any]) -> TrainConfig:
    """The settings with others, which then count as set."""
    for name, value in settings.items():
        section, _, field = name.partition(".")
        changed = getattr(config, section).model_copy(update={field: value})
        config = config.model_copy(update={section: changed})
    return config


def free_settings(config: TrainConfig) -> list[str]:
    """Of CHOSEN, those that nobody set."""
    return [name for name in CHOSEN if not _is_set(config, name)]


def without(config: TrainConfig, names: Sequence[str]) -> TrainConfig:
    """The settings with the defaults of these."""
    tree = config.model_dump(exclude_unset=True)
    for name in names:
        section, _, field = name.partition(".")
        tree.get(section, {}).pop(field, None)
    return TrainConfig.model_validate(tree)


def _is_set(config: TrainConfig, name: str) -> bool:
    section, _, field = name.partition(".")
    return field in getattr(config, section).model_fields_set


def value_of(config: TrainConfig, name: str) -> Any:
    """The value of a setting like trainer.num_ranks."""
    section, _, field = name.partition(".")
    return getattr(getattr(config, section), field)
