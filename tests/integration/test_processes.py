"""Real process trees: a kill leaves no process behind, and the error names what happened."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from skylite.errors import ChildDied
from skylite.processes.child import Child, ProcessSpec, Supervisor, kill, log_tail, poll, start

TREE = """
import os, subprocess, sys, time
# One grandchild in our session, one in a new session, and one that its parent leaves behind immediately.
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
pids = [os.getpid(), subprocess.Popen(sleep).pid, subprocess.Popen(sleep, start_new_session=True).pid]
orphan = "import subprocess,sys; print(subprocess.Popen(sys.argv[1:], stdout=-3, start_new_session=True).pid)"
pids.append(int(subprocess.run([sys.executable, "-S", "-c", orphan, *sleep], stdout=-1, text=True).stdout))
open(sys.argv[1] + ".tmp", "w").write(" ".join(map(str, pids)))
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
time.sleep(600)
"""
RANKS = """
import os, subprocess, sys, time
# As vLLM's core: a child in our group. As torchrun's rank: one in a new session that has the kernel
# watch us.
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
rank = "import os, time; from skylite.processes.reaper import *; "
rank += "die_with_parent(int(os.environ[COMMAND_PID])); "
rank += "print(1, flush=True); time.sleep(600)"
last = subprocess.Popen([sys.executable, "-c", rank], start_new_session=True, stdout=-1)
last.stdout.readline()
open(sys.argv[1] + ".tmp", "w").write(f"{os.getpid()} {subprocess.Popen(sleep).pid} {last.pid} {last.pid}")
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
time.sleep(600)
"""
STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").write("ready")
time.sleep(600)
"""
PARENT = """
import sys, time
from pathlib import Path
from skylite.processes.child import ProcessSpec, start
folder = Path(sys.argv[1])
argv = [sys.executable, "-c", sys.argv[2], str(folder / "pids")]
child = start(ProcessSpec(name="tree", argv=argv, env={}, log_path=folder / "tree.log"))
(folder / "reaper").write_text(str(child.pid))
time.sleep(600)
"""


def spec(folder: Path, code: str, *arguments: str, name: str = "child") -> ProcessSpec:
    return ProcessSpec(
        name=name, argv=[sys.executable, "-c", code, *arguments], env={}, log_path=folder / f"{name}.log"
    )


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {seconds} s still not: {what}"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """A zombie that nobody has collected yet does not count."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def tree_pids(folder: Path) -> list[int]:
    wait_until((folder / "pids").exists, "the tree is up")
    pids = [int(p) for p in (folder / "pids").read_text().split()]
    assert len(pids) == 4
    assert all(is_running(p) for p in pids)
    return pids


def start_tree(folder: Path) -> tuple[Child, list[int]]:
    child = start(spec(folder, TREE, str(folder / "pids")))
    return child, tree_pids(folder)


def assert_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(is_running(p) for p in pids), f"{pids} are gone", seconds=5.0)


def test_killing_the_command_ends_its_tree_and_is_reported(tmp_path: Path) -> None:
    child, pids = start_tree(tmp_path)
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: poll(child) is not None, "the end is noticed")
    assert poll(child) == -signal.SIGKILL
    assert_gone([*pids, child.pid])


def test_killing_the_reaper_ends_the_tree(tmp_path: Path) -> None:
    child, pids = start_tree(tmp_path)
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: poll(child) is not None, "the end is noticed")
    assert_gone(pids)


def test_killing_the_parent_ends_the_tree_even_if_forked_workers_live(tmp_path: Path) -> None:
    """A forked worker inherits our descriptors; the reaper's pipe must not be among them."""
    fork_first = PARENT.replace(
        "time.sleep(600)",
        "import os\nworker = os.fork()\n"
        "worker and (folder / 'worker').write_text(str(worker))\ntime.sleep(600)",
    )
    parent = subprocess.Popen([sys.executable, "-c", fork_first, str(tmp_path), TREE])
    pids = tree_pids(tmp_path)
    wait_until((tmp_path / "worker").exists, "the worker is forked")
    parent.kill()
    parent.wait()
    try:
        assert_gone(pids)
    finally:
        os.kill(int((tmp_path / "worker").read_text()), signal.SIGKILL)


@pytest.mark.parametrize("deaths", ["reaper parent", "parent reaper", "stopped-reaper parent"])
def test_the_tree_ends_with_the_parent_even_if_the_reaper_cannot_act(tmp_path: Path, deaths: str) -> None:
    """Both killed in one instant, or the reaper stopped before: the kernel ends the command's group, and that
    the ranks.
    """
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), RANKS])
    pids = tree_pids(tmp_path)
    processes = {"parent": parent.pid, "reaper": int((tmp_path / "reaper").read_text())}
    for pid in processes.values():
        os.kill(pid, signal.SIGSTOP)  # so that neither can react to the other's death
    for name in deaths.split():
        if name in processes:
            os.kill(processes[name], signal.SIGKILL)
    parent.wait()
    assert_gone(pids)
    assert_gone([processes["reaper"]])


def test_kill_returns_even_if_the_reaper_is_stopped(tmp_path: Path) -> None:
    child, pids = start_tree(tmp_path)
    os.kill(child.pid, signal.SIGSTOP)
    kill(child)
    assert_gone([*pids, child.pid])


@pytest.mark.parametrize(
    ("code", "ending", "tail"),
    [
        ("print('first'); print('the reason'); raise SystemExit(3)", "ended with exit code 3", "the reason"),
        ("raise ValueError('bad value')", "ended with exit code 1", "ValueError: bad value"),
        (
            "import os; print('last words', flush=True); os.kill(os.getpid(), 11)",
            "was killed by SIGSEGV",
            "last words",
        ),
        (
            "import os; print('last words', flush=True); os.kill(os.getpid(), 9)",
            "was killed by SIGKILL",
            "last words",
        ),
        ("print('all done')", "ended with exit code 0", "all done"),
    ],
)
def test_watch_reports_how_a_child_ended_with_its_last_lines(
    tmp_path: Path, code: str, ending: str, tail: str
) -> None:
    async def run() -> None:
        async with Supervisor() as supervisor:
            supervisor.start(spec(tmp_path, "import time; time.sleep(600)", name="other"))
            supervisor.start(spec(tmp_path, code, name="trainer"))
            await asyncio.wait_for(supervisor.watch(), 15)

    with pytest.raises(ChildDied) as caught:
        asyncio.run(run())
    assert re.search(rf"trainer {ending}[.:]", str(caught.value))
    assert str(tmp_path / "trainer.log") in str(caught.value)
    assert caught.value.log_tail.splitlines()[-1] == tail


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    child = start(ProcessSpec(name="x", argv=["/nowhere/program"], env={}, log_path=tmp_path / "x.log"))
    wait_until(lambda: poll(child) is not None, "it ends")
    assert poll(child) == 127
    assert log_tail(tmp_path / "x.log", 5) == "/nowhere/program cannot be started: No such file or directory"


def test_stop_is_quick_and_kills_a_child_that_ignores_sigterm(tmp_path: Path) -> None:
    supervisor = Supervisor()
    stubborn = supervisor.start(spec(tmp_path, STUBBORN, str(tmp_path / "ready"), name="stubborn"))
    tree = supervisor.start(spec(tmp_path, TREE, str(tmp_path / "pids"), name="tree"))
    pids = tree_pids(tmp_path)
    wait_until((tmp_path / "ready").exists, "SIGTERM is ignored")
    began = time.monotonic()
    supervisor.stop(timeout_s=1.0)
    assert time.monotonic() - began < 3.0
    assert poll(stubborn) == 1, "the reaper ends with 1 when it had to kill"
    assert_gone([*pids, stubborn.pid, tree.pid])


def test_sigterm_reaches_the_command_which_can_clean_up(tmp_path: Path) -> None:
    code = (
        "import pathlib, signal, sys, time\n"
        "def end(*_): pathlib.Path(sys.argv[1]).write_text('kept'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); print('up', flush=True); time.sleep(600)\n"
    )
    supervisor = Supervisor()
    child = supervisor.start(spec(tmp_path, code, str(tmp_path / "kept")))
    wait_until(lambda: log_tail(tmp_path / "child.log", 1) == "up", "it is up")
    supervisor.stop(timeout_s=10.0)
    assert (tmp_path / "kept").read_text() == "kept"
    assert poll(child) == 0


def test_a_child_that_exits_with_0_is_not_a_failure(tmp_path: Path) -> None:
    def trainer(flag: Path) -> ProcessSpec:
        return ProcessSpec(
            name="trainer",
            argv=[sys.executable, "-c", "pass"],
            env={},
            log_path=tmp_path / "t.log",
            is_done=flag.exists,
        )

    async def run(flag: Path) -> None:
        async with Supervisor() as supervisor:
            child = supervisor.start(trainer(flag))
            while poll(child) is None:
                await asyncio.sleep(0.01)
            supervisor.check()
            await supervisor.wait_exit("trainer")

    (tmp_path / "last-update").touch()
    asyncio.run(run(tmp_path / "last-update"))
    with pytest.raises(ChildDied, match="trainer ended with exit code 0"):
        asyncio.run(run(tmp_path / "never"))


def test_a_child_gets_our_environment_and_the_specs(tmp_path: Path) -> None:
    code = "import os; print(os.environ['EXTRA'], 'PATH' in os.environ)"
    child = start(
        ProcessSpec(
            name="e", argv=[sys.executable, "-c", code], env={"EXTRA": "7"}, log_path=tmp_path / "e.log"
        )
    )
    wait_until(lambda: poll(child) is not None, "it ends")
    assert log_tail(tmp_path / "e.log", 1) == "7 True"
