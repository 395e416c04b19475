"""The folder of model copies in /dev/shm, where other users may write: nothing of theirs is used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skylite.errors import ConfigError
from skylite.hub import shared_memory_copy
from skylite.hub.shared_memory_copy import USERS_LOCK, model_in_shared_memory, shared_copy
from skylite.rollout.run_session import provide_model_files
from tests.small_run import resolved

KEEP = """
import os, signal, sys
from pathlib import Path
from skylite.hub import shared_memory_copy as shm
shm.SHARED_MEMORY = Path(sys.argv[2])
with shm.model_in_shared_memory(Path(sys.argv[1]), shm.shared_copy(sys.argv[3])):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that every user may write to, in place of /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(shared_memory_copy, "SHARED_MEMORY", folder)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_text("weights")
    return tmp_path / "model"


def be_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process made so far belongs to somebody else."""
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)


def test_every_user_has_a_private_folder(memory: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two users with the same model neither share a copy nor lock each other out."""
    before = os.umask(0)
    try:
        with model_in_shared_memory(model, shared_copy("f")):
            assert (shared_copy("f") / "model.safetensors").read_text() == "weights"
            assert [oct(p.stat().st_mode & 0o777) for p in memory.iterdir()] == ["0o700"]
            mine = shared_copy("f")
            be_another_user(monkeypatch)
            assert shared_copy("f").parent != mine.parent
    finally:
        os.umask(before)


def test_a_folder_of_another_user_is_refused(
    memory: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = os.geteuid()
    be_another_user(monkeypatch)
    shared_copy("f").mkdir(parents=True)
    shared_copy("f").parent.chmod(0o700)
    (shared_copy("f") / "model.safetensors").write_text("theirs")
    with (
        pytest.raises(ConfigError, match=rf"skylite-{uid + 1} belongs to the user with id {uid}, not to you"),
        model_in_shared_memory(model, shared_copy("f")),
    ):
        pass


@pytest.mark.parametrize("mode", [0o777, 0o755, 0o701])
def test_a_folder_that_others_may_enter_is_refused(memory: Path, model: Path, mode: int) -> None:
    shared_copy("f").parent.mkdir()
    shared_copy("f").parent.chmod(mode)
    with (
        pytest.raises(ConfigError, match=rf"is open to other users \(mode 0{mode:o}\)"),
        model_in_shared_memory(model, shared_copy("f")),
    ):
        pass


def test_links_in_place_of_folder_and_locks_are_refused(memory: Path, model: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "file").write_text("mine")
    shared_copy("f").parent.symlink_to(mine)
    with (
        pytest.raises(ConfigError, match="is a symbolic link"),
        model_in_shared_memory(model, shared_copy("f")),
    ):
        pass
    shared_copy("f").parent.unlink()
    with model_in_shared_memory(model, shared_copy("f")):
        locks = [p for p in shared_copy("f").parent.iterdir() if p.suffix == ".lock"]
    assert len(locks) == 2
    for lock in locks:
        lock.unlink(missing_ok=True)
        lock.symlink_to(mine / "file")
        with (
            pytest.raises(ConfigError, match=r"\.lock is a symbolic link"),
            model_in_shared_memory(model, shared_copy("f")),
        ):
            pass
        lock.unlink(missing_ok=True)
    assert (mine / "file").read_text() == "mine"
    assert [p.name for p in mine.iterdir()] == ["file"]


def test_a_later_start_clears_what_a_killed_run_left(memory: Path, model: Path) -> None:
    for fingerprint in ("killed", "other"):
        argv = [sys.executable, "-c", KEEP, str(model), str(memory), fingerprint]
        assert subprocess.run(argv, check=False).returncode == -9
    with model_in_shared_memory(model, shared_copy("live")):
        torn = shared_copy("killed").parent / f".{shared_copy('torn').name}.tmp-"
        torn.mkdir()
        assert shared_copy("other").is_dir() is False
        with model_in_shared_memory(model, shared_copy("new")):
            assert not torn.exists()
            left = {p.name for p in shared_copy("new").parent.iterdir() if p.is_dir()}
            assert left == {shared_copy("live").name, shared_copy("new").name}, "a live copy stays"
    assert [p.suffix for p in shared_copy("new").parent.iterdir()] == [".lock"], "the lock of the folder"


def test_a_start_without_shared_memory_clears_what_a_killed_run_left(memory: Path, model: Path) -> None:
    argv = [sys.executable, "-c", KEEP, str(model), str(memory), "killed"]
    assert subprocess.run(argv, check=False).returncode == -9
    assert shared_copy("killed").is_dir()
    with model_in_shared_memory(model, shared_copy("live")):
        shared_copy("killed").mkdir(exist_ok=True)
        shared_copy("killed").with_name(shared_copy("killed").name + USERS_LOCK).touch()
        with provide_model_files(resolved(model, memory)):
            left = {p.name for p in memory.glob("*/model-*") if p.is_dir()}
            assert left == {shared_copy("live").name}, "a live copy stays"
    with provide_model_files(resolved(model, memory)):
        assert [p.suffix for p in memory.rglob("*") if p.is_file()] == [".lock"], "the lock of the folder"


def test_a_start_without_shared_memory_leaves_other_folders_alone(
    memory: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with provide_model_files(resolved(model, memory)):
        assert list(memory.iterdir()) == [], "nothing to clear, nothing made"
    theirs = shared_copy("f")
    theirs.mkdir(parents=True)
    theirs.parent.chmod(0o755)
    with provide_model_files(resolved(model, memory)):
        assert list(theirs.parent.iterdir()) == [theirs], "open to others"
    theirs.parent.chmod(0o700)
    theirs.parent.rename(theirs.parent.with_name(f"skylite-{os.geteuid() + 1}"))
    be_another_user(monkeypatch)
    with provide_model_files(resolved(model, memory)):
        assert theirs.parent.parent.exists()
        assert [p.name for p in shared_copy("f").parent.iterdir()] == [theirs.name], "another user's"
