"""A user's .jsonl, .csv or .parquet file with a question and an answer column."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from skylite.config.rollout import RewardParameters
from skylite.data.examples import Example, ExampleSet, sample_rows
from skylite.data.sources import Row, Table, read_table
from skylite.errors import DataError
from skylite.rewards import reference_answer, reference_completion
from skylite.types import Message, Prompt

HELD_OUT_SHARE = 0.05
"""Share of the distinct questions in validation, and in test."""
SYSTEMS = {
    "gsm8k": "Solve the problem step by step. End with a line of #### and the answer as a number.",
    "format": "Solve the problem step by step. End with a line of #### and the answer as a number.",
    "math": "Solve the problem step by step. Put the final answer in \\boxed{}.",
}
"""Reward -> system text; prompts for FILE.py:function have none."""


def user_file_examples(
    path: Path,
    *,
    question: str,
    answer: str | None,
    reward: str,
    parameters: RewardParameters,
    limit: int | None,
    seed: int,
) -> ExampleSet:
    """Read the file, split it by the seed and make prompts. Raises DataError with file, line and reason.

    `answer`: None for data without reference answers.
    """
    table = read_table(path)
    texts = [row.text(question) for row in table.rows]
    tables = _split(table, texts, seed)
    tables["train"] = sample_rows(tables["train"], limit, seed)
    system = SYSTEMS.get(reward, "")
    splits = {
        split: [
            _example(
                row,
                f"{path.stem}/{split}/{row.index}",
                path.stem,
                question,
                answer,
                reward,
                parameters,
                system,
            )
            for row in split_table.rows
        ]
        for split, split_table in tables.items()
    }
    note = f"source: {path}, split at random (seed {seed}) by question: " + ", ".join(
        f"{len(d)} {s}" for s, d in splits.items()
    )
    return ExampleSet(
        dataset=path.stem,
        reward=reward,
        system=system,
        few_shot=[],
        splits=splits,
        tables=tables,
        notes=[note],
        parameters=parameters,
        has_answers=answer is not None,
    )


def _split(table: Table, questions: list[str], seed: int) -> dict[str, Table]:
    """Split about 90/5/5, at least one question each. Rows with the same question stay in one split."""
    distinct = sorted(set(questions))
    if len(distinct) < 3:
        raise DataError(
            f"{table.source} has {len(distinct)} distinct question(s); "
            "train, validation and test need one each."
        )
    random.Random(f"split/{seed}").shuffle(distinct)
    held_out = max(1, round(len(distinct) * HELD_OUT_SHARE))
    split_of = dict.fromkeys(distinct, "train")
    split_of.update(dict.fromkeys(distinct[:held_out], "validation"))
    split_of.update(dict.fromkeys(distinct[held_out : 2 * held_out], "test"))
    return {
        split: replace(
            table,
            rows=[row for row, text in zip(table.rows, questions, strict=True) if split_of[text] == split],
        )
        for split in ("train", "validation", "test")
    }


def _example(
    row: Row,
    prompt_id: str,
    source: str,
    question: str,
    answer: str | None,
    reward: str,
    parameters: RewardParameters,
    system: str,
) -> Example:
    text = "" if answer is None else row.text(answer)
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": row.text(question)})
    prompt = Prompt(
        id=prompt_id, messages=messages, answer=reference_answer(reward, text, parameters), source=source
    )
    reference = None if answer is None else reference_completion(reward, text, parameters)
    return Example(prompt=prompt, reference=reference, where=row.where)
