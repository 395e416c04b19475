"""Data sets defined by a data_prep file, a small Python file with these names:

NAME            data set name: the start of every prompt id, and the default output folder
SYSTEM          system text, may be empty
FEW_SHOT        worked examples as alternating user and assistant turns
REWARD          a built-in reward (rewards/built_in.py) or FILE.py:function
load_rows       (split, source folder or None) -> Table; None: from the hub, which may raise HubError. A data
                set that is only generated has none
to_prompt       (Row, prompt id) -> Prompt; `source` is NAME
reference       (Row) -> text of a perfect completion; it must score 1.0. Not needed with --no-answer
synthetic_rows  optional, (split, seed, difficulties, limit) -> Table: generated rows in the same format
DROP_FAILING    optional, True: leave out rows whose reference does not score 1.0, instead of stopping

To add one, copy data_prep/gsm8k.py and run `skylite prepare COPY.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator

from skylite.config.bundled import bundled_names, find_file
from skylite.data.examples import Example, ExampleSet, sample_rows
from skylite.data.hub import HubError
from skylite.data.prompts import SPLITS
from skylite.data.raw_rows import Row, Table
from skylite.data.user_tables import filter_rows
from skylite.errors import ConfigError, DataError, SkyliteError
from skylite.notes import Note
from skylite.types import Message, Prompt
from skylite.user_functions import UserCodeFailed, import_file, user_code

Tables = dict[str, Table]
"""Split -> its rows."""
SyntheticRows = Callable[[str, int, Sequence[int], int | None], Table]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetModule:
    """A data_prep file, loaded and checked."""

    path: Path
    name: str
    system: str
    few_shot: list[Message]
    reward: str
    load_rows: Callable[[str, Path | None], Table] | None
    """None for a data set that is only generated."""
    to_prompt: Callable[[Row, str], Prompt]
    reference: Callable[[Row], str] | None
    """None for data without reference answers."""
    synthetic_rows: SyntheticRows | None
    drop_failing: bool


def find_dataset_file(target: str) -> Path:
    """The data_prep file for a bare name, which is a bundled one, or for a path.

    Raises DataError that lists the bundled names.
    """
    known = (
        f"Give one of: {bundled_names('data_prep')}; reasoning-gym:TASK; a data_prep .py file; "
        "a .jsonl, .json, .csv or .parquet file; a folder of them; or a hub id owner/name."
    )
    return find_file(target, "data_prep", ("data set", "file"), known, DataError)


def load_dataset(target: str, *, has_answers: bool = True) -> DatasetModule:
    """Find, import and check a data_prep file. Raises DataError with the file and the reason."""
    path = find_dataset_file(target)
    module = vars(import_file(path, "data_prep file"))
    try:
        names = _Names.model_validate(module, context=has_answers)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"])[1:]
        raise DataError(
            f"The data_prep file {path} cannot be used: {f'{where}: ' if where else ''}{first['msg']}.",
            "Compare it with data_prep/gsm8k.py.",
        ) from None

    def guarded(function: Callable[..., Any] | None) -> Any:
        return None if function is None else _guarded(path, function)

    return DatasetModule(
        path=path,
        name=names.NAME,
        system=names.SYSTEM,
        few_shot=names.FEW_SHOT,
        reward=names.REWARD,
        load_rows=guarded(names.load_rows),
        to_prompt=guarded(names.to_prompt),
        reference=guarded(names.reference) if has_answers else None,
        synthetic_rows=guarded(names.synthetic_rows),
        drop_failing=names.DROP_FAILING,
    )


class _Names(BaseModel):
    """The names of a data_prep file."""

    model_config = ConfigDict(strict=True)

    NAME: str
    SYSTEM: str
    FEW_SHOT: list[Message]
    REWARD: str
    to_prompt: Callable[..., Prompt]
    reference: Callable[..., str] | None = None
    load_rows: Callable[..., Table] | None = None
    synthetic_rows: Callable[..., Table] | None = None
    DROP_FAILING: bool = False

    @model_validator(mode="after")
    def check(self, info: ValidationInfo) -> Self:
        roles = [turn["role"] for turn in self.FEW_SHOT]
        if roles != ["user", "assistant"] * (len(roles) // 2):
            raise ValueError("FEW_SHOT does not hold user and assistant turns in turn")
        if self.load_rows is None and self.synthetic_rows is None:
            raise ValueError("it defines neither load_rows nor synthetic_rows")
        if self.reference is None and info.context:
            raise ValueError("it does not define reference")
        return self


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
    where: Sequence[str] = (),
    limit: int | None,
    seed: int,
) -> ExampleSet:
    """Read or generate all splits from one source and make prompts.

    Args:
        source: folder with the released files; None reads from the hub.
        synthetic: generate the rows.
        first_source: try the hub, then `source`, then generate.
        difficulties: of generated rows.
        where: COLUMN=VALUE conditions on the rows.
        limit: rows of the training split.

    Raises DataError and ConfigError.
    """

    tables, notes = _read_or_generate(
        module,
        source,
        synthetic,
        first_source,
        functools.partial(_generate, module, seed, difficulties, limit),
    )
    if difficulties and tables["train"].kind not in ("synthetic", "generated"):
        raise ConfigError(
            f"--difficulty applies to synthetic data; the source of {module.name} is {tables['train'].kind}.",
            "Remove it, and set data.difficulty when you train.",
        )
    tables = {split: filter_rows(table, where) for split, table in tables.items()}
    # Train and validation often come from one file, with one note.
    table_notes = dict.fromkeys(t.note for t in tables.values() if t.note)
    notes += [*(f"--where {text}" for text in where), *table_notes]
    return _to_examples(module, tables, limit, seed, notes)


def _generate(module: DatasetModule, seed: int, difficulties: Sequence[int], limit: int | None) -> Tables:
    if module.synthetic_rows is None:
        raise ConfigError(
            f"{module.path} does not define synthetic_rows, so {module.name} has no synthetic data.",
            "Give --source FOLDER.",
        )
    return {
        split: module.synthetic_rows(split, seed, difficulties, limit if split == "train" else None)
        for split in SPLITS
    }


def _read_or_generate(
    module: DatasetModule,
    source: Path | None,
    synthetic: bool,
    first_source: bool,
    generate: Callable[[], Tables],
) -> tuple[Tables, list[str]]:
    """The rows of all splits, and a note on their source."""
    if module.load_rows is None:
        if source is not None or first_source or synthetic:
            raise ConfigError(
                f"{module.name} is always generated.", "Remove --source, --synthetic and --first-source."
            )
        return generate(), ["source: generated"]
    if synthetic:
        return generate(), ["source: synthetic (--synthetic)"]
    return _first_available(module, source, generate) if first_source else _hub_or_folder(module, source)


def _hub_or_folder(module: DatasetModule, source: Path | None) -> tuple[Tables, list[str]]:
    if source is not None:
        return _read_folder(module, source), [f"source: folder {source} (--source)"]
    try:
        tables = _load_splits(module, None)
    except HubError as error:
        ways = "--source FOLDER with the released files"
        if module.synthetic_rows:
            ways += ", or --synthetic to generate problems"
        hint = f"{error.hint} Or give {ways}." if error.hint else f"Give {ways}."
        raise DataError(error.what, hint) from None
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
    assert module.load_rows is not None, "checked by the caller"
    return {split: module.load_rows(split, source) for split in SPLITS}


def _to_examples(
    module: DatasetModule, tables: Tables, limit: int | None, seed: int, notes: Sequence[Note | str]
) -> ExampleSet:
    is_synthetic = tables["train"].kind == "synthetic"
    dataset = f"{module.name}-synthetic" if is_synthetic else module.name
    if tables["train"].kind not in ("synthetic", "generated"):
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
        drop_failing=module.drop_failing,
    )
