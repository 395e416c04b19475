"""The completions of a run, from its rollouts and its held-out evaluations, and filters on them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from skylite.run.rollout_file import read_columns
from skylite.types import transcript

Source = Literal["training", "held-out"]
Order = Literal["stored", "best", "worst"]

GRAM = 4
"""Tokens in a row that count as repeated when they come again."""
HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)
ROLLOUT_COLUMNS = {
    "group": pa.int32(),
    "trajectory": pa.int32(),
    "turn": pa.int32(),
    "prompt_id": pa.string(),
    "token_ids": pa.list_(pa.int32()),
    "weights": pa.list_(pa.float32()),
    "finish_reason": pa.string(),
    "end": pa.string(),
    "turn_reward": pa.float64(),
    "has_turn_rewards": pa.bool_(),
    "reward": pa.float64(),
    "components": pa.map_(pa.string(), pa.float64()),
    "feedback": pa.string(),
    "question": pa.string(),
    "completion": pa.string(),
    "observed": pa.string(),
    "answer": pa.string(),
}
HELD_OUT_COLUMNS = {
    "prompt_id": pa.string(),
    "question": pa.string(),
    "answer": pa.string(),
    "turns": pa.list_(pa.string()),
    "observed": pa.list_(pa.string()),
    "end": pa.string(),
    "reward": pa.float64(),
    "tokens": pa.int64(),
    "finish_reason": pa.string(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A trajectory of training, or an answer to a held-out problem."""

    source: Source
    step: int
    """The training step; of a held-out answer the adapter version."""
    prompt_id: str
    question: str
    answer: str
    turns: tuple[str, ...]
    """The sampled text of each call of the engine."""
    observed: tuple[str, ...] = ()
    """What an episode told the model before each reply."""
    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    """Unweighted score of each reward function; empty for a held-out answer."""
    feedback: str = ""
    """What the reward functions or the environment said about it; empty for a held-out answer."""
    turn_rewards: tuple[float, ...] = ()
    """One for each turn; empty if the trajectory has a single reward."""
    end: str = "stop"
    """stop, or the limit of the environment that ended the episode."""
    tokens: int
    is_truncated: bool
    repetition: float = math.nan
    """Share of the completion's 4-grams of tokens that occurred in it before; nan for a held-out answer."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The texts that a search looks at."""
        return (self.question, *self.turns, *self.observed, self.feedback)

    @property
    def text(self) -> str:
        """All that was said, see `transcript`."""
        return transcript(self.turns, self.observed, self.turn_rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which completions to show, and in which order."""

    prompt: str | None = None
    """A prompt id, or parts of it between slashes: train/12 is not train/120."""
    contains: str | None = None
    """A part of the question, of a reply, of what an episode told the model, or of the feedback."""
    min_reward: float = -math.inf
    max_reward: float = math.inf
    order: Order = "stored"

    def apply(self, completions: Iterable[Completion]) -> list[Completion]:
        found = [c for c in completions if self._accepts(c)]
        if self.order == "stored":
            return found
        sign = -1 if self.order == "best" else 1
        # nan sorts last in either order.
        return sorted(found, key=lambda c: (math.isnan(c.reward), sign * c.reward))

    def _accepts(self, c: Completion) -> bool:
        no_limit = self.min_reward == -math.inf and self.max_reward == math.inf
        return (
            (self.prompt is None or f"/{self.prompt.strip('/')}/" in f"/{c.prompt_id}/")
            and (self.contains is None or any(self.contains in part for part in c.parts))
            and (no_limit or self.min_reward <= c.reward <= self.max_reward)
        )


def read_training(path: Path, step: int) -> list[Completion]:
    """The trajectories of a rollout file in its order. Raises DataError."""
    table = read_columns(path, ROLLOUT_COLUMNS)
    tokens = _completions(table)
    texts = table.drop_columns(["token_ids", "weights"]).to_pylist()
    rows = [row | {"tokens": ids} for row, ids in zip(texts, tokens, strict=True)]
    rows.sort(key=lambda row: (row["group"], row["trajectory"], row["turn"]))
    found = []
    for _, calls_of in groupby(rows, key=lambda row: (row["group"], row["trajectory"])):
        calls = list(calls_of)
        first, last = calls[0], calls[-1]
        sampled = [row["tokens"] for row in calls]
        completion = Completion(
            source="training",
            step=step,
            prompt_id=_text(first["prompt_id"]),
            question=_text(first["question"]),
            answer=_text(first["answer"]),
            turns=tuple(_text(row["completion"]) for row in calls),
            observed=tuple(_text(row["observed"]) for row in calls),
            reward=_number(first["reward"]),
            components={name: _number(score) for name, score in first["components"] or ()},
            feedback=_text(first["feedback"]),
            tokens=sum(map(len, sampled)),
            turn_rewards=tuple(_number(row["turn_reward"]) for row in calls)
            if first["has_turn_rewards"]
            else (),
            end=_text(first["end"]) or "stop",
            is_truncated=last["finish_reason"] == "length" or first["end"] not in (None, "stop"),
            repetition=_mean([repetition(ids) for ids in sampled]),
        )
        found.append(completion)
    return found


def read_held_out(path: Path, version: int) -> list[Completion]:
    """The answers of an evaluation in its order. Raises DataError."""
    return [
        Completion(
            source="held-out",
            step=version,
            prompt_id=_text(row["prompt_id"]),
            question=_text(row["question"]),
            answer=_text(row["answer"]),
            turns=tuple(map(_text, row["turns"] or [""])),
            observed=tuple(map(_text, row["observed"] or ())),
            reward=_number(row["reward"]),
            tokens=row["tokens"] or 0,
            end=_text(row["end"]) or "stop",
            is_truncated=row["finish_reason"] == "length" or row["end"] not in (None, "stop"),
        )
        for row in read_columns(path, HELD_OUT_COLUMNS).to_pylist()
    ]


def repetition(token_ids: Sequence[int] | np.ndarray[Any, Any]) -> float:
    """Share of the 4-grams that occurred before; 0 for a completion with fewer than two 4-grams."""
    ids = np.asarray(token_ids, dtype=np.int64)
    num_grams = len(ids) - GRAM + 1
    if num_grams < 2:
        return 0.0
    # One number for each 4-gram: unique rows would be ten times slower.
    hashes = np.zeros(num_grams, np.uint64)
    for k in range(GRAM):
        hashes = hashes * HASH_FACTOR + ids[k : k + num_grams].astype(np.uint64)
    return 1 - len(np.unique(hashes)) / num_grams


def _completions(table: pa.Table) -> list[np.ndarray[Any, Any]]:
    """The sampled tokens of each row: those with a weight. A damaged row has none."""
    rows = zip(_token_lists(table["token_ids"]), _token_lists(table["weights"]), strict=True)
    return [ids[weights > 0] if len(ids) == len(weights) else ids[:0] for ids, weights in rows]


def _token_lists(column: pa.ChunkedArray) -> list[np.ndarray[Any, Any]]:
    """The token ids of each row, without Python integers: a step may hold millions."""
    return [ids for chunk in column.chunks for ids in _chunk_of_lists(chunk)]


def _chunk_of_lists(chunk: pa.ListArray) -> list[np.ndarray[Any, Any]]:
    """Views of one array. pyarrow's own conversion to numpy imports pandas, which takes 0.3 s."""
    if chunk.values.null_count:  # a damaged file; DLPack has no nulls
        empty = np.empty(0, np.int64)
        return [np.asarray(row.values) if row.is_valid else empty for row in chunk]
    values, ends = np.from_dlpack(chunk.values), np.from_dlpack(chunk.offsets).tolist()
    return [values[start:end] for start, end in pairwise(ends)]


def _text(value: str | None) -> str:
    return value or ""


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
