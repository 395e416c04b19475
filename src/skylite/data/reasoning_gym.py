"""reasoning-gym tasks: generated questions, scored by the task (rewards/reasoning_gym.py)."""

from __future__ import annotations

import json
from dataclasses import fields
from itertools import islice
from typing import Any

from skylite.data.examples import Example, ExampleSet, ShowProgress
from skylite.data.key_value_spec import REASONING_GYM, read_settings, split_spec
from skylite.data.raw_rows import Row, Table, generated_table
from skylite.errors import ConfigError, DataError
from skylite.optional_packages import install_command
from skylite.rewards.built_in import reference_completion
from skylite.rewards.reasoning_gym import from_json, to_json
from skylite.types import Message, Prompt

SYSTEM = "Solve the problem. Give the final answer between <answer> and </answer>."
ROWS = {"test": 256, "validation": 128, "train": 1024}
"""Distinct questions per split; --limit replaces the number for train."""
_RESERVED = ("seed", "size")
"""Settings of every task that skylite sets."""
_EXAMPLE = f"E.g. {REASONING_GYM}chain_sum max_terms=2."
_REFERENCES = ("possible_answer", "example_answer", "example_correct_answer")
"""Metadata keys under which tasks with many correct answers store one of them."""


def reasoning_gym_examples(
    spec: str, *, limit: int | None, seed: int, show_progress: ShowProgress[int]
) -> ExampleSet:
    """Generate the splits of a task. `spec`: `reasoning-gym:TASK KEY=VALUE ...`.

    Raises ConfigError for an unknown task or setting, and DataError for a task whose reference answers cannot
    be checked.
    """
    task, words = split_spec(spec, REASONING_GYM, _EXAMPLE)
    settings = read_settings(spec, words, _EXAMPLE, reserved=_RESERVED)
    sizes = ROWS | {"train": limit or ROWS["train"]}
    generator = _open_task(task, settings, seed, size=4 * sum(sizes.values()))
    entries = _distinct_entries(task, generator, sum(sizes.values()), show_progress)
    chosen = "".join(f", {word}" for word in words)
    notes = [f"source: reasoning-gym task {task}{chosen}, generated (seed {seed})"]
    if len(entries) < sum(sizes.values()):
        sizes = _shrink(task, sizes, len(entries))
        notes.append(
            f"{task} has only {len(entries)} distinct questions in {len(generator)} draws: smaller splits"
        )
    dataset = f"reasoning-gym-{task}"
    tables: dict[str, Table] = {}
    rest = iter(entries)
    for split, size in sizes.items():
        tables[split] = generated_table(
            islice(rest, size), "generated", f"reasoning-gym {task} (seed {seed}{chosen}, {split})"
        )
    splits = {
        split: [_example(task, row, f"{dataset}/{split}/{row.index}") for row in tables[split].rows]
        for split in sizes
    }
    return ExampleSet(
        dataset=dataset,
        reward="reasoning-gym",
        system=SYSTEM,
        few_shot=[],
        splits=splits,
        tables=tables,
        notes=notes,
    )


def _open_task(task: str, settings: dict[str, Any], seed: int, size: int) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ConfigError(
            "The package reasoning-gym is not installed.", f"Run `{install_command('reasoning-gym')}`."
        ) from None
    if task not in DATASETS:
        raise ConfigError(
            f"reasoning-gym has no task {task!r}.", f"Its tasks: {', '.join(sorted(DATASETS))}."
        )
    known = [field.name for field in fields(DATASETS[task][1]) if field.name not in _RESERVED]
    if unknown := [key for key in settings if key not in known]:
        raise ConfigError(
            f"reasoning-gym task {task} has no setting {unknown[0]}.", f"Its settings: {', '.join(known)}."
        )
    try:
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        given = json.dumps(settings) if settings else "its default settings"
        raise DataError(
            f"reasoning-gym task {task} does not work with {given}: {error}.",
            "Choose other settings or another task.",
        ) from None


def _distinct_entries(
    task: str, generator: Any, wanted: int, show_progress: ShowProgress[int]
) -> list[dict[str, Any]]:
    """Up to `wanted` entries with different questions."""
    found: dict[str, dict[str, Any]] = {}
    for index in show_progress(range(len(generator)), f"generating {wanted} questions of {task}"):
        entry = generator[index]
        found.setdefault(entry["question"], entry)
        if len(found) == wanted:
            break
    return list(found.values())


def _shrink(task: str, sizes: dict[str, int], available: int) -> dict[str, int]:
    if available < 3:
        raise DataError(
            f"reasoning-gym task {task} has only {available} distinct question(s); "
            "train, validation and test need one each."
        )
    held_out = {
        split: max(1, available * sizes[split] // sum(sizes.values())) for split in ("test", "validation")
    }
    return held_out | {"train": available - sum(held_out.values())}


def _example(task: str, row: Row, prompt_id: str) -> Example:
    stored = to_json(row.values)
    try:
        stored = json.loads(json.dumps(stored))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"reasoning-gym task {task} has entries that cannot be stored as JSON: {error}.",
            "Choose another task.",
        ) from None
    if from_json(stored) != row.values:
        raise DataError(
            f"reasoning-gym task {task} has entries that change when stored as JSON.", "Choose another task."
        )
    answer = _reference(task, row.values)
    messages: list[Message] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": row.values["question"]},
    ]
    prompt = Prompt(
        id=prompt_id,
        messages=messages,
        answer=answer,
        source=f"reasoning-gym-{task}",
        extra={"task": task, "entry": stored},
    )
    return Example(prompt=prompt, reference=reference_completion("reasoning-gym", answer), where=row.where)


def _reference(task: str, entry: dict[str, Any]) -> str:
    """The answer of an entry, or the example of a correct one in its metadata."""
    candidates = [entry["answer"], *(entry["metadata"].get(key) for key in _REFERENCES)]
    answer = next((c for c in candidates if c is not None), None)
    if answer is None:
        raise DataError(
            f"reasoning-gym task {task} has no reference answer, so its scorer cannot be checked.",
            "Choose another task.",
        )
    return answer if isinstance(answer, str) else json.dumps(answer)
