"""The curves of the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from skylite.evaluation.confidence_interval import score_name
from skylite.report.read_run import number


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Curves in one picture."""

    title: str
    keys: tuple[str, ...]
    """Metrics; the first is the main curve."""
    help: str
    """What is good and what is bad, in a sentence."""
    unit: str = ""
    percent: bool = False
    log: bool = False
    noisy: bool = True
    """Whether smoothing helps."""
    needs_binary: bool = False
    """In percent and called right only where the first reward function returns 0 or 1."""
    divisor: int = 1
    """Converts the metric to `unit`."""


HELD_OUT = "held-out"
REPETITION = "repetition"
PLOTS = (
    Plot(title="Reward", keys=("reward/mean",), help="Should rise, with noise from step to step."),
    Plot(
        title="Held-out accuracy",
        keys=(HELD_OUT,),
        help="Should rise with the reward. The band is the 95 % interval.",
        percent=True,
        needs_binary=True,
    ),
    Plot(
        title="Right completions",
        keys=("reward/right_frac",),
        help="Completions of training whose first reward function returns 1.",
        percent=True,
        needs_binary=True,
    ),
    Plot(
        title="KL to the reference",
        keys=("policy/kl_ref",),
        help="Rises slowly. Measured only with algorithm.kl_coef above 0.",
        unit="nats",
    ),
    Plot(
        title="Entropy",
        keys=("policy/entropy",),
        help="Falls slowly. Near 0 with a low reward: the policy collapsed. Rises while the reward falls: "
        "it becomes random.",
        unit="nats",
    ),
    Plot(
        title="Groups without signal",
        keys=("groups/zero_std_sampled_frac",),
        help="Groups whose rewards are all equal. Near 100 %, nothing is learned.",
        percent=True,
    ),
    Plot(
        title="Completion length",
        keys=("completion/tokens_mean",),
        help="Steady, or moves with the reward.",
        unit="tokens",
    ),
    Plot(
        title="Truncated completions",
        keys=("completion/truncated_frac",),
        help="Near 0. Else raise rollout.max_completion_tokens.",
        percent=True,
    ),
    Plot(
        title="Repetition",
        keys=(REPETITION,),
        help="Share of 4-grams of tokens that a completion repeats. A rise is a sign of degeneration.",
        percent=True,
    ),
    Plot(
        title="Trainer against engine",
        keys=("mismatch/logprob_diff_mean", "mismatch/logprob_diff_max"),
        help="Mean and largest difference of log-probabilities. Should not grow.",
        unit="nats",
        log=True,
    ),
    Plot(
        title="Canary gap",
        keys=("canary/gap_max", "canary/gap_mean"),
        help="After each sync, on fixed sequences. Over the tolerance the run stops.",
        unit="nats",
        log=True,
    ),
    Plot(
        title="Effective sample size",
        keys=("mismatch/ess_frac",),
        help="Near 100 %. Low: few tokens carry the update.",
        percent=True,
    ),
    Plot(
        title="Gradient norm",
        keys=("optim/grad_norm",),
        help="Steady. Jumps by orders of magnitude: lower optim.lr.",
    ),
    Plot(
        title="Clipped tokens",
        keys=("policy/clipped_frac",),
        help="0 with one update per step, small with several.",
        percent=True,
    ),
    Plot(
        title="Adapter norm",
        keys=("adapter/b_norm",),
        help="Frobenius norm of all LoRA B matrices: how far the policy moved from its start.",
        noisy=False,
    ),
    Plot(
        title="Sampling speed",
        keys=("perf/completion_tokens_per_s",),
        help="Completion tokens per second of all engines.",
        unit="tokens per second",
    ),
    Plot(
        title="Memory",
        keys=("mem/rss_peak_bytes",),
        help="Largest memory of a trainer rank so far, without that of a GPU.",
        unit="GiB",
        divisor=2**30,
        noisy=False,
    ),
    Plot(
        title="GPU memory",
        keys=("mem/gpu_peak_bytes",),
        help="Largest memory of a trainer rank's tensors on its GPU so far, without the engine's.",
        unit="GiB",
        divisor=2**30,
        noisy=False,
    ),
    Plot(title="Learning rate", keys=("optim/lr",), help="Of each step.", noisy=False),
)


def with_scores(plots: Iterable[Plot], *, is_binary: bool) -> tuple[Plot, ...]:
    """The plots of a run whose first reward function returns other scores than 0 and 1."""
    if is_binary:
        return tuple(plots)
    title = f"Held-out {score_name(is_binary=False)}"
    return tuple(
        replace(plot, title=title, percent=False) if plot.keys == (HELD_OUT,) else plot
        for plot in plots
        if plot.keys == (HELD_OUT,) or not plot.needs_binary
    )


def component_plot(metrics: Iterable[Mapping[str, Any]], known: frozenset[str]) -> Plot | None:
    """The reward functions of a run with several: `reward/NAME`."""
    names = {k: None for m in metrics for k in m if k.startswith("reward/") and k not in known}
    if not names:
        return None
    return Plot(title="Reward functions", keys=tuple(names), help="Mean unweighted score of each.")


def with_components(metrics: Iterable[Mapping[str, Any]]) -> tuple[Plot, ...]:
    """PLOTS, and after the first the reward functions if there are several."""
    known = frozenset({"reward/mean", "reward/std", "reward/right_frac", "reward/penalty_mean",
                       "reward/partial_frac", "reward/tokens_corr", "reward/sampled_mean"})  # fmt: skip
    extra = component_plot(metrics, known)
    return PLOTS if extra is None else (PLOTS[0], extra, *PLOTS[1:])


TIMES = {
    "sampling": "time/rollout_s",
    "training": "time/train_s",
    "sync": "time/sync_s",
    "checkpoints": "time/checkpoint_s",
}


def time_split(metrics: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of all steps by part. What overlaps is scaled so that the parts sum to the steps."""
    parts, total = dict.fromkeys(TIMES, 0.0), 0.0
    for m in metrics:
        step = number(m, "time/step_s")
        if not math.isfinite(step):
            continue
        total += step
        for name, key in TIMES.items():
            seconds = number(m, key)
            parts[name] += seconds if math.isfinite(seconds) else 0.0
    known = sum(parts.values())
    if known > total > 0:  # sampling ahead: two parts run at once
        return {name: seconds * total / known for name, seconds in parts.items()}
    return {**parts, "other": total - known}
