"""`verifiers:NAME KEY=VALUE ...`: an environment of the package verifiers; its tasks as prompts.

KEY is a path in the environment's config, as verifiers' own flags have it (`--env.taskset.game` is
`taskset.game`). VALUE is JSON, or else text. A prompt keeps its task, from which its episode begins.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import import_module, metadata
from itertools import islice
from typing import Any

from pydantic import ValidationError

from skylite import DISTRIBUTION
from skylite.data.examples import Example, ExampleSet
from skylite.data.key_value_spec import read_settings, split_spec
from skylite.data.raw_rows import Row, Table, generated_table, hold_out
from skylite.errors import ConfigError, DataError
from skylite.optional_packages import install_command, requirements
from skylite.types import Message, Prompt
from skylite.user_functions import VERIFIERS, UserCodeFailed, user_code

_EXAMPLE = f"E.g. {VERIFIERS}textarena taskset.game=Wordle-v0."
COLUMN = "verifiers_task"
"""The column with the task as verifiers stores it."""
HELD_OUT = 128
"""Tasks for validation, and as many for test; fewer of a small environment."""
TRAIN = 1024
"""Training tasks of an environment that has no end; --limit replaces it."""
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class VerifiersSpec:
    """An environment and its settings."""

    name: str
    """The taskset's id for verifiers: its package, or owner/name of the hub."""
    settings: dict[str, Any]
    """Nested, without the taskset's id."""

    @property
    def module(self) -> str:
        """The name as part of paths and ids."""
        return self.name.rpartition("/")[2].partition("@")[0].lower().replace("_", "-")


def parse_verifiers(spec: str) -> VerifiersSpec:
    """The parts of the text. Raises ConfigError."""
    name, words = split_spec(spec, VERIFIERS, _EXAMPLE)
    if not re.fullmatch(r"[\w./@-]+", name, re.ASCII):
        raise ConfigError(f"{spec} names no environment: {name!r} is not a package name.", _EXAMPLE)
    settings = read_settings(spec, words, _EXAMPLE, reserved=["taskset.id"])
    return VerifiersSpec(name, settings)


def check_verifiers(spec: str) -> None:
    """Check the text, and that verifiers is installed, without importing it. Raises ConfigError."""
    parse_verifiers(spec)
    try:
        found = metadata.version("verifiers")
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"{spec} needs the package verifiers, which is not installed.",
            f"Run `{install_command('verifiers')}`.",
        ) from None
    for wanted in requirements(DISTRIBUTION, "verifiers"):
        if wanted.name == "verifiers" and not wanted.specifier.contains(found):
            raise ConfigError(
                f"{spec} needs verifiers{wanted.specifier}, and {found} is installed.",
                f"Run `{install_command('verifiers')}`.",
            )


def open_config(spec: str) -> Any:
    """The environment's config, of verifiers' EnvConfig. Imports its package. Raises ConfigError."""
    check_verifiers(spec)
    parsed = parse_verifiers(spec)
    taskset = parsed.settings.get("taskset", {})
    if not isinstance(taskset, dict):
        raise ConfigError(f"{spec}: taskset={json.dumps(taskset)} is not a setting.", _EXAMPLE)
    try:
        with user_code(keep=ValidationError):
            vf = import_module("verifiers.v1")
            return vf.resolve_env_config({**parsed.settings, "taskset": {**taskset, "id": parsed.name}})
    except UserCodeFailed as error:
        raise cannot_open(spec, str(error)) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise cannot_open(spec, f"{where}: {first['msg']}") from None


def cannot_open(spec: str, reason: str) -> ConfigError:
    """The error for what verifiers or the environment raised."""
    return ConfigError(
        f"verifiers cannot open {spec}: {reason.rstrip('.')}.",
        "Install the environment's package, and check its name and settings.",
    )


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
