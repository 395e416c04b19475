"""`rollouts/step-000012.parquet`: the parent's input to the trainer. One row is one engine call."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from skylite.errors import DataError
from skylite.run.files import atomic_file
from skylite.run.parquet_file import read_parquet, read_parquet_schema
from skylite.types import (
    TEACHER_LOGPROBS,
    TEACHER_TOP_IDS,
    TEACHER_TOP_LOGPROBS,
    Call,
    Group,
    ImageTokens,
    IntArray,
    Message,
    Prompt,
    TrainingExample,
    Trajectory,
)
from skylite.untrusted_text import parse_json

EXAMPLE_SCHEMA = pa.schema(
    [
        # These three identify the call: turn in trajectory in group, each counted from 0.
        ("group", pa.int32()),
        ("trajectory", pa.int32()),
        ("turn", pa.int32()),
        ("prompt_id", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        # 0: context, which a call got as its prompt.
        ("weights", pa.list_(pa.float32())),
        # One for each token, 0 for context. No value: the tokens were not sampled.
        ("sampling_logprobs", pa.list_(pa.float32())),
        # float64, so that the trainer rounds a trajectory's sum exactly as `Group.is_zero_std` does.
        ("call_reward", pa.float64()),
        # Like reward and penalty, they belong to the trajectory and are equal in all of its rows.
        ("components", pa.map_(pa.string(), pa.float64())),
        ("is_truncated", pa.bool_()),
        ("adapter_version", pa.int32()),
        # What a teacher reads in place of the prompt. No value: it has no prompt of its own.
        ("teacher_prompt", pa.list_(pa.int32())),
        # Of a teacher on a server: one for each token, 0 for context. No value: none scored the tokens.
        (TEACHER_LOGPROBS, pa.list_(pa.float32())),
        # With algorithm.teacher_top_k: its K best tokens in place of each scored one, [C * K].
        (TEACHER_TOP_IDS, pa.list_(pa.int32())),
        (TEACHER_TOP_LOGPROBS, pa.list_(pa.float32())),
        # Of the prompt: the first of its tokens, their number, and the file, in the group's first row alone.
        (
            "images",
            pa.list_(pa.struct([("start", pa.int32()), ("length", pa.int32()), ("data", pa.binary())])),
        ),
    ]
)
"""What the trainer reads: the fields of TrainingExample."""
ROLLOUT_SCHEMA = pa.schema(
    [
        *EXAMPLE_SCHEMA,
        # The rest is for people.
        ("finish_reason", pa.string()),
        ("reward", pa.float64()),
        ("penalty", pa.float64()),
        ("feedback", pa.string()),
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
_BATCHES = b"skylite.batches"
"""Key of the file: a JSON list with the batch of each group, if the run does not sample in order."""
TRAJECTORY_COLUMNS = ("reward", "penalty", "feedback", "end", "has_turn_rewards")
"""Columns that must be equal in all rows of a trajectory."""
TOPS = (TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS)
"""Columns that are read as arrays: as Python's numbers they would take ten times the memory."""
NULLABLE = ("sampling_logprobs", "teacher_prompt", TEACHER_LOGPROBS, *TOPS)


def write_rollouts(path: Path, groups: Sequence[Group], batches: Sequence[int] = ()) -> None:
    """Write a step's groups atomically, and of which batch each is. Raises WriteFailed."""
    rows = zip(examples_of(groups), _texts_of(groups), strict=True)
    table = pa.Table.from_pylist(
        [_example_row(example) | text for example, text in rows],
        schema=ROLLOUT_SCHEMA.with_metadata({_BATCHES: json.dumps(list(batches))} if batches else None),
    )
    with atomic_file(path, table.nbytes) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def examples_of(groups: Sequence[Group]) -> list[TrainingExample]:
    """One example for each call."""
    return [
        _example(number, group, index, trajectory, turn)
        for number, group in enumerate(groups)
        for index, trajectory in enumerate(group.trajectories)
        for turn in range(len(trajectory.calls))
    ]


def _example(number: int, group: Group, index: int, trajectory: Trajectory, turn: int) -> TrainingExample:
    call = trajectory.calls[turn]
    num_prompt, num_completion = len(call.prompt_token_ids), len(call.completion_token_ids)
    before = [0.0] * num_prompt
    logprobs = np.array(before + call.sampling_logprobs, dtype=np.float32)
    extras: dict[str, npt.NDArray[Any]] = {}
    if call.teacher_logprobs:
        extras[TEACHER_LOGPROBS] = np.array(before + call.teacher_logprobs, np.float32)
    if call.teacher_top_ids:
        tops = (call.teacher_top_ids, call.teacher_top_logprobs)
        extras |= {n: np.asarray(x).reshape(num_completion, -1) for n, x in zip(TOPS, tops, strict=True)}
    return TrainingExample(
        token_ids=np.array(call.prompt_token_ids + call.completion_token_ids, dtype=np.int64),
        weights=np.repeat(np.array([0, 1], dtype=np.float32), [num_prompt, num_completion]),
        sampling_logprobs=logprobs if call.sampling_logprobs else None,
        group=number,
        trajectory=index,
        turn=turn,
        reward=trajectory.call_rewards[turn],
        components=trajectory.components,
        is_truncated=trajectory.is_truncated,
        version=call.adapter_version,
        prompt_id=group.prompt.id,
        images=call.images,
        teacher_prompt=_ids(call.teacher_prompt_token_ids or None),
        extras=extras,
    )


def _ids(values: Sequence[int] | None) -> IntArray | None:
    return None if values is None else np.array(values, np.int64)


def read_examples(path: Path) -> list[TrainingExample]:
    """What the trainer learns from in a step, in order. Raises DataError."""
    rows = _read(path, EXAMPLE_SCHEMA.names)
    if not rows:
        raise _unusable(path, "it has no rows")
    rows.sort(key=_place)
    _share_images(path, rows)
    return [_read_example(path, row) for row in rows]


def _share_images(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Give all rows of a group the files of its first row."""
    for number, of_group in groupby(rows, key=lambda row: row["group"]):
        first, *others = of_group
        if any(len(row["images"]) != len(first["images"]) for row in others):
            raise _unusable(path, f"the rows of group {number} have different numbers of images")
        for row in others:
            files = zip(row["images"], first["images"], strict=True)
            row["images"] = [image and file and image | {"data": file["data"]} for image, file in files]


def _place(row: Mapping[str, Any]) -> tuple[int, int, int]:
    return row["group"], row["trajectory"], row["turn"]


def _read_example(path: Path, row: dict[str, Any]) -> TrainingExample:
    token_ids, weights = np.array(row["token_ids"], np.int64), np.array(row["weights"], np.float32)
    logprobs, taught = row["sampling_logprobs"], row[TEACHER_LOGPROBS]
    lengths = {len(token_ids if x is None else x) for x in (token_ids, weights, logprobs, taught)}
    if len(lengths) != 1 or not len(token_ids) or weights[0] or not weights.any():
        raise _unusable(
            path,
            f"group {row['group']}, trajectory {row['trajectory']} has a call with {len(token_ids)} tokens, "
            f"{len(weights)} weights, of which the first must be 0 and another not, and "
            f"{'no' if logprobs is None else len(logprobs)} logprobs",
        )
    return TrainingExample(
        token_ids=token_ids,
        weights=weights,
        sampling_logprobs=None if logprobs is None else np.array(logprobs, np.float32),
        group=row["group"],
        trajectory=row["trajectory"],
        turn=row["turn"],
        reward=row["call_reward"],
        components=dict(row["components"]),
        is_truncated=row["is_truncated"],
        version=row["adapter_version"],
        prompt_id=row["prompt_id"],
        images=_read_images(path, row),
        teacher_prompt=_ids(row["teacher_prompt"] or None),
        extras=({} if taught is None else {TEACHER_LOGPROBS: np.array(taught, np.float32)})
        | _read_tops(path, row, int(np.count_nonzero(weights))),
    )


def _read_tops(path: Path, row: dict[str, Any], num_scored: int) -> dict[str, npt.NDArray[Any]]:
    """[C, K] each, or nothing."""
    found = [row[name] for name in TOPS if row[name] is not None]
    if not found:
        return {}
    if len({len(x) for x in found}) != 1 or len(found) != len(TOPS) or len(found[0]) % num_scored:
        raise _unusable(
            path,
            f"a call of group {row['group']} has {num_scored} scored tokens and "
            f"{' and '.join(str(len(x)) for x in found)} values of the teacher's most likely ones",
        )
    return {name: row[name].reshape(num_scored, -1) for name in TOPS}


def _read_images(path: Path, row: dict[str, Any]) -> tuple[ImageTokens, ...]:
    for image in row["images"]:
        end = None if image is None or None in image.values() else image["start"] + image["length"]
        if end is None or end > len(row["token_ids"]):
            raise _unusable(path, f"group {row['group']} has an image without a file or outside its prompt")
    return tuple(ImageTokens(image["start"], image["length"], image["data"]) for image in row["images"])


def read_rollouts(path: Path) -> list[Group]:
    """The groups of a step. Of each prompt, the file has only id, question and answer.

    Raises DataError if the file is not a valid rollout file.
    """
    rows = _read(path, ROLLOUT_SCHEMA.names)
    rows.sort(key=_place)
    _share_images(path, rows)
    groups = [_group(path, list(of_group)) for _, of_group in groupby(rows, key=lambda row: row["group"])]
    if not groups or len({len(g.trajectories) for g in groups}) != 1:
        sizes = sorted({len(g.trajectories) for g in groups})
        raise _unusable(
            path, f"its groups have {sizes} trajectories, and every group must have the same number"
        )
    return groups


def read_batches(path: Path, step: int) -> list[tuple[int, str]]:
    """Of each group of a step, the batch and the prompt's id. Raises DataError.

    In an ordered run the batch is that of the step.
    """
    prompts = {row["group"]: row["prompt_id"] for row in _read(path, ["group", "prompt_id"])}
    try:
        written = (read_parquet_schema(path).metadata or {}).get(_BATCHES)
        batches = [step] * len(prompts) if written is None else parse_json(written)
        return [(int(b), prompts[g]) for b, g in zip(batches, sorted(prompts), strict=True)]
    except (OSError, ValueError, TypeError, pa.ArrowException) as error:
        raise _unusable(path, f"its list of batches cannot be read ({error})") from None


def mean_reward(path: Path) -> float:
    """The mean reward of a step's trajectories, without penalties. Raises DataError.

    The mean is not finite if a reward is not finite.
    """
    rows = _read(path, ["group", "trajectory", "reward"])
    rewards: list[float] = list({(row["group"], row["trajectory"]): row["reward"] for row in rows}.values())
    if not rewards:
        raise _unusable(path, "it has no rows")
    return sum(rewards) / len(rewards)  # not fsum, which raises for inf + -inf


def _example_row(example: TrainingExample) -> dict[str, Any]:
    is_first = example.trajectory == example.turn == 0
    return {
        "group": example.group,
        "trajectory": example.trajectory,
        "turn": example.turn,
        "prompt_id": example.prompt_id,
        "token_ids": example.token_ids,
        "weights": example.weights,
        "sampling_logprobs": example.sampling_logprobs,
        "call_reward": example.reward,
        "components": dict(example.components),
        "is_truncated": example.is_truncated,
        "adapter_version": example.version,
        "teacher_prompt": example.teacher_prompt,
        TEACHER_LOGPROBS: example.extras.get(TEACHER_LOGPROBS),
        **{name: example.extras[name].reshape(-1) for name in TOPS if name in example.extras},
        "images": [
            {"start": image.start, "length": image.length, "data": image.data if is_first else b""}
            for image in example.images
        ],
    }


def _texts_of(groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """What a person reads of each call."""
    for group in groups:
        for trajectory in group.trajectories:
            for turn, call in enumerate(trajectory.calls):
                yield {
                    "finish_reason": call.finish_reason,
                    "reward": trajectory.reward,
                    "penalty": trajectory.penalty,
                    "feedback": trajectory.feedback,
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
        calls=tuple(_call(path, row) for row in rows),
        reward=first["reward"],
        penalty=first["penalty"],
        feedback=first["feedback"],
        components=dict(first["components"]),
        end=first["end"],
        turn_rewards=tuple(row["turn_reward"] for row in rows) if first["has_turn_rewards"] else (),
    )


def _call(path: Path, row: dict[str, Any]) -> Call:
    example = _read_example(path, row)
    first = int(example.scored[0])
    logprobs = np.zeros(0) if example.sampling_logprobs is None else example.sampling_logprobs
    return Call(
        prompt_token_ids=row["token_ids"][:first],
        completion_token_ids=row["token_ids"][first:],
        sampling_logprobs=logprobs[first:].tolist(),
        finish_reason=row["finish_reason"],
        adapter_version=row["adapter_version"],
        text=row["completion"],
        observed=row["observed"],
        images=example.images,
        teacher_prompt_token_ids=row["teacher_prompt"] or [],
        teacher_logprobs=(row[TEACHER_LOGPROBS] or [])[first:],
        teacher_top_ids=array("i", _bytes_of(row[TEACHER_TOP_IDS])),
        teacher_top_logprobs=array("f", _bytes_of(row[TEACHER_TOP_LOGPROBS])),
    )


def _bytes_of(values: npt.NDArray[Any] | None) -> bytes:
    return b"" if values is None else values.tobytes()


def read_columns(path: Path, columns: Mapping[str, pa.DataType]) -> pa.Table:
    """Columns of any parquet file by name -> type. Raises DataError if one is missing.

    Reads no other column. A value may be null.
    """
    return _read_table(path, pa.schema(list(columns.items())))


def _read(path: Path, columns: list[str]) -> list[dict[str, Any]]:
    table = _read_table(path, pa.schema([ROLLOUT_SCHEMA.field(name) for name in columns]))
    tops = [name for name in TOPS if name in columns]
    try:
        rows: list[dict[str, Any]] = table.drop_columns(tops).to_pylist()
        for name in tops:
            for row, of_call in zip(rows, table.column(name), strict=True):
                row[name] = of_call.values.to_numpy() if of_call.is_valid else None
    except ValueError as error:  # text that is not UTF-8
        raise _unusable(path, str(error)) from None
    required = [name for name in columns if name not in NULLABLE]
    if missing := next((name for row in rows for name in required if row[name] is None), None):
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
