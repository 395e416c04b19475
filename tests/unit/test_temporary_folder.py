"""What a killed process leaves in /tmp goes with the next start, and nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skylite.processes.private_folders import MODE, TemporaryFolder, clear_unused, temporary_folder

HOLD = """
import sys, time
from pathlib import Path
from skylite.processes.private_folders import TemporaryFolder
folders = [TemporaryFolder(kind, Path(sys.argv[1])) for kind in ("", "lib-", "dry-run-")]
(folders[0].path / "closed").mkdir(mode=0o300)
(folders[0].path / "closed" / "file").touch()
print("ready", flush=True)
time.sleep(600)
"""


@contextmanager
def holder(parent: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with three folders."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(parent)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_the_next_start_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        TemporaryFolder(parent=tmp_path).remove()
        assert len(list(tmp_path.iterdir())) == 3, "a living process keeps its folders"
        process.kill()
        process.wait()
    with holder(tmp_path):
        assert len(list(tmp_path.iterdir())) == 3, "those of this process"


def test_folders_of_others_stay(tmp_path: Path) -> None:
    """Such as a checkout that happens to have such a name, and a link to one of our folders."""
    kept = tmp_path / "elsewhere" / "skylite-abcd1234"
    kept.mkdir(parents=True)
    kept.chmod(MODE)
    (tmp_path / "skylite-baseline").mkdir(mode=0o700)
    (tmp_path / "skylite-link-abcd1234").symlink_to(kept)
    (tmp_path / "skylite-mine").mkdir()
    (tmp_path / "skylite-mine").chmod(MODE)
    (tmp_path / "skylite-abcd5678").write_text("a file")
    (tmp_path / "skylite-abcd9999").mkdir()
    (tmp_path / "skylite-abcd9999").chmod(MODE)
    clear_unused(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "elsewhere", "skylite-abcd5678", "skylite-baseline", "skylite-link-abcd1234", "skylite-mine",
    ]  # fmt: skip
    assert kept.is_dir()


def test_it_is_private_and_ends_with_its_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = os.umask(0)
    try:
        with temporary_folder("lib-") as folder:
            assert folder.stat().st_mode & 0o7777 == MODE
            clear_unused(tmp_path)
            assert folder.is_dir(), "a process does not remove its own, either"
    finally:
        os.umask(before)
    assert list(tmp_path.iterdir()) == []
