"""Walks and removals in trees that other programs have filled."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from skylite.adapters.retention import remove_folder
from skylite.processes.child import ProcessSpec, kill, poll, start
from skylite.processes.file_tree import entries_below, files_below, remove_tree, tree_bytes
from skylite.processes.private_folders import MODE, TemporaryFolder, clear_unused
from tests.unit.test_child_leftovers import wait_until

DEEP = 1500


def nest(folder: Path, depth: int = DEEP) -> None:
    """Nested folders with a file at the bottom, deeper than a path can be long."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("deep", dir_fd=here)
        below = os.open("deep", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)


@pytest.fixture(autouse=True)
def clear(tmp_path: Path) -> Iterator[None]:
    """pytest cannot remove a deep tree, and its next session would fail on it."""
    yield
    subprocess.run(["rm", "-rf", str(tmp_path)], check=True)


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    folder = tmp_path / "deep"
    folder.mkdir()
    nest(folder)
    return folder


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_missing_folder_is_gone_and_its_parent_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    assert remove_tree(tmp_path / "missing") is None
    assert remove_tree(tmp_path / "missing" / "below") is None
    assert mode_of(tmp_path) == 0o1777


def test_the_end_of_a_child_leaves_the_mode_of_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "t"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    child = start(ProcessSpec(name="true", argv=["/bin/true"], env={}, log_path=tmp_path / "log"))
    wait_until(lambda: poll(child) is not None)
    assert poll(child) == 0
    assert (mode_of(shared), list(shared.iterdir())) == (0o1777, [])


def test_a_folder_whose_parent_refuses_stays_and_the_parent_keeps_its_mode(tmp_path: Path) -> None:
    """As another user: root could write there."""
    (tmp_path / "parent" / "folder").mkdir(parents=True)
    (tmp_path / "parent" / "folder" / "file").touch()
    (tmp_path / "parent").chmod(0o555)
    found = as_another_user(
        f"from pathlib import Path; print(type(remove_tree(Path({str(tmp_path)!r}, 'parent', 'folder'))))",
        tmp_path,
    )
    assert "PermissionError" in found
    assert mode_of(tmp_path / "parent") == 0o555
    (tmp_path / "parent").chmod(0o755)


def as_another_user(code: str, *owned: Path) -> str:
    """What code prints that runs without the rights of root, and owns these trees."""
    user = 65534 if os.getuid() == 0 else os.getuid()
    if os.getuid() == 0:
        for tree in owned:
            for path in (tree, *tree.rglob("*")):
                os.chown(path, user, user, follow_symlinks=False)
            for parent in tree.parents:
                if parent.stat().st_uid == 0 and mode_of(parent) & 0o011 != 0o011:
                    parent.chmod(mode_of(parent) | 0o011)
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE.format(user=user) + code],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


PRELUDE = """
import os
from skylite.processes.file_tree import remove_tree
if os.getuid() == 0:
    os.setresuid({user}, {user}, {user})
"""


@pytest.mark.parametrize("mode", [0o000, 0o100, 0o200, 0o300, 0o400, 0o500, 0o600])
def test_folders_that_their_owner_may_not_list_or_change_go(mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "mine" / "folder"
    (folder / "closed" / "inner").mkdir(parents=True)
    (folder / "closed" / "inner" / "file").touch()
    (folder / "empty").mkdir()
    code = "".join(f"os.chmod({str(p)!r}, {mode})\n" for p in (folder / "closed", folder / "empty", folder))
    code += f"print(remove_tree({str(folder)!r}))"
    assert as_another_user(code, tmp_path / "mine").strip() == "None"
    assert not folder.exists()


def test_links_are_removed_and_never_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    outside.chmod(0o555)
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, target in (("folder", outside), ("file", outside / "kept"), ("dangling", "nowhere")):
        (folder / name).symlink_to(target)
    link = tmp_path / "link"
    link.symlink_to(outside)
    assert remove_tree(link) is None
    assert not link.is_symlink()
    assert remove_tree(folder) is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["outside"]
    assert ([p.name for p in outside.iterdir()], mode_of(outside)) == (["kept"], 0o555)
    outside.chmod(0o755)


def test_a_deep_tree_is_removed(deep: Path) -> None:
    with pytest.raises(OSError, match="File name too long"):
        list(entries_below(deep))
    assert tree_bytes(deep) == 0
    assert remove_tree(deep) is None
    assert not deep.exists()


def test_what_a_killed_process_left_may_be_deep(tmp_path: Path) -> None:
    """Each start of skylite clears it, a checkpoint of a stranger has it."""
    left = tmp_path / "skylite-abcd1234"
    left.mkdir()
    nest(left)
    left.chmod(MODE)
    assert remove_folder(left) == 0
    left.mkdir()
    nest(left)
    left.chmod(MODE)
    clear_unused(tmp_path)
    assert list(tmp_path.iterdir()) == []
    folder = TemporaryFolder(parent=tmp_path)
    nest(folder.path)
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_reaper_removes_a_deep_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    code = (
        "import os\nos.chdir(os.environ['TMPDIR'])\n"
        "for _ in range(1500): os.mkdir('deep'); os.chdir('deep')\n"
        f"open({str(tmp_path / 'made')!r}, 'w')\nimport time; time.sleep(600)"
    )
    child = start(
        ProcessSpec(name="deep", argv=[sys.executable, "-c", code], env={}, log_path=tmp_path / "log")
    )
    wait_until((tmp_path / "made").exists)
    child.process.terminate()  # the reaper ends the command and clears; `poll` finds nothing left to do
    wait_until(lambda: list((tmp_path / "t").iterdir()) == [])
    kill(child)


def test_a_tree_that_changes_all_the_time_is_removed_without_an_error(tmp_path: Path) -> None:
    folder, stop = tmp_path / "folder", threading.Event()
    folder.mkdir()

    def change() -> None:
        while not stop.is_set():
            for number in range(50):
                try:
                    (folder / f"d{number}" / "e").mkdir(parents=True)
                    (folder / f"d{number}" / "e").rename(folder / f"d{(number + 1) % 50}" / f"f{number}")
                except OSError:
                    continue

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(20):
            remove_tree(folder)
    finally:
        stop.set()
        thread.join()
    assert remove_tree(folder) is None


def test_files_below_counts_links_to_files(tmp_path: Path) -> None:
    """A snapshot of the hub's cache holds nothing else."""
    (tmp_path / "blob").touch()
    (tmp_path / "snapshot" / "data").mkdir(parents=True)
    (tmp_path / "snapshot" / "data" / "train.parquet").symlink_to(tmp_path / "blob")
    (tmp_path / "snapshot" / "broken").symlink_to("nowhere")
    assert files_below(tmp_path / "snapshot") == ["data/train.parquet"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount")
def test_another_file_system_below_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "folder" / "mounted").mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "tmpfs", str(tmp_path / "folder" / "mounted")]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this machine allows no mounts")
    try:
        (tmp_path / "folder" / "mounted" / "kept").touch()
        assert isinstance(remove_tree(tmp_path / "folder"), OSError)
        assert (tmp_path / "folder" / "mounted" / "kept").exists()
    finally:
        subprocess.run(["umount", str(tmp_path / "folder" / "mounted")], check=True)
