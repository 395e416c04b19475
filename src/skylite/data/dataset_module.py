"""A data_prep file: one small Python file that says what a data set's rows are and how they become prompts.

NAME          data set name; part of every prompt id and the default output folder
SYSTEM        system text, may be empty
EXAMPLES      worked examples as chat turns, user and assistant in turn
REWARD        reward spec: gsm8k, math, format, reasoning-gym or FILE.py:function
load_rows     (split, source folder or None) -> Table; None: from the hub, HubError when that does not answer
to_prompt     (Row, prompt id) -> Prompt; `source` is NAME
reference     (Row) -> text of a perfect completion; it must score 1.0
synthetic_rows optional, (split, seed, difficulty, limit) -> Table: generated rows in the same format
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import skylite
from skylite.data.sources import Row, Table
from skylite.errors import DataError
from skylite.plugin_file import import_file
from skylite.types import Message, Prompt

StandInRows = Callable[[str, int, Sequence[int], int | None], Table]
_TEXTS = ("NAME", "SYSTEM", "REWARD")
_FUNCTIONS = ("load_rows", "to_prompt", "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetModule:
    """A data_prep file, loaded and checked."""

    path: Path
    name: str
    system: str
    examples: list[Message]
    reward: str
    load_rows: Callable[[str, Path | None], Table]
    to_prompt: Callable[[Row, str], Prompt]
    reference: Callable[[Row], str]
    synthetic_rows: StandInRows | None


def data_prep_folders() -> list[Path]:
    """Where a data_prep file is looked for by name: ./data_prep, the checkout's, the copy in the installed package."""
    package = Path(skylite.__file__).resolve().parent
    return [Path("data_prep"), package.parents[1] / "data_prep", package / "_bundled" / "data_prep"]


def find_dataset_file(target: str) -> Path:
    """The file that `target`, a name or a path ending in .py, means. Raises DataError that lists the known names."""
    if target.endswith(".py"):
        path = Path(target)
        if not path.is_file():
            raise DataError(f"{target} does not exist.", "Give a file like data_prep/gsm8k.py.")
        return path
    for folder in data_prep_folders():
        if (folder / f"{target}.py").is_file():
            return folder / f"{target}.py"
    known = sorted({p.stem for folder in data_prep_folders() for p in folder.glob("*.py")})
    raise DataError(
        f"There is no data set {target!r}.",
        f"Give one of: {', '.join(known)}; reasoning-gym:TASK; a data_prep .py file; or a .jsonl, .csv or .parquet file.",
    )


def load_dataset(target: str) -> DatasetModule:
    """Find, import and check a data_prep file. Raises DataError with the file and what is wrong with it."""
    path = find_dataset_file(target)
    module = import_file(path, "data_prep file")
    for name in (*_TEXTS, "EXAMPLES", *_FUNCTIONS):
        if not hasattr(module, name):
            raise DataError(
                f"The data_prep file {path} does not define {name}.", "Copy data_prep/gsm8k.py and edit it."
            )
    for name in _TEXTS:
        if not isinstance(getattr(module, name), str):
            raise DataError(f"{name} in {path} is {type(getattr(module, name)).__name__}, not text.")
    synthetic = getattr(module, "synthetic_rows", None)
    for name in (*_FUNCTIONS, *(("synthetic_rows",) if synthetic is not None else ())):
        if not callable(getattr(module, name)):
            raise DataError(f"{name} in {path} is {type(getattr(module, name)).__name__}, not a function.")
    _check_examples(path, module.EXAMPLES)
    return DatasetModule(
        path=path, name=module.NAME, system=module.SYSTEM, examples=module.EXAMPLES, reward=module.REWARD, load_rows=module.load_rows,
        to_prompt=module.to_prompt, reference=module.reference, synthetic_rows=synthetic,
    )  # fmt: skip


def _check_examples(path: Path, examples: object) -> None:
    roles = ("user", "assistant")
    if not isinstance(examples, list) or len(examples) % 2:
        raise DataError(f"EXAMPLES in {path} is not a list of user and assistant turns in turn.")
    for i, turn in enumerate(examples):
        if not (
            isinstance(turn, dict)
            and turn.get("role") == roles[i % 2]
            and isinstance(turn.get("content"), str)
        ):
            raise DataError(f'EXAMPLES[{i}] in {path} is not {{"role": "{roles[i % 2]}", "content": text}}.')
