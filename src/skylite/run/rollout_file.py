"""`rollouts/step-000012.parquet`: what the orchestrator hands the trainer, and what a person browses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from skylite.errors import DataError
from skylite.run.files import atomic_file
from skylite.types import Completion, Message, Prompt, Rollout, RolloutGroup

ROLLOUT_SCHEMA = pa.schema(
    [
        ("group", pa.int32()),
        ("prompt_id", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("completion_token_ids", pa.list_(pa.int32())),
        ("rollout_logprobs", pa.list_(pa.float32())),
        # float64, so that the trainer rounds their sum as `RolloutGroup.is_zero_std` does.
        ("reward", pa.float64()),
        ("penalty", pa.float64()),
        ("finish_reason", pa.string()),
        ("adapter_version", pa.int32()),
        ("question", pa.string()),
        ("completion", pa.string()),
        ("answer", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """One completion as the trainer needs it: no text, no prompt object."""

    group: int
    """Samples with the same number answer the same prompt."""
    prompt_token_ids: list[int]
    """[P]"""
    completion_token_ids: list[int]
    """[C]"""
    rollout_logprobs: list[float]
    """[C]"""
    reward: float
    """What is learned from: the score plus the penalty."""
    truncated: bool
    """The completion ended for length."""
    prompt_id: str = ""
    """For errors; empty where it is not known."""


def write_rollouts(path: Path, groups: Sequence[RolloutGroup]) -> None:
    """Write a step's groups, one row a completion, atomically."""
    rows = [
        {
            "group": index,
            "prompt_id": r.prompt.id,
            "prompt_token_ids": r.prompt_token_ids,
            "completion_token_ids": r.completion.token_ids,
            "rollout_logprobs": r.completion.logprobs,
            "reward": r.reward,
            "penalty": r.penalty,
            "finish_reason": r.completion.finish_reason,
            "adapter_version": r.completion.adapter_version,
            "question": r.prompt.messages[-1]["content"],
            "completion": r.completion.text,
            "answer": r.prompt.answer,
        }
        for index, group in enumerate(groups)
        for r in group.rollouts
    ]
    table = pa.Table.from_pylist(rows, schema=ROLLOUT_SCHEMA)
    with atomic_file(path, table.nbytes) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def read_rollouts(path: Path) -> list[TrainSample]:
    """The samples of a step in file order. Raises DataError when the file is not a rollout file."""
    return [
        TrainSample(
            group=row["group"],
            prompt_token_ids=row["prompt_token_ids"],
            completion_token_ids=row["completion_token_ids"],
            rollout_logprobs=row["rollout_logprobs"],
            reward=row["reward"] + row["penalty"],
            truncated=row["finish_reason"] == "length",
            prompt_id=row["prompt_id"],
        )
        for row in _rows(path)
    ]


def read_groups(path: Path) -> list[RolloutGroup]:
    """The groups of a step as they were written; of a prompt only id, question and answer. Raises DataError like `read_rollouts`."""
    groups: dict[int, list[Rollout]] = {}
    for row in _rows(path):
        completion = Completion(
            token_ids=row["completion_token_ids"], logprobs=row["rollout_logprobs"], text=row["completion"],
            finish_reason=row["finish_reason"], adapter_version=row["adapter_version"],
        )  # fmt: skip
        question = [Message(role="user", content=row["question"])]
        prompt = Prompt(id=row["prompt_id"], messages=question, answer=row["answer"], source="")
        rollout = Rollout(
            prompt=prompt,
            prompt_token_ids=row["prompt_token_ids"],
            completion=completion,
            reward=row["reward"],
            penalty=row["penalty"],
        )
        groups.setdefault(row["group"], []).append(rollout)
    return [RolloutGroup(tuple(rollouts)) for rollouts in groups.values()]


def mean_reward(path: Path) -> float:
    """The mean score of a step, without penalties; not finite where a score is not. Raises DataError like `read_rollouts`."""
    rewards: list[float] = [row["reward"] for row in _rows(path, ["reward"])]
    return sum(rewards) / len(rewards)  # fsum refuses infinities of both signs


def _rows(path: Path, columns: list[str] | None = None) -> list[dict[str, Any]]:
    schema = (
        ROLLOUT_SCHEMA if columns is None else pa.schema([ROLLOUT_SCHEMA.field(name) for name in columns])
    )
    try:
        # Not pq.read_table: it imports pandas where that is installed, 50 MB and most of a second.
        with pq.ParquetFile(path) as file:
            rows: list[dict[str, Any]] = (
                file.read(columns=schema.names).select(schema.names).cast(schema).to_pylist()
            )
    except (OSError, KeyError, pa.ArrowException) as error:
        raise DataError(
            f"{path} is not a rollout file: {error}.", "Delete it; the step is sampled again on resume."
        ) from None
    return rows
