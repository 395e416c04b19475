"""The processes of an engine on several GPUs: its workers die with it, and leave no shared memory.

A program stands for vLLM: a server starts an engine core, which loads our plugin, makes a queue in shared
memory and forks workers, as vLLM 0.32 does with tensor parallelism (MultiprocExecutor).
"""

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

from skylite.engine.vllm.plugin.processes import SWITCH
from skylite.processes.child import Child, ProcessSpec, kill, poll, start
from skylite.processes.reaper import shared_memory_prefix
from tests.alive import is_alive

ENGINE = """
import multiprocessing, os, sys, time
from multiprocessing import shared_memory

def worker(folder):
    response = shared_memory.SharedMemory(create=True, size=1 << 20)
    report(folder, "worker", response.name)
    time.sleep(600)

def core(folder):
    from skylite.engine.vllm.plugin import register
    register()
    queue = shared_memory.SharedMemory(create=True, size=1 << 20)
    lock = multiprocessing.get_context("spawn").Lock()
    for _ in range(2):
        multiprocessing.get_context("fork").Process(target=worker, args=(folder,), daemon=True).start()
    report(folder, "core", queue.name)
    time.sleep(600)

def report(folder, role, name):
    path = f"{folder}/{role}-{os.getpid()}"
    with open(path + ".tmp", "w") as file:
        file.write(name)
    os.rename(path + ".tmp", path)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=core, args=(sys.argv[1],))
    process.start()
    process.join()
    time.sleep(float(sys.argv[2]))
"""
FILES = ["core-*", "worker-*"]


@pytest.fixture
def program(tmp_path: Path) -> Iterator[tuple[list[str], Path]]:
    (tmp_path / "engine.py").write_text(ENGINE, encoding="utf-8")
    folder = tmp_path / "reports"
    folder.mkdir()
    yield [sys.executable, str(tmp_path / "engine.py"), str(folder)], folder
    for path in folder.iterdir():
        (Path("/dev/shm") / path.read_text()).unlink(missing_ok=True)


def reports(folder: Path) -> tuple[list[psutil.Process], list[Path]]:
    """The core and its two workers, and their files in shared memory, as soon as all run."""
    deadline = time.monotonic() + 30
    while len(paths := [p for pattern in FILES for p in folder.glob(pattern) if p.suffix != ".tmp"]) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    processes = [psutil.Process(int(path.name.rpartition("-")[2])) for path in paths]
    return processes, [Path("/dev/shm") / path.read_text() for path in paths]


def wait_until_dead(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + 20
    while any(map(is_alive, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def engine(argv: list[str], tmp_path: Path) -> Child:
    return start(
        ProcessSpec(name="engine-0", argv=[*argv, "600"], env={SWITCH: "1"}, log_path=tmp_path / "log")
    )


def test_forked_workers_die_with_the_engine_core(program: tuple[list[str], Path]) -> None:
    """Without a reaper: the kernel kills them, because the plugin asks for it in every fork."""
    argv, folder = program
    with subprocess.Popen([*argv, "600"], env=os.environ | {SWITCH: "1"}) as server:
        try:
            (core, *workers), _ = reports(folder)
            core.send_signal(signal.SIGKILL)
            wait_until_dead([core, *workers])
            assert server.poll() is None
        finally:
            server.kill()


@pytest.mark.parametrize("victim", ["engine", "reaper", "core"])
def test_nothing_of_a_killed_engine_stays(
    program: tuple[list[str], Path], tmp_path: Path, victim: str
) -> None:
    argv, folder = program
    child = engine(argv, tmp_path)
    try:
        processes, shared = reports(folder)
        assert all(path.name.startswith(shared_memory_prefix(child.mark)) for path in shared)
        assert all(path.exists() for path in shared)
        assert [*Path("/dev/shm").glob(f"sem.{shared_memory_prefix(child.mark)}*")]
        if victim == "reaper":
            child.process.kill()
        elif victim == "core":
            processes[0].kill()
            wait_until_dead(processes)
    finally:
        kill(child)
    assert poll(child) is not None
    wait_until_dead(processes)
    assert not [path for path in shared if path.exists()]
    assert not [*Path("/dev/shm").glob(f"sem.{shared_memory_prefix(child.mark)}*")]
