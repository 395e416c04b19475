"""Which prompts a step trains on, where that depends on the steps before: mixed data sets, prompts that are
retired once the policy solves them, and sampling by pass rate.

A line of prompt_history.jsonl holds what each prompt of a step scored. The prompts of step k are a function
of the lines of steps 1 to k - 1 and the seed. So a resumed run chooses the same prompts.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from skylite.config.rollout import DataConfig
from skylite.errors import ConfigError, DataError
from skylite.run.files import append_line
from skylite.types import Group, Prompt
from skylite.untrusted_files import read_bytes
from skylite.untrusted_text import parse_json

MEMORY = 0.5
"""What remains of the earlier completions' weight in a pass rate when a prompt is sampled again."""
Outcomes = Mapping[str, tuple[int, int]]
"""Prompt id -> completions that solved it, and all completions."""


@dataclass(slots=True)
class PromptRecord:
    """What is known of a prompt."""

    visits: int = 0
    solved_in_row: int = 0
    """Visits up to the last one in which each completion solved it."""
    right: float = 0.0
    """Completions that solved it; earlier ones count less."""
    seen: float = 0.0

    @property
    def pass_rate(self) -> float:
        """Estimate, 0 to 1: 0.5 before the first visit, and never quite 0 or 1."""
        return (self.right + 1) / (self.seen + 2)

    def add(self, right: int, seen: int) -> None:
        """Note a visit. `seen` is 0 for a group that was left out."""
        self.visits += 1
        if seen:
            self.solved_in_row = self.solved_in_row + 1 if right == seen else 0
            self.right, self.seen = MEMORY * self.right + right, MEMORY * self.seen + seen


@dataclass(slots=True)
class PromptHistory:
    """The prompts of a run and what each step made of them."""

    prompts: Sequence[Prompt]
    config: DataConfig
    per_step: int
    seed: int
    path: Path
    sets: Mapping[str, str] = field(default_factory=dict)
    """Prompt id -> its folder in data.mix. Others are of data.path."""
    _steps: dict[int, Outcomes] = field(default_factory=dict)
    _records: dict[str, PromptRecord] = field(default_factory=dict)
    """After `_known` steps."""
    _known: int = 0

    def __post_init__(self) -> None:
        lines = read_bytes(self.path).split(b"\n") if self.path.exists() else []
        for line in lines:  # the last line of a step counts: a resumed run may sample it again
            try:
                row = parse_json(line)
                outcomes = {
                    str(name): (int(right), int(seen)) for name, (right, seen) in row["prompts"].items()
                }
                self._steps[int(row["step"])] = outcomes
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # torn by a kill; a step that is missing is refused below

    def record(self, step: int, prompts: Sequence[Prompt], groups: Sequence[Group]) -> None:
        """Save what the prompts of a step scored. One without a group was left out. Raises WriteFailed."""
        outcomes = {prompt.id: (0, 0) for prompt in prompts}
        for group in groups:
            scores = [t.first_score for t in group.trajectories]
            outcomes[group.prompt.id] = (sum(s >= self.config.solved_at for s in scores), len(scores))
        append_line(self.path, json.dumps({"step": step, "prompts": outcomes}))
        self._steps[step] = outcomes
        if step <= self._known:
            self._known, self._records = 0, {}

    def num_active(self, step: int) -> int:
        """Prompts that are not retired when `step` begins."""
        records = self._before(step)
        return sum(not self._is_retired(records, prompt) for prompt in self.prompts)

    def chosen(self, step: int, round_number: int = 0) -> list[Prompt]:
        """The prompts of a step; in rounds 1, 2, ... those that replace groups, fewer if none are left."""
        count = (round_number + 1) * self.per_step
        return self._order(step, count)[round_number * self.per_step :]

    def _order(self, step: int, count: int) -> list[Prompt]:
        """The first `count` prompts of a step: of the data sets in turn by weight, in each by priority."""
        records = self._before(step)
        weights = {"": 1.0, **self.config.mix}
        given = dict.fromkeys(weights, 0)
        for prompt in self.prompts:
            given[self._set_of(prompt)] += records[prompt.id].visits if prompt.id in records else 0
        waiting = {name: self._by_priority(step, name, records) for name in weights}
        chosen: list[Prompt] = []
        while len(chosen) < count:
            total = sum(given.values()) + 1
            short = {n: weights[n] * total / sum(weights.values()) - given[n] for n in weights if waiting[n]}
            if not short:
                break
            name = max(short, key=lambda n: short[n])
            given[name] += 1
            chosen.append(waiting[name].pop())
        return chosen

    def _by_priority(self, step: int, name: str, records: Mapping[str, PromptRecord]) -> list[Prompt]:
        """The active prompts of a data set, the next one last."""
        order = random.Random(f"{self.seed}/{name}/{step}")
        new = PromptRecord()
        keyed = []
        for place, prompt in enumerate(self.prompts):
            if self._set_of(prompt) != name or self._is_retired(records, prompt):
                continue
            record, drawn = records.get(prompt.id, new), 1 - order.random()  # over 0, at most 1
            if self.config.sampling == "pass_rate":
                p = record.pass_rate
                # Weighted sampling without replacement (Efraimidis and Spirakis): the largest u ** (1 / w).
                key = math.log(drawn) / (p * (1 - p))
            else:
                key = drawn - record.visits
            keyed.append((key, place, prompt))
        return [prompt for *_, prompt in sorted(keyed, key=lambda item: item[:2])]

    def _set_of(self, prompt: Prompt) -> str:
        return self.sets.get(prompt.id, "")

    def _is_retired(self, records: Mapping[str, PromptRecord], prompt: Prompt) -> bool:
        limit = self.config.retire_after
        return bool(limit) and prompt.id in records and records[prompt.id].solved_in_row >= limit

    def _before(self, step: int) -> Mapping[str, PromptRecord]:
        """What is known when `step` begins. Raises ConfigError if a step is missing in the file."""
        if self._known > step - 1:
            self._known, self._records = 0, {}
        for earlier in range(self._known + 1, step):
            if earlier not in self._steps:
                raise ConfigError(
                    f"{self.path} does not say which prompts step {earlier} had; step {step} needs that.",
                    "Restore the file, or start a new run.",
                )
            for name, (right, seen) in self._steps[earlier].items():
                self._records.setdefault(name, PromptRecord()).add(right, seen)
            self._known = earlier
        return self._records


def merged(parts: Iterable[tuple[str, Sequence[Prompt]]]) -> tuple[list[Prompt], dict[str, str]]:
    """The prompts of several folders, and the folder of each. Raises DataError for an id in two of them."""
    prompts: list[Prompt] = []
    sets: dict[str, str] = {}
    for folder, rows in parts:
        for prompt in rows:
            if prompt.id in sets:
                raise DataError(
                    f"{folder} (data.mix) and {sets[prompt.id] or 'data.path'} both have a prompt "
                    f"{prompt.id}.",
                    "Name each data set once, or prepare one of them under another --out.",
                )
            sets[prompt.id] = folder
            prompts.append(prompt)
    return prompts, sets
