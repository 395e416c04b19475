"""Writes that a power cut cannot tear: everything is on the disk before the name that readers look for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from skylite.errors import WriteFailed
from skylite.run.files import append_line, atomic_file, atomic_folder


class Disk:
    """Records what reaches the disk: fsyncs and renames, in order, with what the file held."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, ...]] = []
        fsync = os.fsync

        def record_fsync(descriptor: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            content = ",".join(sorted(p.name for p in path.iterdir())) if path.is_dir() else path.read_text()
            self.seen.append(("fsync", path.name.partition(".tmp-")[0], content))
            fsync(descriptor)

        def record(rename: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
            def recorded(source: Path, target: Path) -> None:
                self.seen.append(("rename", target.name))
                rename(source, target)

            return recorded

        monkeypatch.setattr(os, "fsync", record_fsync)
        monkeypatch.setattr(os, "replace", record(os.replace))
        monkeypatch.setattr(os, "rename", record(os.rename))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_a_file_is_on_the_disk_before_its_name_and_the_name_before_the_next_write(
    disk: Disk, tmp_path: Path
) -> None:
    with atomic_file(tmp_path / "new" / "status.json") as temporary:
        temporary.write_text("{}")
    assert disk.seen == [
        ("fsync", ".status.json", "{}"),
        ("rename", "status.json"),
        ("fsync", "new", "status.json"),
    ]


def test_every_file_of_a_folder_is_on_the_disk_before_its_name(disk: Disk, tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "adapters" / "v1") as temporary:
        (temporary / "weights").write_text("w")
        (temporary / "manifest").write_text("m")
    assert sorted(disk.seen[:2]) == [("fsync", "manifest", "m"), ("fsync", "weights", "w")]
    assert disk.seen[2:] == [
        ("fsync", ".v1", "manifest,weights"),
        ("rename", "v1"),
        ("fsync", "adapters", "v1"),
    ]


def test_a_line_is_on_the_disk_before_the_call_returns(disk: Disk, tmp_path: Path) -> None:
    append_line(tmp_path / "metrics.jsonl", "a")
    append_line(tmp_path / "metrics.jsonl", "b")
    assert disk.seen == [("fsync", "metrics.jsonl", "a\n"), ("fsync", "metrics.jsonl", "a\nb\n")]


def test_a_file_that_the_disk_refuses_does_not_get_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "status.json").write_text("old\n")

    def refuse(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(WriteFailed), atomic_file(tmp_path / "status.json") as temporary:
        temporary.write_text("new")
    with pytest.raises(WriteFailed):
        append_line(tmp_path / "status.json", "more")
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]
    assert (tmp_path / "status.json").read_text() == "old\n"
