"""Tests mutants in a copy of the repository. Each gets a fork of this process, which has imported torch.

Reads one job a line: {"path", "source", "tests", "cpu_s"}. Answers one line: [outcome, CPU seconds, words].
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

MAX_FILE_BYTES = 1 << 30
"""A mutant may write for ever."""
MAX_MEMORY_BYTES = 32 << 30
WAIT_FACTOR = 20
"""Seconds that the tests may take for each second of CPU time that they may use."""
PYTEST = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "--basetemp"]


def run_tests(copy: Path, tests: Sequence[str], cpu_s: int) -> tuple[str, float, str]:
    """Run the test files in a fork, to the first failure: "killed", "timeout" or "survived".

    The limit counts CPU time, which a busy machine does not change. WAIT_FACTOR bounds what only waits.
    """
    log, started = copy.parent / f"{copy.name}.log", time.monotonic()
    child = os.fork()
    if child == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code: int = 3
        try:
            code = pytest.main([*PYTEST, str(copy.parent / f"{copy.name}-tmp"), *tests])
        finally:
            sys.stdout.flush()
            os._exit(code)
    found = _wait(child, started + WAIT_FACTOR * cpu_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the tests left
    status, used_s = found or os.wait4(child, 0)[1:]
    seconds = used_s.ru_utime + used_s.ru_stime
    if found is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)):
        return "timeout", seconds, ""
    return "survived" if status == 0 else "killed", seconds, _first_failure(log)


def _wait(child: int, deadline: float) -> tuple[int, resource.struct_rusage] | None:
    """Exit status and resources; None after the deadline."""
    while time.monotonic() < deadline:
        pid, status, used = os.wait4(child, os.WNOHANG)
        if pid:
            return status, used
        time.sleep(0.01)
    return None


def _first_failure(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in lines if line.startswith(("FAILED", "ERROR"))), "")[:300]


def test_mutant(copy: Path, job: dict[str, Any]) -> tuple[str, float, str]:
    """Put the mutant into the copy, run the tests, and put the original back."""
    path = copy / job["path"]
    original = path.read_bytes()
    path.write_text(job["source"], encoding="utf-8")
    _remove_compiled(path)
    try:
        return run_tests(copy, job["tests"], job["cpu_s"])
    finally:
        path.write_bytes(original)
        _remove_compiled(path)


def _remove_compiled(path: Path) -> None:
    """Python compares only size and second of the source, so it could run another mutant's."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def main() -> None:
    copy = Path.cwd()
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(test_mutant(copy, json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
