"""A few damaged files for every reader; `make fuzz` reads 10,000."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.fuzz import damage, readers, row_readers, run
from tests.fuzz.readers import READERS
from tests.fuzz.run import Fuzzer, make_ground
from tests.unit.bad_inputs import toml_text

FILES = 30


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzer]:
    with Fuzzer(make_ground(tmp_path_factory.mktemp("fuzz") / "ground")) as fuzzer:
        yield fuzzer


@pytest.mark.parametrize("reader", READERS)
def test_damaged_files_are_sentences(reader: str, fuzzer: Fuzzer) -> None:
    count = max(4, int(FILES * READERS[reader].share))
    found = fuzzer.fuzz(reader, 1, count)
    assert found["evidence"] == []
    assert found["counts"]["touched"] == 0
    assert found["counts"].get("refused", 0) > count / 4


@pytest.mark.parametrize("reader", READERS)
def test_the_good_file_is_accepted(reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the damage would never reach what is behind the first check."""
    for name, good in (
        ("damaged_document", lambda _, tree, kind: json.dumps(tree).encode()),
        ("damaged_toml", lambda _, tree, kind: toml_text(tree).encode()),
        ("damaged_yaml", lambda _, tree, kind: yaml.safe_dump(tree).encode()),
        ("damaged_bytes", lambda _, raw, kind: raw),
    ):
        for module in (damage, readers, row_readers):
            monkeypatch.setattr(module, name, good, raising=False)
    READERS[reader].prepare(tmp_path)
    READERS[reader].damage(tmp_path, random.Random(1), "truncated")
    READERS[reader].read(tmp_path)


def burn(_: Path) -> None:
    while True:
        pass


def burn_a_while(_: Path) -> None:
    end = time.process_time() + 0.4
    while time.process_time() < end:
        pass


@pytest.mark.parametrize(
    ("read", "outcome"),
    [
        (lambda _: time.sleep(0.6), "accepted"),
        (burn_a_while, "hang"),
        (lambda _: time.sleep(60), "hang"),
        (burn, "hang"),
    ],
    ids=["waits for the machine", "takes CPU time", "waits for ever", "takes CPU time for ever"],
)
def test_what_counts_as_a_hang_does_not_depend_on_the_load(
    read: Callable[[Path], None], outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "CPU_S", 0.3)
    monkeypatch.setattr(run, "WALL_S", 2.0)
    monkeypatch.setitem(READERS, "config.json", replace(READERS["config.json"], read=read))
    assert run._judge("config.json", tmp_path)[0] == outcome
