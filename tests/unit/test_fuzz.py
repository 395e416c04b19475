"""A few damaged files for every reader; `make fuzz` reads 10,000."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.fuzz.readers import READERS
from tests.fuzz.run import fuzz, make_ground
from tests.unit.bad_inputs import toml_text

FILES = 60


@pytest.mark.parametrize("reader", READERS)
def test_damaged_files_are_sentences(reader: str, tmp_path: Path) -> None:
    count = max(4, int(FILES * READERS[reader].share))
    found = fuzz(reader, 1, count, make_ground(tmp_path / "ground"))
    assert found["evidence"] == []
    assert found["counts"]["touched"] == 0
    assert found["counts"].get("refused", 0) > count / 4


@pytest.mark.parametrize("reader", READERS)
def test_the_good_file_is_accepted(reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the damage would never reach what is behind the first check."""
    as_json = "tests.fuzz.readers.damaged_document"
    monkeypatch.setattr(as_json, lambda _, tree, kind: json.dumps(tree).encode())
    monkeypatch.setattr("tests.fuzz.readers.damaged_toml", lambda _, tree, kind: toml_text(tree).encode())
    monkeypatch.setattr("tests.fuzz.readers.damaged_bytes", lambda _, good, kind: good)
    READERS[reader].prepare(tmp_path)
    READERS[reader].damage(tmp_path, random.Random(1), "truncated")
    READERS[reader].read(tmp_path)
