"""A folder belongs to one live run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from skylite.errors import ConfigError
from skylite.run.own_folders import LOCK_NAME, lock_folder

HOLD = """
import sys
from pathlib import Path
from skylite.run.own_folders import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_live_owner_locks_the_folder_and_its_death_frees_it(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"held\n"
    with (
        pytest.raises(ConfigError, match=rf"{tmp_path} belongs to another live run \(pid {owner.pid}\)"),
        lock_folder(tmp_path),
    ):
        pass
    owner.kill()
    owner.wait()
    with lock_folder(tmp_path):
        pass
    owner.communicate()


def test_the_lock_is_released_at_the_end_of_the_block(tmp_path: Path) -> None:
    with lock_folder(tmp_path / "new"):
        with pytest.raises(ConfigError, match=f"pid {os.getpid()}"), lock_folder(tmp_path / "new"):
            pass
        with lock_folder(tmp_path / "another"):
            pass
    with lock_folder(tmp_path / "new"):
        pass


def test_the_lock_holds_the_owners_pid_alone(tmp_path: Path) -> None:
    """A lock file that a killed owner left may hold a longer pid."""
    (tmp_path / LOCK_NAME).write_text("123456789012\n")
    with lock_folder(tmp_path):
        assert (tmp_path / LOCK_NAME).read_text() == f"{os.getpid()}\n"


def test_a_folder_below_missing_ones_can_be_locked(tmp_path: Path) -> None:
    with lock_folder(tmp_path / "a" / "b" / "c"):
        assert (tmp_path / "a" / "b" / "c" / LOCK_NAME).exists()


def test_a_refused_lock_leaves_no_file_open(tmp_path: Path) -> None:
    with lock_folder(tmp_path):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(ConfigError) as caught, lock_folder(tmp_path):
                pass
        caught.value.__traceback__ = None  # it refers to the file
        assert len(os.listdir("/proc/self/fd")) == before


def test_files_made_only_for_the_lock_are_removed_with_it(tmp_path: Path) -> None:
    with lock_folder(tmp_path / "made"):
        pass
    with lock_folder(tmp_path / "used"):
        (tmp_path / "used" / "file").touch()
    (tmp_path / "there").mkdir()
    with lock_folder(tmp_path / "there"):
        pass
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")) == [
        "there",
        "used",
        "used/file",
    ]


def test_there_is_one_owner_although_the_file_is_removed_and_recreated(tmp_path: Path) -> None:
    """Each thread opens the file again, so the kernel treats the threads like separate processes."""
    inside, alone = threading.Lock(), []

    def take() -> None:
        times = 0
        while times < 200:
            with contextlib.suppress(ConfigError), lock_folder(tmp_path):
                times += 1
                alone.append(inside.acquire(blocking=False))
                time.sleep(0)
                if alone[-1]:
                    inside.release()

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(alone) == 800
    assert all(alone)


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    up, child_up = os.pipe()
    hold, release = os.pipe()
    with lock_folder(tmp_path):
        pid = os.fork()
        if pid == 0:
            os.close(release)
            os.write(child_up, b"x")
            os.read(hold, 1)
            os._exit(0)
        os.read(up, 1)
    try:
        with lock_folder(tmp_path):
            pass
    finally:
        os.close(release)
        os.waitpid(pid, 0)
        for descriptor in (up, child_up, hold):
            os.close(descriptor)


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o711])
def test_a_folder_that_others_only_read_or_enter_can_be_locked(tmp_path: Path, mode: int) -> None:
    (tmp_path / "sync").mkdir()
    (tmp_path / "sync").chmod(mode)
    with lock_folder(tmp_path / "sync"):
        pass
