"""The page of `skylite report`: one HTML file without network access.

A run may be a stranger's. The page shows its strings as text nodes only, the embedded JSON cannot end its
script element, and a content security policy allows no script but ours, by hash, and no request at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from skylite import __version__
from skylite.config.train import TrainConfig
from skylite.errors import ConfigError, DataError
from skylite.evaluation.confidence_interval import score_name
from skylite.report.alarms import MIN_WINDOW
from skylite.report.completions import Completion, read_held_out, read_training
from skylite.report.read_run import HeldOut, RunFacts, number
from skylite.report.summary import summary
from skylite.untrusted_text import plain_lines

SCRIPTS = ("uPlot-1.6.32.min.js", "plots.js", "samples.js", "page.js")
STYLES = ("uPlot-1.6.32.min.css", "page.css")
GENERATOR = "skylite report"
"""Marks a page of ours, which a new report may replace."""
MAX_READ_STEPS = 60
"""Rollout files that are read for texts and repetition, at equal distances."""
MAX_TEXT = 20_000
"""Characters of a text; a longer one is cut and says so."""

T = TypeVar("T")
OnFile = Callable[[], None]
"""Called before each of `num_files` is read."""


def page_data(runs: Sequence[RunFacts], max_completions: int, on_file: OnFile) -> dict[str, Any]:
    """The data of a page about these runs."""
    labels = unique_names([facts.name for facts in runs])
    all_plots = dict.fromkeys(p for facts in runs for p in with_components(facts.metrics))
    plots = with_scores(all_plots, is_binary=not any(facts.has_partial_rewards for facts in runs))
    share = max(1, max_completions // len(runs))
    page: dict[str, Any] = plain_values(
        {
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "version": __version__,
            "plots": [asdict(plot) for plot in plots],
            "runs": [
                run_data(facts, label, share, on_file) for facts, label in zip(runs, labels, strict=True)
            ],
        }
    )
    return page


def run_data(facts: RunFacts, label: str, max_completions: int, on_file: OnFile) -> dict[str, Any]:
    """One run: facts, metrics by column, findings, settings and completions."""
    unreadable = list(facts.unreadable)
    completions, repetition = read_completions(facts, unreadable, on_file)
    metrics = metric_columns(facts, repetition)
    config = facts.run.config
    resolved = facts.run.run_config.resolved
    shown = share_out(completions, max_completions)
    head = {k: v for k, v in summary(facts, repetition).items() if k != "path"}
    return {
        **head,
        "label": label,
        "is_judged": len(facts.metrics) >= 2 * MIN_WINDOW,
        "has_partial_rewards": facts.has_partial_rewards,
        "metrics": metrics,
        "held_out": [{"version": h.version, "label": h.label, **asdict(h.score)} for h in facts.held_out],
        "time": time_split(facts.metrics),
        "settings": flat(config.model_dump(mode="json")),
        "defaults": flat(TrainConfig(num_steps=config.num_steps).model_dump(mode="json")),
        "machine": machine_data(facts, unreadable),
        "choices": [*map(str, resolved.notes), *resolved.choices],
        "skylite_version": facts.run.run_config.skylite_version,
        "num_completions": sum(map(len, completions)),
        "completions": [_completion(c) for part in shown for c in part],
        "unreadable": unreadable,
    }


def num_files(facts: RunFacts) -> int:
    """How many files of completions `page_data` reads."""
    return len(_rollout_files(facts)) + len(_evaluations(facts))


def _rollout_files(facts: RunFacts) -> list[tuple[int, Path]]:
    return spread(list(facts.files.stored_rollouts().items()), MAX_READ_STEPS)


def _evaluations(facts: RunFacts) -> list[HeldOut]:
    return [h for h in spread(facts.held_out, MAX_READ_STEPS) if h.path.is_file()]


def read_completions(
    facts: RunFacts, unreadable: list[str], on_file: OnFile = lambda: None
) -> tuple[list[list[Completion]], dict[int, float]]:
    """Completions of each read rollout file and evaluation, and the mean repetition of each read step."""
    found: list[list[Completion]] = []
    repetition: dict[int, float] = {}
    for step, path in _rollout_files(facts):
        on_file()
        try:
            completions = read_training(path, step)
        except DataError as error:
            unreadable.append(error.what)
            continue
        if completions:
            found.append(completions)
            repetition[step] = math.fsum(c.repetition for c in completions) / len(completions)
    for held_out in _evaluations(facts):
        on_file()
        try:
            found.append(read_held_out(held_out.path, held_out.version))
        except DataError as error:
            unreadable.append(error.what)
    return found, repetition


def spread(items: Sequence[T], count: int) -> list[T]:
    """At most `count` items at equal distances, the first and the last included."""
    if len(items) <= count:
        return list(items)
    return [items[round(k * (len(items) - 1) / (count - 1))] for k in range(count)]


def share_out(parts: Sequence[Sequence[Completion]], total: int) -> list[Sequence[Completion]]:
    """The first completions of each part, so that all parts together have at most `total`.

    Short parts leave their share to longer ones. A part's first prompts are the same in every evaluation.
    """
    kept = [0] * len(parts)
    left = total
    while left > 0 and (open_parts := [k for k, part in enumerate(parts) if kept[k] < len(part)]):
        share = max(1, left // len(open_parts))
        for k in open_parts:
            take = min(share, len(parts[k]) - kept[k], left)
            kept[k] += take
            left -= take
    return [part[:n] for part, n in zip(parts, kept, strict=True)]


def metric_columns(facts: RunFacts, repetition: Mapping[int, float]) -> dict[str, list[Any]]:
    """Each numeric metric as a column beside `step`, and the repetition."""
    steps = [int(m["step"]) for m in facts.metrics]
    names = dict.fromkeys(name for m in facts.metrics for name in m if name != "step")
    columns = {name: facts.series(name) for name in names}
    columns = {name: values for name, values in columns.items() if any(map(math.isfinite, values))}
    if repetition:
        columns[REPETITION] = [repetition.get(step, math.nan) for step in steps]
    return {"step": steps, **columns}


def machine_data(facts: RunFacts, unreadable: list[str]) -> dict[str, Any]:
    """machine.json flattened; empty for a run that did not record it."""
    path = facts.files.machine_path
    if path.is_symlink():  # of a stranger's run, to a file of yours: the page may be sent on
        unreadable.append(f"{path} is a link, and is not shown.")
        return {}
    if not path.is_file():
        return {}
    try:
        return flat(facts.files.read_json(path))
    except ConfigError as error:
        unreadable.append(error.what)
        return {}


def flat(tree: Mapping[str, Any], start: str = "") -> dict[str, Any]:
    """Nested tables as `section.key`."""
    result: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{start}{key}"
        result |= flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return result


def unique_names(names: Sequence[str]) -> list[str]:
    """The names, numbered where several are equal."""
    return [
        name if names.count(name) == 1 else f"{name} ({names[: k + 1].count(name)})"
        for k, name in enumerate(names)
    ]


def plain_values(value: Any) -> Any:
    """JSON values with plain strings (untrusted_text.py) and null for numbers that JSON lacks."""
    if isinstance(value, str):
        return plain_lines(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {plain_lines(str(k)): plain_values(v) for k, v in value.items()}
    if isinstance(value, Iterable):
        return [plain_values(v) for v in value]
    return value


def _completion(c: Completion) -> dict[str, Any]:
    return {
        "source": c.source,
        "step": c.step,
        "prompt": c.prompt_id,
        "question": _cut(c.question),
        "answer": _cut(c.answer),
        "turns": [_cut(turn) for turn in c.turns],
        "observed": [_cut(told) for told in c.observed],
        "turn_rewards": list(c.turn_rewards),
        "end": c.end,
        "reward": c.reward,
        "components": dict(c.components),
        "tokens": c.tokens,
        "truncated": c.is_truncated,
    }


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} [{len(text) - MAX_TEXT} characters cut]"


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


SHOWN_REWARDS = {f"reward/{name}" for name in ("mean", "std", "right_frac", "penalty_mean", "partial_frac",
                                              "tokens_corr", "sampled_mean")}  # fmt: skip
"""Metrics of the reward that are no reward function."""


def with_components(metrics: Iterable[Mapping[str, Any]]) -> tuple[Plot, ...]:
    """PLOTS, and after the first the reward functions, `reward/NAME`, if there are several."""
    names = {k: None for m in metrics for k in m if k.startswith("reward/") and k not in SHOWN_REWARDS}
    if not names:
        return PLOTS
    extra = Plot(title="Reward functions", keys=tuple(names), help="Mean unweighted score of each.")
    return (PLOTS[0], extra, *PLOTS[1:])


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


def page_html(data: Mapping[str, Any], mark: str = "") -> str:
    """The page. `data`: see `page_data`. `mark` tells it from pages about other runs."""
    script = "\n".join(map(_asset, SCRIPTS))
    style = "\n".join(map(_asset, STYLES))
    title = "skylite: " + ", ".join(run["label"] for run in data["runs"])
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": escape(policy),
        "generator": GENERATOR,
        "mark": mark,
        "title": escape(title),
        "style": style,
        "script": script,
        "data": script_json(data),
    }
    # In one pass, because a run's name may look like a mark.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark.group(1)], _asset("page.html"))


def script_json(data: Any) -> str:
    """JSON for a script element: without the characters that begin a tag, a comment or an entity."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    """The source expression of an inline element with exactly this text."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _asset(name: str) -> str:
    return files("skylite.report").joinpath("page", name).read_text(encoding="utf-8")
