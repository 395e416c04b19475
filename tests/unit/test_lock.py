"""A folder belongs to one live run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skylite.errors import ConfigError
from skylite.run.lock import lock_folder

HOLD = """
import sys
from pathlib import Path
from skylite.run.lock import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_of_a_live_process_is_refused_and_free_after_its_death(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"held\n"
    with pytest.raises(ConfigError, match=rf"{tmp_path} belongs to another live run \(pid {owner.pid}\)"), lock_folder(tmp_path):
        pass
    owner.kill()
    owner.wait()
    with lock_folder(tmp_path):
        pass
    owner.communicate()


def test_the_lock_is_let_go_at_the_end_of_the_block(tmp_path: Path) -> None:
    with lock_folder(tmp_path / "new"):
        with pytest.raises(ConfigError, match=f"pid {os.getpid()}"), lock_folder(tmp_path / "new"):
            pass
        with lock_folder(tmp_path / "another"):
            pass
    with lock_folder(tmp_path / "new"):
        pass


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
