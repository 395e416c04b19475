"""A data set with a data_prep file: which source its rows come from, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from skylite.data.dataset_module import DatasetModule
from skylite.data.examples import SPLITS, Example, ExampleSet, sample_rows
from skylite.data.sources import HubError, Table
from skylite.errors import ConfigError, DataError

Tables = dict[str, Table]


def named_examples(
    module: DatasetModule,
    *,
    source: Path | None,
    synthetic: bool,
    first_source: bool,
    difficulty: Sequence[int],
    limit: int | None,
    seed: int,
) -> ExampleSet:
    """Read or generate all splits from one source and make prompts. Raises DataError, ConfigError."""

    def generate() -> Tables:
        if module.synthetic_rows is None:
            raise ConfigError(
                f"{module.path} has no synthetic_rows, so that {module.name} has no synthetic.",
                "Give --source FOLDER.",
            )
        return {
            split: module.synthetic_rows(split, seed, difficulty, limit if split == "train" else None)
            for split in SPLITS
        }

    if synthetic:
        tables, notes = generate(), ["source: generated synthetic, as --synthetic asks"]
    elif first_source:
        tables, notes = _first_that_works(module, source, generate)
    else:
        tables, notes = _hub_or_folder(module, source)
    if difficulty and tables["train"].kind != "synthetic":
        raise ConfigError(
            "--difficulty chooses what the synthetic generates.",
            f"For {module.name} set data.difficulty when training.",
        )
    return _examples(module, tables, limit, seed, notes)


def _hub_or_folder(module: DatasetModule, source: Path | None) -> tuple[Tables, list[str]]:
    if source is not None:
        return _read_folder(module, source), [f"source: the folder {source}, as --source asks"]
    try:
        tables = _load(module, None)
    except HubError as error:
        ways = "--source FOLDER with the released files" + (
            ", or --synthetic for generated ones" if module.synthetic_rows else ""
        )
        raise DataError(error.what, f"Give {ways}.") from None
    return tables, [f"source: the hub, {tables['train'].source} and {tables['test'].source}"]


def _first_that_works(
    module: DatasetModule, source: Path | None, generate: Callable[[], Tables]
) -> tuple[Tables, list[str]]:
    try:
        tables = _load(module, None)
    except HubError as error:
        notes = [f"not from the hub: {error.what}"]
    else:
        return tables, [f"source: the hub, the first that works ({tables['train'].source})"]
    if source is not None and source.is_dir():
        return _read_folder(module, source), [*notes, f"source: the folder {source}, the next that works"]
    notes.append(
        f"not from a folder: {source} is not one"
        if source is not None
        else "not from a folder: no --source was given"
    )
    return generate(), [*notes, "source: generated synthetic, the only one left"]


def _read_folder(module: DatasetModule, source: Path) -> Tables:
    if not source.is_dir():
        raise DataError(
            f"--source {source} is not a folder.",
            f"Give the folder with the released files of {module.name}.",
        )
    return _load(module, source)


def _load(module: DatasetModule, source: Path | None) -> Tables:
    return {split: module.load_rows(split, source) for split in SPLITS}


def _examples(
    module: DatasetModule, tables: Tables, limit: int | None, seed: int, notes: list[str]
) -> ExampleSet:
    generated = tables["train"].kind == "synthetic"
    dataset = f"{module.name}-synthetic" if generated else module.name
    if not generated:
        tables["train"] = sample_rows(tables["train"], limit, seed)
    splits = {
        split: [
            Example(
                prompt=replace(module.to_prompt(row, f"{dataset}/{split}/{row.index}"), source=dataset),
                reference=module.reference(row),
                where=row.where,
            )
            for row in table.rows
        ]
        for split, table in tables.items()
    }
    return ExampleSet(
        dataset=dataset, reward=module.reward, system=module.system, examples=module.examples, splits=splits, tables=tables, notes=notes
    )  # fmt: skip
