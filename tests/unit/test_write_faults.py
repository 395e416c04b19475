"""Fail each system call of each of skylite's writers (tests/faults), and check what is on disk."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from skylite.run.files import TEMPORARY_MARK
from tests.faults.layer import ALL, FAULTS, OPEN, RENAME, SHORT, WRITE, Fault, Layer

WRITERS = (
    "bad inputs",
    "canary",
    "checkpoint",
    "clean-up",
    "config",
    "conversion",
    "eval",
    "events",
    "forget",
    "lock",
    "metrics",
    "micro-batch",
    "named reward",
    "prepare",
    "publish",
    "rollouts",
    "score",
    "status",
    "stop",
    "trainer error",
    "update",
    "warm start",
)
SILENT = ("named reward", "trainer error")
"""What these could not write is asked for again, or stands in the log too, so they do not end anything."""
MAKES = {
    "lock": OPEN | WRITE,
    "metrics": ALL & ~RENAME,
    "events": ALL & ~RENAME,
    "clean-up": RENAME,
    "stop": OPEN,
}
"""The calls of a writer that does not make all kinds."""
LARGE_PAGES = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""They make forks cheaper: fewer page table entries are copied."""
MAX_CALLS = 200
"""A writer that makes more calls than this is not what we think it is."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A folder in which version 1 stands, and what is visible with version 1 and with version 2."""

    start: Path
    before: dict[str, str]
    after: dict[str, str]


class Writers:
    """The process of tests/faults/writers.py, and the layer under it."""

    def __init__(self, process: subprocess.Popen[str], layer: Layer, ground: Path) -> None:
        self.process, self.layer, self.ground = process, layer, ground
        self.found: dict[str, Prepared] = {}

    def prepared(self, writer: str) -> Prepared:
        """Undisturbed writes: version 1 into an empty folder, version 2 into a copy of it."""
        if writer not in self.found:
            self.layer.disarm()
            start = self.ground / writer
            start.mkdir()
            assert self.write(writer, start, 1)["code"] == 0
            undisturbed = fresh(start, self.ground / "undisturbed")
            assert self.write(writer, undisturbed, 2)["code"] == 0
            self.found[writer] = Prepared(start, visible(start), visible(undisturbed))
        return self.found[writer]

    def write(self, writer: str, folder: Path, version: int) -> dict[str, Any]:
        """Run a writer in a fork and hear what became of it."""
        assert self.process.stdin is not None
        self.process.stdin.write(
            json.dumps({"writer": writer, "folder": str(folder), "version": version}) + "\n"
        )
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the writers' process ended"
        return json.loads(line)


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Iterator[Writers]:
    folder = tmp_path_factory.mktemp("writers")
    model = folder / "model"
    shutil.copytree(tiny_llama, model)
    layer = Layer(folder)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.writers", str(model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **layer.env, **LARGE_PAGES},
        cwd=Path(__file__).parents[2],
    )
    found = Writers(process, layer, tmp_path_factory.mktemp("undisturbed"))
    try:
        assert tuple(found.answer()) == WRITERS
        yield found
    finally:
        process.kill()
        process.wait()


def visible(folder: Path) -> dict[str, str]:
    """Path to sha256 of every file under a final name; a folder on the way counts as soon as it is there, an
    empty one not. A run begins with its config.json: machine.json, written before it, does not count alone.
    """
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != ".skylite.lock")
    files = [p for p in files if p.name != "machine.json" or p.with_name("config.json").exists()]
    kept = [p for p in files if not any(TEMPORARY_MARK in part for part in p.relative_to(folder).parts)]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in kept}


def leftovers(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if TEMPORARY_MARK in p.name]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_write_that_fails_at_any_call_leaves_the_state_before_or_after(
    writers: Writers, tmp_path: Path, writer: str, fault: Fault
) -> None:
    undisturbed, fired = writers.prepared(writer), 0
    before, after = undisturbed.before, undisturbed.after
    for target in range(first_call(fault), MAX_CALLS, 2):
        folder = fresh(undisturbed.start, tmp_path / "case")
        writers.layer.arm(folder, target, fault)
        answer = writers.write(writer, folder, 2)
        hit, calls = writers.layer.state.fired, writers.layer.state.count
        writers.layer.disarm()
        what = f"{writer}, call {target}: {answer}"
        if not hit:
            assert answer["code"] == 0, what
            assert calls < target
            break
        fired += 1
        check(answer, folder, before, after, what, silent=writer in SILENT)
        if answer["code"] == 0 or (
            writer == "bad inputs" and visible(folder) == after
        ):  # a second time is a second folder
            continue
        again = writers.write(writer, folder, 2)
        assert again["code"] == 0 or "already" in again["message"], f"{what}; again: {again}"
        assert visible(folder) == after, what
    else:
        pytest.fail(f"{writer} made more than {MAX_CALLS} calls")
    covered = fired > 0 or calls < first_call(fault) or not touches(writer, fault)
    assert covered, "the layer saw nothing: it does not cover this writer"


def first_call(fault: Fault) -> int:
    """Odd calls meet a full disk and even ones a disk that fails; of other faults each second call."""
    return 2 if fault.error == errno.EIO else 1


def fresh(start: Path, folder: Path) -> Path:
    """A copy of `start`."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(start, folder)
    return folder


def check(
    answer: dict[str, Any],
    folder: Path,
    before: dict[str, str],
    after: dict[str, str],
    what: str,
    *,
    silent: bool,
) -> None:
    assert answer["code"] in (0, 1, 2), what
    found = visible(folder)
    if answer["code"] == 0:
        assert found == after or (silent and found == before), what
    else:
        assert found in (before, after), what
        assert str(folder) in answer["message"], what
        assert "\n" not in answer["message"].strip(), what
    assert leftovers(folder) == [], what


def touches(writer: str, fault: Fault) -> bool:
    """Whether the writer makes calls of the fault's kind at all."""
    return fault.ops & MAKES.get(writer, ALL) != 0 and not (fault.kind == SHORT and fault.ops != WRITE)
