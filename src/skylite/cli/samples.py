"""Print completions of a run with their rewards."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from skylite.cli.options import AsJson, RunOrNewest, newest_run, numbers
from skylite.errors import ConfigError
from skylite.report.completions import Completion, Filter, read_held_out, read_training
from skylite.report.read_run import RunFacts, read_facts
from skylite.ui.logs import show


def samples(
    target: RunOrNewest = None,
    step: Annotated[
        str, typer.Option(help="Steps, e.g. 1,50,100. Default: the newest; with --prompt all.")
    ] = "",
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Answers to held-out problems; --step is the adapter version.")
    ] = False,
    prompt: Annotated[
        str | None, typer.Option(help="Only this prompt id, or parts of it: train/12. Default: all prompts.")
    ] = None,
    contains: Annotated[
        str | None, typer.Option(help="Only where question or completion contains this. Default: all.")
    ] = None,
    min_reward: Annotated[float, typer.Option(help="Lowest reward.", show_default="any")] = -math.inf,
    max_reward: Annotated[float, typer.Option(help="Highest reward.", show_default="any")] = math.inf,
    best: Annotated[bool, typer.Option("--best", help="Best rewards first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Worst rewards first.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Maximum completions to print.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Print the completions that the filters accept, at most `limit`."""
    if best and worst:
        raise ConfigError("--best and --worst exclude each other.", "Give one of them.")
    chosen = Filter(
        prompt=prompt,
        contains=contains,
        min_reward=min_reward,
        max_reward=max_reward,
        order="best" if best else "worst" if worst else "stored",
    )
    facts = read_facts(target or newest_run())
    matching = chosen.apply(_read(facts, numbers(step), held_out=held_out, every_step=prompt is not None))
    shown = matching[:limit]
    if as_json:
        show(json.dumps([_json(c) for c in shown]))
        return
    for completion in shown:
        show(completion_text(completion))
    if not matching:
        show("No completion matches.")
    elif len(matching) > len(shown):
        show(f"{len(shown)} of {len(matching)} completions; --limit shows more.")


def completion_text(c: Completion) -> str:
    """A heading, the question and what was said."""
    where = f"step {c.step}" if c.source == "training" else f"held-out, version {c.step}"
    scores = ", ".join(f"{name} {score:g}" for name, score in c.components.items())
    parts = f" ({scores})" if len(c.components) > 1 else ""
    count = f"  {len(c.turns)} turns" if len(c.turns) > 1 else ""
    limit = "" if c.end == "stop" else f" by the limit of {c.end}"
    cut = f", truncated{limit}" if c.is_truncated else ""
    head = f"--- {where}  {c.prompt_id}  reward {c.reward:g}{parts}{count}  {c.tokens} tokens{cut}"
    feedback = [f"feedback: {c.feedback}"] if c.feedback else []
    return "\n".join([head, f"question: {c.question}", f"answer: {c.answer}", c.text, *feedback, ""])


def _read(facts: RunFacts, steps: Sequence[int], *, held_out: bool, every_step: bool) -> Iterator[Completion]:
    """The completions of `steps`; of no steps: of the newest, or of every one."""
    reader: Callable[[Path, int], list[Completion]] = read_held_out if held_out else read_training
    if held_out:
        stored = {h.version: h.path for h in facts.held_out if h.path.is_file()}
        kind = "held-out evaluation of version"
    else:
        stored, kind = facts.files.stored_rollouts(), "rollouts of step"
    if not stored:
        raise ConfigError(f"{facts.run.path} has no {kind.split(' of ')[0]} yet.", "Wait for its first step.")
    for step in steps:
        if step not in stored:
            raise ConfigError(
                f"{facts.run.path} has no {kind} {step} (stored: {_ranges(list(stored))}).",
                "Choose one of those.",
            )
    chosen = steps or (tuple(stored) if every_step else (max(stored),))
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
