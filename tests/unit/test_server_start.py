"""The fork server that starts vLLM on a CPU: when it is used, and how its processes live and die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from skylite.engine.vllm.plugin import cpu_server as server
from skylite.engine.vllm.plugin import fork_server
from skylite.engine.vllm.plugin.processes import SWITCH
from tests.alive import is_alive

FIT = {SWITCH: "1", "LD_PRELOAD": "/lib/libiomp5.so", "VLLM_CPU_OMP_THREADS_BIND": "0,2"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({SWITCH: "0"}, "did not start it"),
        ({"LD_PRELOAD": "/lib/libgomp.so.1"}, "Intel's OpenMP library is not preloaded"),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, "does not name cores"),
        ({"VLLM_CPU_OMP_THREADS_BIND": "auto"}, "does not name cores"),
    ],
)
def test_an_untested_setup_starts_vllm_without_the_fork_server(
    change: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_version", lambda package: "0.32.0+cpu")
    found = server.why_not_fork(FIT | change)
    assert reason in found
    assert bool(found) == bool(reason)
    monkeypatch.setattr(server, "_version", lambda package: "0.33.1")
    assert "not 0.33.1" in server.why_not_fork(FIT | change)


def test_another_module_named_vllm_is_not_mistaken_for_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert "another package" in server.why_not_fork(FIT)


def test_openmp_settings_for_given_cores() -> None:
    found = server.omp_settings("0,2,5")
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["KMP_AFFINITY"] == "granularity=fine,explicit,proclist=[0,2,5]"


PROGRAM = """
import os, sys, time
import setproctitle
from skylite.engine.vllm.plugin import fork_server
from skylite.engine.vllm.plugin.processes import die_with_starter

def child():
    die_with_starter()
    words = [os.getpid(), os.environ["FIRST"], os.environ["LATER"], "warm" in sys.modules]
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # at once: the starter prints, too
    time.sleep(60)

if __name__ == "__main__":
    fork_server.import_early(["warm", "broken", "missing"])
    fork_server.start_fork_server({"FIRST": "the fork server's"})
    assert "FIRST" not in os.environ
    os.environ["LATER"] = "the starter's"
    process = fork_server.WarmContext().Process(target=child)
    process.start()
    os.write(1, f"{process.pid}\\n".encode())
    process.join()
    print("ended", process.exitcode, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "warm.py").touch()
    (tmp_path / "broken.py").write_text("raise OSError('no such library')\n", encoding="utf-8")
    env = os.environ | {SWITCH: "1", "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py")],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def lines_of(starter: subprocess.Popen[str], count: int) -> list[str]:
    assert starter.stdout is not None
    return [starter.stdout.readline().strip() for _ in range(count)]


def gone(processes: list[psutil.Process]) -> bool:
    deadline = time.monotonic() + 10
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, processes))


def test_a_child_has_the_imports_and_environment_and_dies_with_the_starter(
    starter: subprocess.Popen[str],
) -> None:
    pid, line = sorted(lines_of(starter, 2), key=len)
    assert line == f"{pid} the fork server's the starter's True"
    tree = psutil.Process(starter.pid).children(recursive=True)
    assert int(pid) in [p.pid for p in tree]
    assert fork_server.TITLE in [" ".join(p.cmdline()).rstrip() for p in tree]
    starter.kill()
    _, errors = starter.communicate()
    assert gone(tree)
    assert errors.splitlines() == [
        "skylite: broken cannot be imported early: no such library",
        "skylite: missing cannot be imported early: No module named 'missing'",
    ]


@pytest.mark.parametrize("victim", ["child", "fork server"])
def test_the_starter_notices_a_death(victim: str, starter: subprocess.Popen[str]) -> None:
    pid = int(min(lines_of(starter, 2), key=len))
    child = psutil.Process(pid)
    (child if victim == "child" else child.parent()).send_signal(signal.SIGKILL)
    assert lines_of(starter, 1)[0].startswith("ended")
    assert gone([child])
