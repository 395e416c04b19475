"""GSM8K-format files for the data tests: the released files if present, else generated ones."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from skylite.config.bundled import bundled_folder
from skylite.types import Prompt
from skylite.user_functions import import_file

synthetic = import_file(bundled_folder("data_prep") / "synthetic/gsm8k_problems.py", "generator")

RELEASED = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"


def gsm8k_folder(folder: Path, train: int = 60, test: int = 10) -> Path:
    """A folder with train.jsonl and test.jsonl: the first released rows, or generated rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train), ("test", test)):
        (folder / f"{split}.jsonl").write_text("".join(_lines(split, count)), encoding="utf-8")
    return folder


def prompt(**changes: object) -> Prompt:
    """A prompt whose answer is 7."""
    values: dict[str, object] = {
        "id": "t/train/0",
        "messages": [{"role": "user", "content": "3 + 4?"}],
        "answer": "7",
        "source": "t",
    }
    return Prompt(**(values | changes))  # type: ignore[arg-type]


def _lines(split: str, count: int) -> list[str]:
    if RELEASED.is_dir():
        return (RELEASED / f"{split}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:count]
    made = islice(synthetic.problems(2, seed=1 if split == "train" else 2), count)
    return [json.dumps({"question": p["question"], "answer": p["answer"]}) + "\n" for p in made]
