"""`skylite samples`: completions of a run with their rewards."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from skylite.errors import ConfigError
from skylite.report.completions import Completion, Filter, read_held_out, read_training
from skylite.report.read_run import RunFacts, read_facts
from skylite.ui.logs import show


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFlags:
    """The flags of `skylite samples`."""

    steps: tuple[int, ...]
    """Empty: the newest step, or with a prompt every step."""
    held_out: bool
    filter: Filter
    limit: int
    as_json: bool


def samples(target: Path, flags: SampleFlags) -> None:
    """Print the completions that the filters accept, at most `limit`."""
    facts = read_facts(target)
    found = flags.filter.apply(_read(facts, flags))
    shown = found[: flags.limit]
    if flags.as_json:
        show(json.dumps([_json(c) for c in shown]))
        return
    for completion in shown:
        show(completion_text(completion))
    if not found:
        show("No completion matches.")
    elif len(found) > len(shown):
        show(f"{len(shown)} of {len(found)} completions; --limit shows more.")


def completion_text(c: Completion) -> str:
    """A heading, the question and what was said."""
    where = f"step {c.step}" if c.source == "training" else f"held-out, version {c.step}"
    scores = ", ".join(f"{name} {score:g}" for name, score in c.components.items())
    parts = f" ({scores})" if len(c.components) > 1 else ""
    count = f"  {len(c.turns)} turns" if len(c.turns) > 1 else ""
    limit = "" if c.end == "stop" else f" by the limit of {c.end}"
    cut = f", truncated{limit}" if c.is_truncated else ""
    head = f"--- {where}  {c.prompt_id}  reward {c.reward:g}{parts}{count}  {c.tokens} tokens{cut}"
    return "\n".join([head, f"question: {c.question}", f"answer: {c.answer}", c.text, ""])


def _read(facts: RunFacts, flags: SampleFlags) -> Iterator[Completion]:
    reader: Callable[[Path, int], list[Completion]] = read_held_out if flags.held_out else read_training
    if flags.held_out:
        stored = {h.version: h.path for h in facts.held_out if h.path.is_file()}
        kind = "held-out evaluation of version"
    else:
        stored, kind = facts.files.stored_rollouts(), "rollouts of step"
    if not stored:
        raise ConfigError(f"{facts.run.path} has no {kind.split(' of ')[0]} yet.", "Wait for its first step.")
    for step in flags.steps:
        if step not in stored:
            raise ConfigError(
                f"{facts.run.path} has no {kind} {step} (stored: {_ranges(list(stored))}).",
                "Choose one of those.",
            )
    chosen = flags.steps or (tuple(stored) if flags.filter.prompt is not None else (max(stored),))
    for step in sorted(set(chosen)):
        yield from reader(stored[step], step)


def _ranges(steps: list[int]) -> str:
    """1 to 3, 7."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], step]
        else:
            parts.append([step])
    return ", ".join(" to ".join(map(str, part)) for part in parts)


def _json(c: Completion) -> dict[str, object]:
    """The completion as JSON values; null for numbers that JSON lacks."""
    values = asdict(c)
    values["components"] = {name: _number(score) for name, score in c.components.items()}
    return values | {
        "reward": _number(c.reward),
        "turn_rewards": [_number(reward) for reward in c.turn_rewards],
        "repetition": _number(c.repetition),
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
