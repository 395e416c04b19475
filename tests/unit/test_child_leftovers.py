"""What children leave behind: nothing in /tmp and /dev/shm, and nothing that other users can open."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skylite.config.train import TrainConfig
from skylite.processes.child import Child, ProcessSpec, kill, poll, start
from skylite.processes.private_folders import MODE
from skylite.rewards.worker_pool import RewardPool
from skylite.rollout.plan import plan_run
from skylite.run.run_dir import RunDir
from skylite.ui.logs import configure_logging, run_log
from tests.unit.data_cases import prompt
from tests.unit.run_cases import make_model, write_data

LEAVE = """
import os, sys, tempfile, time
folder = tempfile.mkdtemp(prefix="torchelastic_")
open(os.path.join(tempfile.gettempdir(), "socket"), "w")
name = f"/dev/shm/__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}"
open(name, "w")
open(sys.argv[1] + ".tmp", "w").write(f"{folder} {name}")
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture(autouse=True)
def shared_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stands for /tmp. Its path is short: a socket's path has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def started(tmp_path: Path, seconds: float) -> tuple[Child, Path, Path]:
    """A child, the folder that it made and its file in shared memory."""
    argv = [sys.executable, "-c", LEAVE, str(tmp_path / "names"), str(seconds)]
    child = start(ProcessSpec(name="child", argv=argv, env={}, log_path=tmp_path / "log"))
    wait_until((tmp_path / "names").exists)
    folder, shared = (tmp_path / "names").read_text().split()
    return child, Path(folder), Path(shared)


def test_a_child_has_a_private_temporary_folder_whatever_the_umask(tmp_path: Path, shared_tmp: Path) -> None:
    before = os.umask(0)
    try:
        child, folder, _ = started(tmp_path, 600)
    finally:
        os.umask(before)
    try:
        assert folder.parent.parent == shared_tmp
        assert stat.S_IMODE(folder.parent.stat().st_mode) == MODE
    finally:
        kill(child)


@pytest.mark.parametrize("seconds", [0, 600])
def test_nothing_stays_after_an_end_or_a_kill(seconds: float, tmp_path: Path, shared_tmp: Path) -> None:
    child, folder, shared = started(tmp_path, seconds)
    if seconds:
        kill(child)
    wait_until(lambda: poll(child) is not None)
    assert not folder.exists()
    assert list(shared_tmp.iterdir()) == []
    assert not shared.exists()


PARENT = """
import sys, time
from pathlib import Path
from tests.unit.test_child_leftovers import started
child, _, _ = started(Path(sys.argv[1]), 600)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_nothing_stays_after_the_parent_is_killed(tmp_path: Path, shared_tmp: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        reaper = int(parent.stdout.readline())
        parent.kill()
    wait_until(lambda: not Path(f"/proc/{reaper}").exists())
    assert list(shared_tmp.iterdir()) == []
    assert not Path((tmp_path / "names").read_text().split()[1]).exists()


def test_a_living_process_keeps_its_file_in_shared_memory(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
        theirs = Path(f"/dev/shm/__KMP_REGISTERED_LIB_{other.pid}_{os.getuid()}")
        theirs.touch()
        try:
            child, _, _ = started(tmp_path, 0)
            wait_until(lambda: poll(child) is not None)
            assert theirs.exists()
        finally:
            theirs.unlink(missing_ok=True)
            other.send_signal(signal.SIGKILL)


LOUD = """
import os, sys
print("at import")
def reward(prompt, completion):
    print("scored \\x1b[2J")
    print("complained", file=sys.stderr)
    os.write(2, b"from a library\\n")
    return 1.0
"""


def test_prints_of_a_reward_go_to_its_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(LOUD)
    pool = RewardPool([f"{tmp_path / 'mine.py'}:reward"], log_path=tmp_path / "logs" / "rewards.log")
    try:
        asyncio.run(pool.score([(prompt(), "x")]))
    finally:
        pool.close()
    assert capfd.readouterr() == ("", "")
    text = (tmp_path / "logs" / "rewards.log").read_text()
    assert all(part in text for part in ("at import", "scored", "complained", "from a library"))


def test_prints_of_a_reward_that_is_tried_before_the_run_go_to_the_log_of_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tree = {
        "model": {"name": str(make_model(tmp_path / "model"))},
        "data": {"path": str(tmp_path / "data")},
        "eval": {"limit": 0},
        "reward": {"functions": [f"{tmp_path / 'mine.py'}:reward"]},
    }
    write_data(tmp_path / "data", 4)
    (tmp_path / "mine.py").write_text(LOUD)
    configure_logging()
    plan_run(TrainConfig.model_validate(tree), RunDir(tmp_path / "run"))
    with run_log(tmp_path / "skylite.log"):
        pass
    terminal, text = "".join(capfd.readouterr()), (tmp_path / "skylite.log").read_text()
    for part in ("at import", "scored  [2J", "complained", "from a library"):
        assert f"printed: {part}" in text
        assert part not in terminal
    assert "\x1b" not in terminal + text
