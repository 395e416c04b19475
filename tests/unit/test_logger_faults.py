"""A logger that raises, hangs, is killed or fills the disk leaves its run alone, and is reported once."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from skylite.config.loading import read_run_config
from skylite.errors import RunFailed
from skylite.loggers import processes
from skylite.orchestrator import run_loggers
from skylite.orchestrator.plan import RunPlan
from skylite.orchestrator.run_loggers import loggers_running
from skylite.orchestrator.shutdown import StopRequest
from skylite.run.run_dir import RunDir
from tests.logs import logged_messages
from tests.unit.logger_cases import logged_run

FAKE_WANDB = """
import errno, os, signal, sys, time
class Settings:
    def __init__(self, **settings): pass
class Table(Settings): pass
class Run:
    def define_metric(self, *args, **settings): pass
    def log(self, values):
        print(values, file=open({log!r}, "a"), flush=True)
        {fault}
    def finish(self): print("finished", file=open({log!r}, "a"))
def init(**settings): return Run()
"""


def run_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> RunDir:
    """A run that logs to a wandb with this fault in its `log`."""
    package = tmp_path / "packages" / "wandb"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE_WANDB.format(log=str(tmp_path / "got"), fault=fault))
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return logged_run(tmp_path / "run", [0.1, 0.2], to=["wandb"])


def follow(run: RunDir, wait_for: Path | None, *, grace_s: float = 20.0) -> tuple[list[str], float]:
    """Warnings of a run whose loggers follow it, and how long their end took."""

    async def body() -> float:
        config = read_run_config(run.config_path).config
        config = config.model_copy(update={"stop": config.stop.model_copy(update={"grace_s": grace_s})})
        stop = StopRequest(asyncio.Event())
        plan = cast(RunPlan, SimpleNamespace(run=run, config=config))
        async with loggers_running(plan, stop):
            until = time.monotonic() + 60
            while wait_for is not None and not wait_for.exists() and time.monotonic() < until:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            stop.on_signal()
            ending = time.monotonic()
        return time.monotonic() - ending

    with logged_messages() as messages:
        seconds = asyncio.run(body())
    return [m for m in messages if "logger" in m], seconds


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raise ValueError('no quota')", "it ended with exit code 1: ValueError: no quota"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "it was killed by SIGKILL"),
        ("sys.exit(3)", "it ended with exit code 1: SystemExit: 3"),
        ("raise OSError(errno.ENOSPC, 'No space left on device')", "No space left on device"),
    ],
)
def test_a_failure_is_reported_once_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str
) -> None:
    monkeypatch.setattr(run_loggers, "WATCH_S", 0.1)
    run = run_with(tmp_path, monkeypatch, fault)
    (message,), _ = follow(run, tmp_path / "got")
    assert message.startswith("the logger wandb stopped, and the run continues without it: ")
    assert reason in message
    assert f"`skylite log {run.root} --to wandb` logs what it missed" in message


def test_a_hang_ends_with_the_time_for_the_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with(tmp_path, monkeypatch, "time.sleep(1000)")
    (message,), seconds = follow(run, tmp_path / "got", grace_s=2.0)
    assert "it did not end in time" in message
    assert 1.0 < seconds < 15.0
    assert not [p for p in Path("/proc").glob("[0-9]*") if str(run.root) in command_line(p)]


def test_a_healthy_logger_gets_the_rest_and_finishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with(tmp_path, monkeypatch, "pass")
    messages, _ = follow(run, None)  # SIGTERM comes before it has logged anything
    assert messages == []
    lines = (tmp_path / "got").read_text().splitlines()
    assert [line[:10] for line in lines if "reward" in line] == ["{'step': 1", "{'step': 2"]
    assert lines[-1] == "finished"


def test_a_logger_that_cannot_start_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RunFailed("no more processes")

    run = run_with(tmp_path, monkeypatch, "pass")
    monkeypatch.setattr(processes, "start", refuse)
    (message,), _ = follow(run, None)
    assert message == (
        "the logger wandb could not be started, and the run continues without it: no more processes"
    )


def test_a_file_of_a_logger_cannot_fill_the_disk(tmp_path: Path) -> None:
    code = (
        "from skylite.loggers.worker import limit_file_size\n"
        "limit_file_size(1000)\n"
        f"file = open({str(tmp_path / 'big')!r}, 'wb', buffering=0)\n"
        "try:\n    while True: file.write(b'x' * 600)\n"
        "except OSError as error: print(error.strerror)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, (tmp_path / "big").stat().st_size) == ("File too large\n", 1000)


def command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
