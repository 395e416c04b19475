"""The tasks of a verifiers environment as prompts. Each keeps its task, from which its episode begins."""

from __future__ import annotations

from importlib import import_module
from itertools import islice
from typing import Any

from skylite.data.examples import Example, ExampleSet
from skylite.data.raw_rows import Row, Table, generated_table, hold_out
from skylite.data.verifiers_spec import cannot_open, open_config, parse_verifiers
from skylite.errors import DataError
from skylite.types import Message, Prompt
from skylite.user_functions import UserCodeFailed, user_code

COLUMN = "verifiers_task"
"""The column with the task as verifiers stores it."""
HELD_OUT = 128
"""Tasks for validation, and as many for test; fewer of a small environment."""
TRAIN = 1024
"""Training tasks of an environment that has no end; --limit replaces it."""
ROLES = ("system", "user", "assistant")


def verifiers_examples(spec: str, *, limit: int | None, seed: int) -> ExampleSet:
    """The splits of an environment's tasks. Raises ConfigError and DataError."""
    config = open_config(spec)
    try:
        with user_code(keep=DataError):
            taskset = import_module("verifiers.v1").load_taskset(config.taskset)
            limit = limit if taskset.bounded else limit or TRAIN
            most = None if taskset.bounded or limit is None else limit + 2 * HELD_OUT
            rows = [_row(task, taskset, spec) for task in islice(taskset, most)]
    except UserCodeFailed as error:
        raise cannot_open(spec, str(error)) from error
    dataset = f"verifiers-{parse_verifiers(spec).module}"
    tables, note = _split(generated_table(rows, "generated", spec), limit, seed)
    return ExampleSet(
        dataset=dataset,
        reward=spec,
        system="",
        few_shot=[],
        splits={
            split: [_example(row, f"{dataset}/{row.index}", dataset) for row in table.rows]
            for split, table in tables.items()
        },
        tables=tables,
        notes=[f"source: {spec}", note],
        has_answers=False,
    )


def _split(table: Table, limit: int | None, seed: int) -> tuple[dict[str, Table], str]:
    """Test and validation are held out at random. Raises DataError for fewer than three tasks."""
    if len(table.rows) < 3:
        raise DataError(
            f"{table.source} has {len(table.rows)} task(s); train, validation and test need one each."
        )
    rest, test = hold_out(table, HELD_OUT, seed)
    train, validation = hold_out(rest, HELD_OUT, seed + 1)
    if limit is not None:
        train = Table(rows=train.rows[:limit], kind=train.kind, source=train.source, sha256=train.sha256)
    note = f"validation and test: held out of the environment's tasks at random (seed {seed})"
    return {"train": train, "validation": validation, "test": test}, note


def _row(task: Any, taskset: Any, spec: str) -> dict[str, Any]:
    """The task's record and its prompt. Raises DataError if the record does not give the task back."""
    where = f"Task {task.data.idx} of {spec}"
    kind = type(taskset).task_type()
    if type(task) is not kind:
        raise DataError(
            f"{where} is a {type(task).__name__}, and its taskset declares {kind.__name__}.",
            f"Declare it: Taskset[{type(task).__name__}, ...].",
        )
    record = task.data.model_dump(mode="json")
    again = kind(kind.data_type().model_validate(record), taskset.config.task)
    if again.hash != task.hash:
        raise DataError(
            f"{where} changes when it is stored as JSON.", "Its TaskData needs fields that JSON can hold."
        )
    return {"record": record, "messages": _messages(task.data, where)}


def _messages(data: Any, where: str) -> list[Message]:
    """What the model reads first, for lengths and for people. The environment sends its own prompt."""
    messages: list[Message] = []
    if data.system_prompt:
        messages.append({"role": "system", "content": data.system_prompt})
    prompt = data.prompt
    if prompt is None:  # the environment opens the conversation later
        prompt = data.description or data.name or f"task {data.idx}"
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    for message in prompt:
        if not isinstance(message.content, str) or message.role not in ROLES:
            raise DataError(
                f"{where} begins with a {message.role} message that is no plain text.",
                "skylite trains on text.",
            )
        messages.append({"role": message.role, "content": message.content})
    return messages


def _example(row: Row, prompt_id: str, dataset: str) -> Example:
    record = row.values["record"]
    answer = record.get("answer", "")
    prompt = Prompt(
        id=prompt_id,
        messages=row.values["messages"],
        answer=answer if isinstance(answer, str) else "",
        source=dataset,
        extra={COLUMN: record},
    )
    return Example(prompt=prompt, reference=None, where=row.where)
