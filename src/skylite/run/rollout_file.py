"""`rollouts/step-000012.parquet`: the parent's input to the trainer. One row is one engine call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from skylite.errors import DataError
from skylite.run.files import atomic_file
from skylite.run.parquet_file import read_parquet
from skylite.types import Call, Group, Message, Prompt, Trajectory

ROLLOUT_SCHEMA = pa.schema(
    [
        # These three identify the call: turn in trajectory in group, each counted from 0.
        ("group", pa.int32()),
        ("trajectory", pa.int32()),
        ("turn", pa.int32()),
        ("prompt_id", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("completion_token_ids", pa.list_(pa.int32())),
        ("sampling_logprobs", pa.list_(pa.float32())),
        ("finish_reason", pa.string()),
        ("adapter_version", pa.int32()),
        # Reward, penalty and components belong to the trajectory and are equal in all of its rows.
        # float64, so that the trainer rounds reward + penalty exactly as `Group.is_zero_std` does.
        ("reward", pa.float64()),
        ("penalty", pa.float64()),
        ("components", pa.map_(pa.string(), pa.float64())),
        ("end", pa.string()),
        # The reward of this turn; all are 0 and has_turn_rewards is false if there is one reward only.
        ("turn_reward", pa.float64()),
        ("has_turn_rewards", pa.bool_()),
        ("question", pa.string()),
        ("completion", pa.string()),
        # What an episode told the model since its last reply. Empty without an environment.
        ("observed", pa.string()),
        ("answer", pa.string()),
    ]
)
TRAJECTORY_COLUMNS = ("reward", "penalty", "end", "has_turn_rewards")
"""Columns that must be equal in all rows of a trajectory."""


def write_rollouts(path: Path, groups: Sequence[Group]) -> None:
    """Write a step's groups atomically. Raises WriteFailed."""
    table = pa.Table.from_pylist(list(_rows_of(groups)), schema=ROLLOUT_SCHEMA)
    with atomic_file(path, table.nbytes) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def read_rollouts(path: Path) -> list[Group]:
    """The groups of a step. Of each prompt, the file has only id, question and answer.

    Raises DataError if the file is not a valid rollout file.
    """
    rows = _read(path, ROLLOUT_SCHEMA.names)
    rows.sort(key=lambda row: (row["group"], row["trajectory"], row["turn"]))
    groups = [_group(path, list(of_group)) for _, of_group in groupby(rows, key=lambda row: row["group"])]
    if not groups or len({len(g.trajectories) for g in groups}) != 1:
        sizes = sorted({len(g.trajectories) for g in groups})
        raise _unusable(
            path, f"its groups have {sizes} trajectories, and every group must have the same number"
        )
    return groups


def mean_reward(path: Path) -> float:
    """The mean reward of a step's trajectories, without penalties. Raises DataError.

    The mean is not finite if a reward is not finite.
    """
    rows = _read(path, ["group", "trajectory", "reward"])
    rewards: list[float] = list({(row["group"], row["trajectory"]): row["reward"] for row in rows}.values())
    if not rewards:
        raise _unusable(path, "it has no rows")
    return sum(rewards) / len(rewards)  # not fsum, which raises for inf + -inf


def _rows_of(groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    for number, group in enumerate(groups):
        for index, trajectory in enumerate(group.trajectories):
            for turn, call in enumerate(trajectory.calls):
                yield {
                    "group": number,
                    "trajectory": index,
                    "turn": turn,
                    "prompt_id": group.prompt.id,
                    "prompt_token_ids": call.prompt_token_ids,
                    "completion_token_ids": call.completion_token_ids,
                    "sampling_logprobs": call.sampling_logprobs,
                    "finish_reason": call.finish_reason,
                    "adapter_version": call.adapter_version,
                    "reward": trajectory.reward,
                    "penalty": trajectory.penalty,
                    "components": dict(trajectory.components),
                    "end": trajectory.end,
                    "turn_reward": trajectory.turn_rewards[turn] if trajectory.turn_rewards else 0.0,
                    "has_turn_rewards": bool(trajectory.turn_rewards),
                    "question": group.prompt.messages[-1]["content"],
                    "completion": call.text,
                    "observed": call.observed,
                    "answer": group.prompt.answer,
                }


def _group(path: Path, rows: list[dict[str, Any]]) -> Group:
    first = rows[0]
    question = [Message(role="user", content=first["question"])]
    prompt = Prompt(id=first["prompt_id"], messages=question, answer=first["answer"], source="")
    trajectories = [
        _trajectory(path, list(calls)) for _, calls in groupby(rows, key=lambda row: row["trajectory"])
    ]
    return Group(prompt=prompt, trajectories=tuple(trajectories))


def _trajectory(path: Path, rows: list[dict[str, Any]]) -> Trajectory:
    first, place = rows[0], f"group {rows[0]['group']}, trajectory {rows[0]['trajectory']}"
    if [row["turn"] for row in rows] != list(range(len(rows))):
        raise _unusable(
            path, f"{place} has the turns {[row['turn'] for row in rows]}, which must count up from 0"
        )
    if len({repr([row[name] for name in TRAJECTORY_COLUMNS]) for row in rows}) != 1:
        raise _unusable(path, f"the turns of {place} have different rewards, which belong to the trajectory")
    return Trajectory(
        calls=tuple(_call(path, place, row) for row in rows),
        reward=first["reward"],
        penalty=first["penalty"],
        components=dict(first["components"]),
        end=first["end"],
        turn_rewards=tuple(row["turn_reward"] for row in rows) if first["has_turn_rewards"] else (),
    )


def _call(path: Path, place: str, row: dict[str, Any]) -> Call:
    num_tokens = len(row["completion_token_ids"])
    if not row["prompt_token_ids"] or not num_tokens or len(row["sampling_logprobs"]) not in (0, num_tokens):
        raise _unusable(
            path,
            f"{place} has a call with {len(row['prompt_token_ids'])} prompt tokens, "
            f"{num_tokens} completion tokens and {len(row['sampling_logprobs'])} logprobs",
        )
    return Call(
        prompt_token_ids=row["prompt_token_ids"],
        completion_token_ids=row["completion_token_ids"],
        sampling_logprobs=row["sampling_logprobs"],
        finish_reason=row["finish_reason"],
        adapter_version=row["adapter_version"],
        text=row["completion"],
        observed=row["observed"],
    )


def read_columns(path: Path, columns: Mapping[str, pa.DataType]) -> pa.Table:
    """Columns of any parquet file by name -> type. Raises DataError if one is missing.

    Reads no other column. A value may be null.
    """
    return _read_table(path, pa.schema(list(columns.items())))


def _read(path: Path, columns: list[str]) -> list[dict[str, Any]]:
    table = _read_table(path, pa.schema([ROLLOUT_SCHEMA.field(name) for name in columns]))
    try:
        rows: list[dict[str, Any]] = table.to_pylist()
    except ValueError as error:  # text that is not UTF-8
        raise _unusable(path, str(error)) from None
    if missing := next((name for row in rows for name in columns if row[name] is None), None):
        raise _unusable(path, f"column {missing} has a row without a value")
    return rows


def _read_table(path: Path, schema: pa.Schema) -> pa.Table:
    try:
        return read_parquet(path, schema.names).cast(schema)
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise _unusable(path, str(error)) from None


def _unusable(path: Path, reason: str) -> DataError:
    return DataError(
        f"{path} is not a usable rollout file: {reason}.",
        "Delete the file; a resumed run samples the step again.",
    )
