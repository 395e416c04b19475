"""Does another placement take fewer seconds a step? Decided once, from the seconds of a run's first steps.

Consumes: the metrics of steps. Waits for: nothing. Produces: new settings for the run. Unblocks: a
stop after the step, and then a resume with them.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from skylite.config.train import TrainConfig
from skylite.engine.launchers import load_launcher
from skylite.errors import ConfigError
from skylite.processes.gpus import visible_gpus
from skylite.resources.gpu_fit import Fit, best_fit, measured, value_of, with_settings, without
from skylite.resources.gpu_memory_plan import Setup
from skylite.resources.gpu_placement import GpuChoice, Kind, assign_gpus
from skylite.rollout.plan import RunPlan
from skylite.rollout.session import read_events
from skylite.rollout.shutdown import StopRequest
from skylite.run.metrics_file import read_metrics

logger = logging.getLogger(__name__)

LEFT_OUT, MEASURED = 1, 3
"""Steps of a session: the first ones, which compile, and those whose median counts."""
LEAST_GAIN = 0.1
"""Share of a step that another placement must save, by a prediction that leaves much out."""
WORTH = 2.0
"""Times that it must save the seconds of another start."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How many GPUs train, how many sample, and whether these are the same."""

    training: int
    sampling: int
    kind: Kind

    def __str__(self) -> str:
        if self.kind == "shared":
            return f"all {self.training} GPUs for both"
        return f"{self.training} GPU(s) to train and {self.sampling} to sample"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Medians of the measured steps."""

    sampling: float
    training: float
    step: float
    turns: float = 0.0
    """Of engine.sleep."""

    def with_layout(self, now: Layout, then: Layout, *, ahead: bool) -> float:
        """Predicted seconds of a step with another layout.

        Sampling and training take time in inverse proportion to their GPUs. They overlap only on GPUs of
        their own, and if the run samples ahead. What else a step does takes the time that it takes now, but
        for turns: with the other layout no engine sleeps.
        """
        rest = max(0.0, self.step - self.turns - _together(self.sampling, self.training, now, ahead))
        sampling = self.sampling * now.sampling / then.sampling
        training = self.training * now.training / then.training
        return rest + _together(sampling, training, then, ahead)


def _together(sampling: float, training: float, layout: Layout, ahead: bool) -> float:
    overlaps = ahead and layout.kind == "split"
    return max(sampling, training) if overlaps else sampling + training


@dataclass(slots=True)
class MeasuredPlacement:
    """Watches a run with placement=auto, and stops a session once if another placement is faster."""

    stop: StopRequest
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Those of the faster placement; empty if none was found."""

    def step_ended(self, plan: RunPlan, metrics: Mapping[str, Any]) -> str:
        """As of `StepWatch`. Logs what was compared."""
        step: int = metrics["step"]
        free, config = {*plan.resolved.placement.free_settings}, plan.config
        is_free = config.placement == "auto" and free & {"trainer.num_ranks", "engine.num_engines"}
        # With completions of several versions in flight, nothing says how long a step's took.
        if not is_free or self.settings or step != plan.first_step + LEFT_OUT + MEASURED - 1:
            return ""
        if not config.engine.num_engines or config.rollout.max_staleness > 1:
            return ""
        try:
            now, others = fits(plan)
        except ConfigError as error:  # nvidia-smi may fail at any time, and the run needs no other placement
            logger.warning(f"placement=auto: other placements are not compared. {error.what}")
            return ""
        seconds = step_seconds(read_metrics(plan.run.metrics_path)[-MEASURED:])
        text, best = compared(seconds, now, others, ahead=config.rollout.max_staleness > 0)
        if best is None or best.saved_s * (config.num_steps - step) < WORTH * start_s(plan):
            logger.info(f"{text}: the run stays as it is")
            return ""
        return self.continue_with({name: value_of(best.fit.config, name) for name in sorted(free)}, text)

    def continue_with(self, settings: Mapping[str, Any], reason: str) -> str:
        """Request a stop, after which the run continues with these settings. Returns the reason in words."""
        self.settings, self.stop.continues = settings, True
        self.stop.requested.set()
        return f"{reason}: the run stops here and continues with that placement"


class Better(NamedTuple):
    """A placement that is worth a change."""

    fit: Fit
    saved_s: float
    """A step."""


def compared(
    seconds: StepSeconds, now: Fit, others: Sequence[Fit], *, ahead: bool
) -> tuple[str, Better | None]:
    """The fastest of the others by prediction, in words, and as a value if it saves enough."""
    layout = layout_of(now.placement)
    text = (
        f"placement=auto: {layout} take {seconds.step:.3g} s a step (sampling {seconds.sampling:.3g} s, "
        f"training {seconds.training:.3g} s)"
    )
    if not others:
        return f"{text}; no other placement fits", None
    times = [seconds.with_layout(layout, layout_of(other.placement), ahead=ahead) for other in others]
    least = min(times)
    best = others[times.index(least)]
    text += f"; {layout_of(best.placement)} should take {least:.3g} s"
    if least > seconds.step * (1 - LEAST_GAIN):
        return text, None
    return text, Better(best, seconds.step - least)


def step_seconds(metrics: Sequence[Mapping[str, Any]]) -> StepSeconds:
    """Medians of these steps."""
    names = ("time/rollout_s", "time/train_s", "time/step_s", "time/engine_sleep_s", "time/base_copies_s")
    sampling, training, step, *turns = (statistics.median(m.get(n, 0.0) for m in metrics) for n in names)
    return StepSeconds(sampling=sampling, training=training, step=step, turns=sum(turns))


def start_s(plan: RunPlan) -> float:
    """Seconds that this session took to start."""
    at = {event["event"]: event["monotonic"] for event in read_events(plan.run.events_path)}
    return float(at["engines_ready"] - at["run_started"])


def fits(plan: RunPlan) -> tuple[Fit, list[Fit]]:
    """The run as it is placed now, and every other placement that fits without being slow by its memory.

    GPUs count as free: what uses them is the run.
    """
    gpus, at = visible_gpus(), plan.resolved.placement
    launcher = load_launcher(plan.config, plan.resolved.trust.programs)
    placement = assign_gpus(plan.config, gpus)
    setup = Setup(
        launcher, plan.resolved.model.path, at.device, at.dtype, at.cpu_lora, placement, plan.resolved.teacher
    )
    free, ranks = without(plan.config, at.free_settings), "trainer.num_ranks"
    counts = range(1, len(gpus)) if ranks in at.free_settings else []
    tried: list[tuple[TrainConfig, Kind]] = [(with_settings(free, {ranks: n}), "split") for n in counts]
    found = [
        best_fit(config, setup, gpus, kind) for config, kind in [*tried, (free, "split"), (free, "shared")]
    ]
    others = [
        fit
        for fit in found
        if isinstance(fit, Fit)
        and layout_of(fit.placement) != layout_of(placement)
        and not fit.is_slow
        and not fit.config.engine.lends  # what that takes is not measured
        and fit.config.trainer.offload <= plan.config.trainer.offload
    ]
    return measured(plan.config, {}, setup), others


def layout_of(placement: GpuChoice) -> Layout:
    return Layout(len({*placement.rank_gpus}), len({*placement.engine_gpus}), placement.kind)
