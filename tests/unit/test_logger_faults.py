"""A logger that raises, hangs, is killed or fills the disk leaves its run alone, and is reported once."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from skylite.cli.log import log
from skylite.config.loading import read_run_config
from skylite.errors import RunFailed
from skylite.loggers import logger_processes, writers
from skylite.rollout import run_session
from skylite.rollout.plan import RunPlan
from skylite.rollout.run_session import loggers_running
from skylite.rollout.shutdown import StopRequest
from skylite.run.run_dir import RunDir
from tests.logs import logged_messages
from tests.unit.logger_cases import logged_run, set_metrics

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
FAKE_SWANLAB = """
class Text:
    def __init__(self, *texts, **settings): pass
def init(**settings): pass
def log(values, step):
    if "reward/mean" in values: print(step, file=open({log!r}, "a"), flush=True)
def finish(): print("finished", file=open({log!r}, "a"))
"""


def run_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, to: Sequence[str] = ("wandb",)
) -> RunDir:
    """A run that logs to a wandb with this fault in its `log`, and to a swanlab without one."""
    packages = tmp_path / "packages"
    wandb = FAKE_WANDB.format(log=str(tmp_path / "got"), fault=fault)
    for name, code in (("wandb", wandb), ("swanlab", FAKE_SWANLAB.format(log=str(tmp_path / "other")))):
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{packages}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return logged_run(tmp_path / "run", [0.1, 0.2], to=list(to))


def follow(
    run: RunDir, wait_for: Path | None, *, grace_s: float = 20.0, go_on: Callable[[], None] = lambda: None
) -> tuple[list[str], float]:
    """Warnings of a run whose loggers follow it, and how long their end took.

    `go_on`: what the run does after `wait_for` exists.
    """

    async def body() -> float:
        config = read_run_config(run.config_path).config
        config = config.model_copy(update={"stop": config.stop.model_copy(update={"grace_s": grace_s})})
        stop = StopRequest(asyncio.Event())
        plan = cast(RunPlan, SimpleNamespace(run=run, config=config))
        async with loggers_running(plan, stop):
            until = time.monotonic() + 60
            while wait_for is not None and not wait_for.exists() and time.monotonic() < until:
                await asyncio.sleep(0.05)
            go_on()
            await asyncio.sleep(0.5)
            stop.on_signal(2)
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
    monkeypatch.setattr(run_session, "WATCH_S", 0.1)
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


@pytest.mark.parametrize("fault", ["time.sleep(1000)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_second_logger_gets_every_step_beside_one_that_hangs_or_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    run = run_with(tmp_path, monkeypatch, fault, to=("wandb", "swanlab"))
    began = time.monotonic()
    (message,), seconds = follow(
        run, tmp_path / "got", grace_s=8.0, go_on=lambda: set_metrics(run, [0.1, 0.2, 0.3])
    )
    assert "the logger wandb stopped" in message
    assert (tmp_path / "other").read_text().splitlines() == ["1", "2", "3", "finished"]
    assert seconds < 15.0, "the hang costs the time for the stop, no more"
    assert time.monotonic() - began < 60.0, "the run waited for no step of the logger that hangs"


def test_logging_afterwards_says_what_a_logger_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_with(tmp_path, monkeypatch, "pass")
    monkeypatch.setitem(writers.LIBRARIES, "wandb", ())
    log(run.root, "wandb")
    set_metrics(run, [0.1, 0.2, 0.3, 0.4, 0.5])
    log(run.root, "wandb", as_json=True)
    text, facts = capsys.readouterr().out.split("\n", 1)
    assert text == f"wandb has {run.root} up to step 2"
    assert json.loads(facts) == {"run": str(run.root), "last_step": 5, "logged": ["wandb"], "failed": {}}


def test_logging_afterwards_says_as_json_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_with(tmp_path, monkeypatch, "raise ValueError('no quota')")
    monkeypatch.setitem(writers.LIBRARIES, "wandb", ())
    monkeypatch.setitem(writers.LIBRARIES, "swanlab", ())
    with pytest.raises(RunFailed, match=r"Not logged to wandb: it .* ValueError: no quota"):
        log(run.root, "wandb,swanlab", as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert (facts["logged"], list(facts["failed"])) == (["swanlab"], ["wandb"])
    assert "no quota" in facts["failed"]["wandb"]


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
    monkeypatch.setattr(logger_processes, "start", refuse)
    (message,), _ = follow(run, None)
    assert message == (
        "the logger wandb could not be started, and the run continues without it: no more processes"
    )


def test_a_file_of_a_logger_cannot_fill_the_disk(tmp_path: Path) -> None:
    code = (
        "from skylite.loggers.follow import limit_file_size\n"
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
