"""Everything that the page of `skylite report` shows, as JSON values with plain strings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from skylite import __version__
from skylite.config.train import TrainConfig
from skylite.errors import ConfigError, DataError, ModelError
from skylite.report.adapter_layers import layer_updates
from skylite.report.alarm_evidence import MIN_WINDOW
from skylite.report.alarms import find_alarms
from skylite.report.completions import Completion, read_held_out, read_training
from skylite.report.plots import REPETITION, time_split, with_components, with_scores
from skylite.report.read_run import HeldOut, RunFacts
from skylite.report.summary import summary
from skylite.run.run_dir import AdapterVersion, published_versions
from skylite.untrusted_text import plain_lines

MAX_READ_STEPS = 60
"""Rollout files that are read for texts and repetition, at equal distances."""
MAX_VERSIONS = 8
"""Adapters whose layers are shown."""
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
    """One run: facts, metrics by column, findings, adapters by layer, settings and completions."""
    unreadable = list(facts.unreadable)
    completions, repetition = read_completions(facts, unreadable, on_file)
    metrics = metric_columns(facts, repetition)
    config = facts.run.config
    resolved = facts.run.run_config.resolved
    shown = share_out(completions, max_completions)
    head = {k: v for k, v in summary(facts).items() if k not in ("path", "alarms", "unreadable")}
    return {
        **head,
        "label": label,
        "alarms": [
            {"kind": a.kind, "is_alarm": a.is_alarm, "since": a.since, "text": a.text}
            for a in find_alarms(facts.metrics, facts.held_out, repetition)
        ],
        "is_judged": len(facts.metrics) >= 2 * MIN_WINDOW,
        "has_partial_rewards": facts.has_partial_rewards,
        "metrics": metrics,
        "held_out": [{"version": h.version, "label": h.label, **asdict(h.score)} for h in facts.held_out],
        "time": time_split(facts.metrics),
        "adapters": adapter_data(facts, unreadable, on_file),
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
    """How many files of completions and adapters `page_data` reads."""
    return len(_rollout_files(facts)) + len(_evaluations(facts)) + len(_adapters(facts))


def _rollout_files(facts: RunFacts) -> list[tuple[int, Path]]:
    return spread(list(facts.files.stored_rollouts().items()), MAX_READ_STEPS)


def _evaluations(facts: RunFacts) -> list[HeldOut]:
    return [h for h in spread(facts.held_out, MAX_READ_STEPS) if h.path.is_file()]


def _adapters(facts: RunFacts) -> list[AdapterVersion]:
    # Version 0 is zero.
    trained = [v for v in published_versions(facts.run.lora_sync_path) if v.version > 0]
    return spread(trained, MAX_VERSIONS)


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


def adapter_data(facts: RunFacts, unreadable: list[str], on_file: OnFile) -> dict[str, Any]:
    """Norm and effective rank by version, layer and module."""
    updates = {}
    for version in _adapters(facts):
        on_file()
        try:
            updates[version.version] = layer_updates(version.path)
        except ModelError as error:
            unreadable.append(error.what)
    return {
        "versions": list(updates),
        "updates": [[[u.layer, u.module, u.norm, u.effective_rank] for u in updates[v]] for v in updates],
    }


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
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{start}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return found


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
