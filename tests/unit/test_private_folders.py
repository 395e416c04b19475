"""Folders where other users may write (/dev/shm, /tmp): nothing of theirs is used, and no file is emptied."""

from __future__ import annotations

import fcntl
import os
from functools import partial
from pathlib import Path

import pytest

from skylite.config.lora import LoraConfig
from skylite.errors import ConfigError
from skylite.processes.private_folders import open_lock, require_own_links
from skylite.run.own_folders import LOCK_NAME, lock_folder, lock_run
from skylite.run.run_dir import RunDir
from tests.other_user import as_other_user, as_root, folder_of_all
from tests.unit.bad_inputs import Reply, call
from tests.unit.run_cases import begin


def be_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process made so far belongs to somebody else."""
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return begin(tmp_path, lora_sync_path=str(tmp_path / "sync"))


def contents(folder: Path) -> dict[str, bytes]:
    """Every path below `folder`, and the content of every file."""
    return {str(p): p.read_bytes() if p.is_file() else b"" for p in sorted(folder.rglob("*"))}


def start(root: Path, sync: Path) -> Reply:
    flags = ["--model", str(root / "model"), "--data", str(root / "data"), "--run", str(root / "new")]
    more = ["data.difficulty=[]", "eval.limit=0", f"lora.lora_sync_path={sync}", "rollout.prompts_per_step=2"]
    return call(["train", "--recipe", "gsm8k_cpu", *flags, *(w for m in more for w in ("--set", m))])


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_a_run_is_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with lock_run(tmp_path / "runs" / "new", tmp_path / "sync", LoraConfig(lora_sync_path="sync")):
            for folder in (tmp_path / "runs" / "new", tmp_path / "sync"):
                assert folder.stat().st_mode & 0o777 == 0o700
                assert (folder / LOCK_NAME).stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


@as_root
def test_another_user_cannot_hold_the_lock_of_a_run() -> None:
    """Also in a folder that its owner lets others read."""

    def hold(folder: Path) -> None:
        with pytest.raises(PermissionError):
            fcntl.flock(os.open(folder / LOCK_NAME, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)

    with folder_of_all() as place:
        (place / "shared").mkdir()
        (place / "shared").chmod(0o755)
        for folder in (place / "new", place / "shared"):
            with lock_folder(folder):
                (folder / "kept").touch()
            open_lock(folder / LOCK_NAME).close()  # as a killed run leaves it
            assert as_other_user(partial(hold, folder)) == 0
            with lock_folder(folder):
                pass


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o702])
def test_a_run_folder_that_others_may_write_to_is_refused_and_left(
    run: RunDir, tmp_path: Path, mode: int
) -> None:
    (tmp_path / "new").mkdir()
    for folder in (tmp_path / "new", run.root):
        folder.chmod(mode)
    before = contents(tmp_path)
    for reply in (start(tmp_path, tmp_path / "sync2"), call(["train", "--resume", str(run.root)])):
        assert reply.code == 2, reply.output
        assert f"is open to other users (mode 0{mode:o})" in reply.output
    assert contents(tmp_path) == before
    assert run.root.stat().st_mode & 0o7777 == mode


def test_a_sync_folder_of_another_user_is_refused(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    be_another_user(monkeypatch)
    before = contents(tmp_path)
    for reply in (
        start(tmp_path, theirs),
        call(["train", "--resume", str(run.root)]),
        call(["adapters", "gc", str(run.root)]),
    ):
        assert reply.code == 2, reply.output
        assert "belongs to the user with id" in reply.output
    assert contents(tmp_path) == before


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o702])
def test_a_sync_folder_that_others_may_write_to_is_refused(run: RunDir, tmp_path: Path, mode: int) -> None:
    """Also /dev/shm itself, where two users would lock each other out."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    (tmp_path / "sync").chmod(mode)
    before = contents(tmp_path)
    for reply in (start(tmp_path, tmp_path / "open"), call(["train", "--resume", str(run.root)])):
        assert reply.code == 2, reply.output
        assert f"is open to other users (mode 0{mode:o})" in reply.output
    assert contents(tmp_path) == before


def give_away(link: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the link another user's."""
    if os.geteuid() == 0:
        os.lchown(link, 65534, 65534)
    else:
        be_another_user(monkeypatch)


@pytest.mark.parametrize("place", ["sync", "shm", "chain"])
def test_a_link_of_another_user_to_a_sync_folder_is_refused(
    run: RunDir, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leads to a private folder of the user's, which passes every other check."""
    mine = tmp_path / "mine" / "sync"
    mine.mkdir(parents=True, mode=0o700)
    (tmp_path / "shm").mkdir()
    if place == "sync":
        link, path = tmp_path / "shm" / "sync", tmp_path / "shm" / "sync"
        link.symlink_to(mine)
    else:
        link = tmp_path / "shm" / "folder"
        link.symlink_to(tmp_path / "mine" if place == "shm" else "../mine")
        path = link / "sync"
    if place == "chain":
        (tmp_path / "own").symlink_to("shm/folder/../folder/sync")
        path = tmp_path / "own"
    give_away(link, monkeypatch)
    before = contents(tmp_path)
    reply = start(tmp_path, path)
    assert reply.code == 2, reply.output
    assert f"{link} is a link of the user with id" in reply.output
    assert contents(tmp_path) == before


def test_a_link_that_replaces_a_recorded_sync_folder_is_refused(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reboot /dev/shm is empty, and another user can be there first."""
    (tmp_path / "sync").rename(tmp_path / "mine")
    (tmp_path / "sync").symlink_to(tmp_path / "mine")
    give_away(tmp_path / "sync", monkeypatch)
    before = contents(tmp_path)
    for args in (["train", "--resume", str(run.root)], ["adapters", "gc", str(run.root)]):
        reply = call(args)
        assert reply.code == 2, reply.output
        assert "is a link of the user with id" in reply.output
    assert contents(tmp_path) == before


def test_own_links_to_a_sync_folder_are_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("disk")
    (tmp_path / "above").symlink_to(tmp_path)
    path = tmp_path / "above" / "link" / "new"
    with lock_run(tmp_path / "run", path.resolve(), LoraConfig(lora_sync_path=str(path))):
        assert (tmp_path / "disk" / "new" / LOCK_NAME).is_file()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a link of root's")
def test_roots_links_are_followed_by_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    be_another_user(monkeypatch)
    require_own_links(tmp_path / "link" / "sync", "")


def test_a_circle_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(ConfigError, match="has more than 40 links"):
        require_own_links(tmp_path / "a" / "sync", "")


@pytest.mark.parametrize("kind", ["symlink", "hard link", "pipe", "folder"])
def test_a_lock_that_is_no_plain_file_is_refused_and_never_emptied(tmp_path: Path, kind: str) -> None:
    (tmp_path / "mine").write_text("mine")
    lock = tmp_path / "run" / LOCK_NAME
    lock.parent.mkdir()
    if kind == "symlink":
        lock.symlink_to(tmp_path / "mine")
    elif kind == "hard link":
        lock.hardlink_to(tmp_path / "mine")
    elif kind == "pipe":
        os.mkfifo(lock)
    else:
        lock.mkdir()
    words = {
        "symlink": "a symbolic link",
        "hard link": "a hard link to another file",
        "pipe": "a pipe or device",
    }
    with (
        pytest.raises(ConfigError, match=rf"{lock} is {words.get(kind, 'a folder')}, and a lock"),
        lock_folder(tmp_path / "run"),
    ):
        pass
    assert (tmp_path / "mine").read_text() == "mine"
