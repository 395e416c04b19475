"""Data sets defined by a data_prep file, a small Python file with these names:

NAME            data set name: the start of every prompt id, and the default output folder
SYSTEM          system text, may be empty
FEW_SHOT        worked examples as alternating user and assistant turns
REWARD          a built-in reward (rewards.BUILT_IN) or FILE.py:function
load_rows       (split, source folder or None) -> Table; None: from the hub, which may raise HubError
to_prompt       (Row, prompt id) -> Prompt; `source` is NAME
reference       (Row) -> text of a perfect completion; it must score 1.0. Not needed with --no-answer
synthetic_rows  optional, (split, seed, difficulties, limit) -> Table: generated rows in the same format
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skylite.config.bundled import bundled_names, find_file
from skylite.data.examples import SPLITS, Example, ExampleSet, sample_rows
from skylite.data.sources import HubError, Row, Table
from skylite.errors import ConfigError, DataError, SkyliteError
from skylite.plugin_file import UserCodeFailed, import_file, user_code
from skylite.types import Message, Prompt

Tables = dict[str, Table]
"""Split -> its rows."""
SyntheticRows = Callable[[str, int, Sequence[int], int | None], Table]
_TEXTS = ("NAME", "SYSTEM", "REWARD")
_FUNCTIONS = ("load_rows", "to_prompt", "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetModule:
    """A data_prep file, loaded and checked."""

    path: Path
    name: str
    system: str
    few_shot: list[Message]
    reward: str
    load_rows: Callable[[str, Path | None], Table]
    to_prompt: Callable[[Row, str], Prompt]
    reference: Callable[[Row], str] | None
    """None for data without reference answers."""
    synthetic_rows: SyntheticRows | None


def find_dataset_file(target: str) -> Path:
    """The data_prep file for a bare name, which is a bundled one, or for a path.

    Raises DataError that lists the bundled names.
    """
    known = (
        f"Give one of: {bundled_names('data_prep')}; reasoning-gym:TASK; a data_prep .py file; "
        "or a .jsonl, .csv or .parquet file."
    )
    return find_file(target, "data_prep", ("data set", "file"), known, DataError)


def load_dataset(target: str, *, has_answers: bool = True) -> DatasetModule:
    """Find, import and check a data_prep file. Raises DataError with the file and the reason."""
    path = find_dataset_file(target)
    module = import_file(path, "data_prep file")
    functions = _FUNCTIONS if has_answers else _FUNCTIONS[:-1]
    for name in (*_TEXTS, "FEW_SHOT", *functions):
        if not hasattr(module, name):
            raise DataError(
                f"The data_prep file {path} does not define {name}.", "Copy data_prep/gsm8k.py and edit it."
            )
    for name in _TEXTS:
        if not isinstance(getattr(module, name), str):
            raise DataError(f"{name} in {path} is {type(getattr(module, name)).__name__}, not text.")
    synthetic = getattr(module, "synthetic_rows", None)
    for name in (*functions, *(("synthetic_rows",) if synthetic is not None else ())):
        if not callable(getattr(module, name)):
            raise DataError(f"{name} in {path} is {type(getattr(module, name)).__name__}, not a function.")
    _check_few_shot(path, module.FEW_SHOT)
    return DatasetModule(
        path=path,
        name=module.NAME,
        system=module.SYSTEM,
        few_shot=module.FEW_SHOT,
        reward=module.REWARD,
        load_rows=_guarded(path, module.load_rows),
        to_prompt=_guarded(path, module.to_prompt),
        reference=_guarded(path, module.reference) if has_answers else None,
        synthetic_rows=None if synthetic is None else _guarded(path, synthetic),
    )


def _guarded(path: Path, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a data_prep file; what it raises becomes a DataError that names file and row."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            with user_code(keep=SkyliteError):
                return function(*arguments)
        except UserCodeFailed as error:
            row = next((f" for {a.where}" for a in arguments if isinstance(a, Row)), "")
            name = getattr(function, "__name__", "a function")
            raise DataError(f"{name} in {path} raised {error}{row}.", "Fix that file.") from error

    return call


def module_examples(
    module: DatasetModule,
    *,
    source: Path | None,
    synthetic: bool,
    first_source: bool,
    difficulties: Sequence[int],
    limit: int | None,
    seed: int,
) -> ExampleSet:
    """Read or generate all splits from one source and make prompts.

    Args:
        source: folder with the released files; None reads from the hub.
        synthetic: generate the rows.
        first_source: try the hub, then `source`, then generate.
        difficulties: of generated rows.
        limit: rows of the training split.

    Raises DataError and ConfigError.
    """

    def generate() -> Tables:
        if module.synthetic_rows is None:
            raise ConfigError(
                f"{module.path} does not define synthetic_rows, so {module.name} has no synthetic data.",
                "Give --source FOLDER.",
            )
        return {
            split: module.synthetic_rows(split, seed, difficulties, limit if split == "train" else None)
            for split in SPLITS
        }

    if synthetic:
        tables, notes = generate(), ["source: synthetic (--synthetic)"]
    elif first_source:
        tables, notes = _first_available(module, source, generate)
    else:
        tables, notes = _hub_or_folder(module, source)
    if difficulties and tables["train"].kind != "synthetic":
        raise ConfigError(
            f"--difficulty applies to synthetic data; the source of {module.name} is {tables['train'].kind}.",
            "Remove it, and set data.difficulty when you train.",
        )
    return _to_examples(module, tables, limit, seed, notes)


def _hub_or_folder(module: DatasetModule, source: Path | None) -> tuple[Tables, list[str]]:
    if source is not None:
        return _read_folder(module, source), [f"source: folder {source} (--source)"]
    try:
        tables = _load_splits(module, None)
    except HubError as error:
        ways = "--source FOLDER with the released files"
        if module.synthetic_rows:
            ways += ", or --synthetic to generate problems"
        raise DataError(error.what, f"Give {ways}.") from None
    return tables, [f"source: hub, {tables['train'].source} and {tables['test'].source}"]


def _first_available(
    module: DatasetModule, source: Path | None, generate: Callable[[], Tables]
) -> tuple[Tables, list[str]]:
    try:
        tables = _load_splits(module, None)
    except HubError as error:
        notes = [f"hub not available: {error.what}"]
    else:
        return tables, [f"source: hub ({tables['train'].source}), the first available"]
    if source is not None and source.is_dir():
        return _read_folder(module, source), [*notes, f"source: folder {source}, the first available"]
    reason = "no --source given" if source is None else f"{source} is not a folder"
    return generate(), [
        *notes,
        f"folder not available: {reason}",
        "source: synthetic, the only one available",
    ]


def _read_folder(module: DatasetModule, source: Path) -> Tables:
    if not source.is_dir():
        raise DataError(
            f"--source {source} is not a folder.",
            f"Give the folder with the released files of {module.name}.",
        )
    return _load_splits(module, source)


def _load_splits(module: DatasetModule, source: Path | None) -> Tables:
    return {split: module.load_rows(split, source) for split in SPLITS}


def _to_examples(
    module: DatasetModule, tables: Tables, limit: int | None, seed: int, notes: list[str]
) -> ExampleSet:
    is_synthetic = tables["train"].kind == "synthetic"
    dataset = f"{module.name}-synthetic" if is_synthetic else module.name
    if not is_synthetic:
        tables["train"] = sample_rows(tables["train"], limit, seed)
    splits = {
        split: [
            Example(
                prompt=replace(module.to_prompt(row, f"{dataset}/{split}/{row.index}"), source=dataset),
                reference=None if module.reference is None else module.reference(row),
                where=row.where,
            )
            for row in table.rows
        ]
        for split, table in tables.items()
    }
    return ExampleSet(
        dataset=dataset,
        reward=module.reward,
        system=module.system,
        few_shot=module.few_shot,
        splits=splits,
        tables=tables,
        notes=notes,
        has_answers=module.reference is not None,
    )


def _check_few_shot(path: Path, turns: object) -> None:
    roles = ("user", "assistant")
    if not isinstance(turns, list) or len(turns) % 2:
        raise DataError(f"FEW_SHOT in {path} is not a list of alternating user and assistant turns.")
    for i, turn in enumerate(turns):
        if not (
            isinstance(turn, dict)
            and turn.get("role") == roles[i % 2]
            and isinstance(turn.get("content"), str)
        ):
            raise DataError(f'FEW_SHOT[{i}] in {path} is not {{"role": "{roles[i % 2]}", "content": text}}.')
