"""Real signals to a run with a synthetic trainer: it always ends within stop.grace_s."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skylite.config.train import TrainConfig
from skylite.processes.child import ProcessSpec, Supervisor
from skylite.rollout.failures import TRAINER
from skylite.rollout.plan import RunPlan
from skylite.rollout.session import Progress
from skylite.rollout.shutdown import TRAINER_SHARE, handle_signals, run_until_stopped
from skylite.run.run_dir import RunDir
from skylite.ui.dashboard import Screen
from tests.decisions import resolved

GRACE_S = 5.0
OBEYS = "while not pathlib.Path('stop').exists(): time.sleep(0.01)\npathlib.Path('checkpoint').touch()"
IGNORES = "time.sleep(600)"
DEAF = f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{IGNORES}"


def stopped(
    root: Path,
    mode: str,
    trainer: str,
    step_s: float,
    signals: tuple[float, ...],
    number: int = signal.SIGTERM,
) -> tuple[float, int]:
    """Seconds from the last counted signal to the end of everything, and the last step recorded, of a run
    whose second step is under way.

    `signals`: seconds after the start of the step, each `number`.
    """
    run = RunDir(root)
    for folder in (run.trainer_steps, run.logs):
        folder.mkdir()
    run.trainer_step_path(0).touch()
    plan = RunPlan(
        run=run,
        config=TrainConfig.model_validate({"stop": {"mode": mode, "grace_s": GRACE_S}}),
        resolved=resolved(root, root),
        train=[],
        held_out=[],
        rewards=("gsm8k",),
        first_step=1,
    )
    return asyncio.run(_stopped(plan, trainer, step_s, signals, number))


async def _stopped(
    plan: RunPlan, trainer: str, step_s: float, signals: tuple[float, ...], number: int
) -> tuple[float, int]:
    loop, stop = asyncio.get_running_loop(), handle_signals(asyncio.Event())

    async def steps() -> None:
        progress.recorded, progress.step = 1, 2
        for wait_s in signals:
            loop.call_later(wait_s, os.kill, os.getpid(), number)
        await asyncio.sleep(step_s)
        plan.run.checkpoint_path(2).mkdir(parents=True)
        progress.recorded = 2
        progress.begin_step(3)
        await asyncio.Event().wait()

    spec = ProcessSpec(
        name=TRAINER,
        argv=[
            sys.executable,
            "-c",
            f"import os, pathlib, signal, time\nos.chdir({str(plan.run.root)!r})\n{trainer}",
        ],
        env={},
        log_path=plan.run.log_path(TRAINER),
    )
    async with Supervisor(
        stop_timeout_s=GRACE_S * (1 - TRAINER_SHARE), skip_wait=stop.forced.is_set
    ) as supervisor:
        progress = Progress(plan.run, 9, Screen(9), supervisor.pids)
        supervisor.start(spec)
        assert not await run_until_stopped(steps(), plan, supervisor, progress, stop)
    return time.monotonic() - stop.requested_at, progress.recorded


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_of_timeout_counts_once(tmp_path: Path, number: int) -> None:
    """`timeout` sends it to its child, and then to the group with that child."""
    seconds, last = stopped(tmp_path, "finish", OBEYS, 1.0, (0.2, 0.21), number)
    assert last == 2
    assert seconds < 3
    assert (tmp_path / "checkpoint").exists()


def test_ctrl_c_finishes_a_step_that_takes_longer_than_the_grace(tmp_path: Path) -> None:
    """And the trainer has the grace for its checkpoint after the step."""
    slow = OBEYS.replace("\npathlib", "\ntime.sleep(1)\npathlib")
    seconds, last = stopped(tmp_path, "finish", slow, GRACE_S + 1, (0.2,), signal.SIGINT)
    assert last == 2
    assert seconds < GRACE_S
    assert (tmp_path / "checkpoint").exists()


def test_a_second_ctrl_c_abandons_the_step_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seconds, last = stopped(tmp_path, "finish", DEAF, 600, (0.2, 1.0), signal.SIGINT)
    assert last == 1
    assert seconds < 3
    assert [r for r in caplog.records if r.levelno == logging.WARNING and "step 2" in r.message]


def test_a_step_that_begins_after_the_stop_is_no_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, last = stopped(tmp_path, "finish", OBEYS, 1.0, (0.2,), signal.SIGINT)
    assert last == 2
    assert [r.message for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(("mode", "recorded"), [("finish", 2), ("abandon", 1)])
def test_a_signal_finishes_or_abandons_the_step_and_the_trainer_writes_its_checkpoint(
    tmp_path: Path, mode: str, recorded: int
) -> None:
    seconds, last = stopped(tmp_path, mode, OBEYS, step_s=1.0, signals=(0.2,))
    assert last == recorded
    assert seconds < 3
    assert (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("trainer", [IGNORES, DEAF], ids=["hangs", "ignores SIGTERM"])
def test_an_endless_step_or_a_deaf_trainer_is_ended_within_the_grace(tmp_path: Path, trainer: str) -> None:
    seconds, last = stopped(tmp_path, "finish", trainer, step_s=600, signals=(0.2,))
    assert last == 1
    assert seconds < GRACE_S + 2


def test_an_unfinished_step_leaves_the_trainer_time_for_its_checkpoint(
    tmp_path: Path,
) -> None:
    seconds, _ = stopped(tmp_path, "finish", OBEYS, step_s=600, signals=(0.2,))
    assert seconds < GRACE_S
    assert (tmp_path / "checkpoint").exists()


def test_a_second_signal_ends_everything_immediately(tmp_path: Path) -> None:
    seconds, _ = stopped(tmp_path, "finish", DEAF, step_s=600, signals=(0.2, 1.0))
    assert seconds < 2


TERMINAL = """
import asyncio, sys, time
from pathlib import Path
from skylite.rollout.shutdown import handle_signals
from skylite.ui.dashboard import Screen

async def main():
    stop = handle_signals(asyncio.Event())
    with Screen(9) as screen:
        screen.phase("training", "step 1 of 9")
        Path("ready").touch()
        await stop.requested.wait()
        for _ in range(20):
            screen.phase("stopping", "the trainer writes its checkpoint")
            print("still here", flush=True)
            await asyncio.sleep(0.05)
    print("the end", flush=True)
    Path("ended").touch()

asyncio.run(main())
"""


def test_a_lost_terminal_is_a_stop_and_no_error(tmp_path: Path) -> None:
    """As when ssh is lost: the terminal is gone, each write to it fails, and SIGHUP comes."""
    master, terminal = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n{TERMINAL}"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=tmp_path,
        start_new_session=True,
    )
    os.close(terminal)
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)  # the screen is drawn
    os.close(master)
    assert process.wait(60) == 0
    assert (tmp_path / "ended").exists()
