"""Writes that a power cut cannot tear: everything is on the disk before the name that readers look for."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skylite.errors import WriteFailed
from skylite.run import files
from skylite.run.files import (
    append_line,
    atomic_file,
    atomic_folder,
    format_bytes,
    free_bytes,
    require_space,
    sha256_file,
    swap_paths,
    temporary_sibling,
    write_json,
)


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
    with atomic_file(tmp_path / "a" / "new" / "status.json") as temporary:
        temporary.write_text("{}")
    assert disk.seen == [
        ("fsync", ".status.json", "{}"),
        ("rename", "status.json"),
        ("fsync", "new", "status.json"),
    ]


def test_every_file_of_a_folder_is_on_the_disk_before_its_name(disk: Disk, tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "a" / "adapters" / "v1") as temporary:
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


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")

    def fail(write: Callable[[Path], Any], path: Path) -> None:
        with write(path) as temporary:
            assert temporary.parent == path.parent
            (temporary / "x" if temporary.is_dir() else temporary).write_text("half")
            raise KeyError

    for write, path in ((atomic_file, tmp_path / "old"), (atomic_folder, tmp_path / "new")):
        with pytest.raises(KeyError):
            fail(write, path)
    assert [p.name for p in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_text() == "old"


def test_a_published_folder_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    with pytest.raises(WriteFailed, match="v1 already exists"), atomic_folder(tmp_path / "v1"):
        pass
    with atomic_folder(tmp_path / "v2") as temporary:
        (temporary / "new").touch()
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["v1", "v2", "v2/new"]


def test_relative_paths_are_swapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").mkdir()
    swap_paths(Path("a"), Path("b"))
    assert (tmp_path / "a").is_dir()
    assert (tmp_path / "b").read_text() == "1"


def test_small_files_and_folders_may_use_the_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda path: 0)
    write_json(tmp_path / "status.json", 1)
    with atomic_folder(tmp_path / "v1"):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == ["status.json", "v1"]


def test_the_disk_of_a_new_folder_is_that_of_the_nearest_existing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=len(str(folder))))
    assert free_bytes(tmp_path / "new" / "newer") == len(str(tmp_path))
    assert free_bytes(tmp_path) == len(str(tmp_path))


def test_a_flush_leaves_no_file_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        files.fsync_path(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_temporary_name_is_hidden_and_beside_its_target() -> None:
    one, other = temporary_sibling(Path("/a/b.json")), temporary_sibling(Path("/a/b.json"))
    assert one.parent == Path("/a")
    assert one.name.startswith(".b.json.tmp-")
    assert one != other, "nobody can foresee it"


def test_a_planted_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "precious").write_text("mine")
    planted = tmp_path / ".report.html.tmp-1"
    planted.symlink_to(tmp_path / "precious")
    monkeypatch.setattr(files, "temporary_sibling", lambda _: planted)
    with pytest.raises(WriteFailed), atomic_file(tmp_path / "report.html") as temporary:
        temporary.write_text("page")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "precious")
    with pytest.raises(WriteFailed):
        append_line(tmp_path / "metrics.jsonl", "more")
    assert (tmp_path / "precious").read_text() == "mine"


class Filling(FileIO):
    """A disk that accepts three bytes of each write, and nothing after `room` bytes."""

    room = 10**9

    def write(self, data: Any) -> int:
        if self.tell() >= self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data[:3])


def test_a_line_is_written_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"first\n" * 3)
    monkeypatch.setattr(files, "FileIO", Filling)
    append_line(path, "a long line")
    assert path.read_bytes() == b"first\n" * 3 + b"a long line\n"
    monkeypatch.setattr(Filling, "room", 34)
    with pytest.raises(WriteFailed, match=r"metrics\.jsonl could not be written: No space left"):
        append_line(path, "another line")
    assert path.read_bytes() == b"first\n" * 3 + b"a long line\n"


@pytest.mark.parametrize(("torn", "kept"), [(b"", b""), (b"x", b""), (b"a\nb", b"a\n"), (b"a\n\n", b"a\n\n")])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: bytes, kept: bytes) -> None:
    (tmp_path / "m").write_bytes(torn)
    append_line(tmp_path / "m", "new")
    assert (tmp_path / "m").read_bytes() == kept + b"new\n"


def make_pair(folder: Path) -> tuple[Path, Path]:
    for name in ("one", "other"):
        (folder / name).mkdir()
        (folder / name / name).touch()
    return folder / "one", folder / "other"


def refusing(number: int) -> Callable[..., Any]:
    """libc without an atomic swap."""

    def renameat2(*_: Any) -> int:
        ctypes.set_errno(number)
        return -1

    return lambda *_, **__: SimpleNamespace(renameat2=renameat2)


def test_folders_are_swapped_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_swap_by_renames", pytest.fail)
    one, other = make_pair(tmp_path)
    swap_paths(one, other)
    assert (one / "other").exists()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
def test_folders_are_swapped_by_renames_where_there_is_no_atomic_swap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    one, other = make_pair(tmp_path)
    monkeypatch.setattr(ctypes, "CDLL", refusing(number))
    swap_paths(one, other)
    assert (one / "other").exists()
    assert (other / "one").exists()
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(FileNotFoundError):
        swap_paths(tmp_path / "missing", other)
    assert (other / "one").exists(), "back in its place"


def test_another_error_of_a_swap_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = make_pair(tmp_path)
    monkeypatch.setattr(ctypes, "CDLL", refusing(errno.EACCES))
    with pytest.raises(PermissionError) as caught:
        swap_paths(one, other)
    assert caught.value.filename == str(other)
    assert (one / "one").exists()


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1.02e+03 KiB"),
        (1 << 20, "1 MiB"), (120 << 20, "120 MiB"), (1 << 30, "1 GiB"), (3651 << 20, "3.57 GiB"),
    ],
)  # fmt: skip
def test_sizes_as_text(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_the_hash_of_a_file_counts_its_bytes(tmp_path: Path) -> None:
    data = b"x" * ((2 << 20) + 5)
    (tmp_path / "f").write_bytes(data)
    counts: list[int] = []
    assert sha256_file(tmp_path / "f", on_bytes=counts.append) == hashlib.sha256(data).hexdigest()
    assert counts == [1 << 20, 1 << 20, 5]
    assert sha256_file(tmp_path / "f") == hashlib.sha256(data).hexdigest()


def test_free_space_of_a_path_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "a" / "b" / "c") > 0
    (tmp_path / "file").touch()
    assert free_bytes(tmp_path / "file") > 0


def test_a_large_write_leaves_the_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda _: (16 << 20) + 1000)
    require_space(tmp_path / "x", 1000)
    with pytest.raises(
        WriteFailed, match=r"x needs 1001 bytes, .* only 16 MiB free, of which 16 MiB are reserved"
    ):
        require_space(tmp_path / "x", 1001)


def test_json_keeps_every_text(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": "\u00e9 \ud800", "b": [1]})
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert text == '{\n "a": "\u00e9 \\ud800",\n "b": [\n  1\n ]\n}\n'
