"""`skylite watch`: the screen in a real pseudo-terminal with keys, lines elsewhere, live and silent runs."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from skylite.cli.main import app
from skylite.cli.watch import Watcher, is_silent, json_lines, print_lines, text_lines
from skylite.errors import ConfigError
from skylite.run.metrics_file import append_metrics, read_metrics
from skylite.run.own_folders import lock_folder
from skylite.run.run_dir import RunDir
from skylite.run.status import read_status, write_status
from skylite.ui.live_panel import LivePanel, clock_time
from tests.made_up_runs import write_made_up_run

TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def hacked(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return write_made_up_run(tmp_path_factory.mktemp("watch"), "hacked")


def drawn(watcher: Watcher, width: int = 100, height: int = 40, *, has_keys: bool = True) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(LivePanel(watcher.state(has_keys=has_keys), fills_screen=True))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def lines_of(watcher: Watcher, sleeps: int = 0) -> list[str]:
    """What is printed until the run ends; fails after more than `sleeps` waits."""
    printed: list[str] = []
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        assert len(waits) <= sleeps, printed[-1]

    print_lines(watcher, text_lines, printed.append, sleep)
    return printed


def test_the_screen_shows_curves_findings_and_a_completion(hacked: RunDir) -> None:
    text = drawn(Watcher(hacked.root))
    for part in (
        "done", "40 of 40 steps", "! Held-out accuracy fell from 50.0 %", "reward", "10.0 %  first 50.0 %",
        "held-out", "entropy", "mismatch", "length", "truncated", "no signal", "99 tokens/s", "2.0 GiB",
        "sample 60 %", "v40", "step 40, as stored: 1 of 64", "q quit",
    ):  # fmt: skip
        assert part in text, f"{part!r} is missing in\n{text}"
    assert "KL" not in text  # not measured


def test_keys_page_through_completions(hacked: RunDir) -> None:
    watcher = Watcher(hacked.root)
    assert watcher.press("right")
    assert "as stored: 2 of 64" in drawn(watcher)
    assert watcher.press("b")
    assert "best first: 1 of 64" in drawn(watcher)
    assert "reward 1," in drawn(watcher)
    watcher.press("w")
    watcher.press("left")
    assert "worst first: 64 of 64" in drawn(watcher)
    for _ in range(3):
        watcher.press("down")
    assert "step 37," in drawn(watcher)
    for _ in range(99):
        watcher.press("down")
    assert "step 1," in drawn(watcher)
    watcher.press("n")
    assert "step 40, worst first: 1 of" in drawn(watcher)
    assert not watcher.press("q")


def test_lines_of_a_finished_run(hacked: RunDir) -> None:
    printed = lines_of(Watcher(hacked.root))
    assert len(printed) == 5 + 40 + 1 + 1
    assert printed[5].startswith("step 1/40  reward ")
    assert printed[-2].startswith("alarm: Held-out accuracy fell")
    assert printed[-1].startswith("done  ")


def test_json_lines_are_the_metrics_of_each_step_and_the_end(hacked: RunDir) -> None:
    reply = CliRunner().invoke(app, ["watch", str(hacked.root), "--json"])
    *steps, end = map(json.loads, reply.output.splitlines())
    assert steps == read_metrics(hacked.metrics_path)
    assert (end["phase"], end["unreadable"]) == ("done", [])
    assert [alarm["kind"] for alarm in end["alarms"]][:1] == ["reward hacking"]


def test_json_lines_follow_a_live_run_and_print_each_step_once(tmp_path: Path) -> None:
    run = write_made_up_run(tmp_path, "healthy", steps=2, phase="sampling")
    alive = replace(read_status(run.status_path), pids={"skylite": os.getpid()})
    write_status(run.status_path, alive)
    printed = list[str]()

    def sleep(seconds: float) -> None:
        append_metrics(run.metrics_path, {"step": len(printed) + 1, "reward/mean": float("nan")})
        write_status(run.status_path, replace(alive, phase="done" if len(printed) == 3 else "training"))

    print_lines(Watcher(run.root), json_lines, printed.append, sleep)
    found = [json.loads(line) for line in printed]
    assert [line.get("step", line.get("phase")) for line in found] == [1, 2, 3, 4, "done"]
    assert found[2] == {"step": 3, "reward/mean": None}


def test_lines_follow_a_live_run(tmp_path: Path) -> None:
    run = write_made_up_run(tmp_path, "healthy", steps=3, phase="sampling")
    alive = replace(read_status(run.status_path), pids={"skylite": os.getpid()})
    write_status(run.status_path, alive)
    watcher, printed = Watcher(run.root), list[str]()

    def sleep(seconds: float) -> None:
        assert "step 4/40" not in printed[-1]
        with run.metrics_path.open("a") as stream:
            stream.write('{"step": 4, "reward/mean": 0.75}\n')
        write_status(run.status_path, replace(alive, phase="failed", error="the disk\x1b[31m is full"))

    assert "step 3 of 40" in drawn(watcher)
    assert "to go" in drawn(watcher)
    print_lines(watcher, text_lines, printed.append, sleep)
    assert [line[:9] for line in printed[1:]] == [
        "step 1/40",
        "step 2/40",
        "step 3/40",
        "step 4/40",
        "failed  t",
    ]
    assert "reward 0.750  right nan %" in printed[4]
    assert "\x1b" not in drawn(watcher, has_keys=False)


def test_a_run_without_a_process_is_silent_after_a_while(hacked: RunDir, tmp_path: Path) -> None:
    facts = Watcher(hacked.root).facts

    def silent(pid: int, minutes: float) -> bool:
        written = (datetime.now(UTC) - timedelta(minutes=minutes)).isoformat()
        status = replace(read_status(hacked.status_path), phase="training", pids={"skylite": pid})
        return is_silent(
            replace(facts, status=replace(status, updated_at=written if minutes else "nonsense"))
        )

    dead = subprocess.Popen(["true"])
    dead.wait()
    assert silent(dead.pid, 11)
    assert not silent(dead.pid, 1)
    assert not silent(os.getpid(), 11)
    assert silent(10**30, 0)
    assert silent(-1, 11)  # never a signal to all processes


def test_a_dead_run_shows_no_spinner_and_no_time_left(tmp_path: Path) -> None:
    run = write_made_up_run(tmp_path, "healthy", steps=3, phase="training")
    dead = subprocess.Popen(["true"])
    dead.wait()

    def screen_after(hours: float, pids: dict[str, int]) -> str:
        written = (datetime.now(UTC) - timedelta(hours=hours)).isoformat()
        status = read_status(run.status_path)
        write_status(run.status_path, replace(status, pids=pids, updated_at=written))
        return drawn(Watcher(run.root), 120)

    gone, here = {"skylite": dead.pid}, {"skylite": os.getpid()}
    for text, words in (
        (
            screen_after(5, gone),
            "✘ dead  step 3 of 40, training; no such process on this machine, last write",
        ),
        (screen_after(5, here), "✘ silent for 5.0 h  step 3 of 40, training"),
        (screen_after(5, {}), "✘ silent for 5.0 h  step 3 of 40, training; no such process"),
        (screen_after(0.1, gone), "✘ no process here  step 3 of 40, training; no such process"),
    ):
        assert words in text
        assert "to go" not in text
    assert "to go" in screen_after(0.1, here)
    with lock_folder(run.root):  # as in another container, whose process ids say nothing here
        assert "to go" in screen_after(0.1, gone)
    screen_after(5, gone)
    assert lines_of(Watcher(run.root))[-1].startswith("dead  step 3 of 40, training")


def test_a_live_run_with_steps_without_a_time_is_shown(tmp_path: Path) -> None:
    run = write_made_up_run(tmp_path, "healthy", steps=3, phase="sampling")
    write_status(run.status_path, replace(read_status(run.status_path), pids={"skylite": os.getpid()}))
    seconds = statistics.fmean(m["time/step_s"] for m in read_metrics(run.metrics_path))
    append_metrics(run.metrics_path, {"step": 4, "reward/mean": 0.75})
    assert f"about {clock_time(36 * seconds)} to go" in drawn(Watcher(run.root))
    run.metrics_path.write_text('{"step": 1, "reward/mean": 0.75}\n')
    assert "to go" not in drawn(Watcher(run.root))


def test_a_run_without_a_status_is_silent_after_a_while(tmp_path: Path) -> None:
    run = write_made_up_run(tmp_path, "healthy", steps=1)
    run.status_path.unlink()
    assert not is_silent(Watcher(run.root).facts)
    os.utime(run.config_path, (0, time.time() - 700))
    printed = lines_of(Watcher(run.root))
    assert printed[-1] == "silent for 11.7 min  status.json is not readable"


def test_damage_is_shown_and_not_raised(hacked: RunDir, tmp_path: Path) -> None:
    run = write_made_up_run(tmp_path, "healthy", steps=4)
    run.metrics_path.write_text("nonsense\n")
    run.rollout_path(4).write_bytes(b"")
    text = drawn(Watcher(run.root), 200)
    assert "line 1 is not JSON" in text
    assert "1 of 64" not in text
    with pytest.raises(ConfigError, match="is not a skylite run"):
        Watcher(tmp_path)


def test_a_real_terminal_with_keys(hacked: RunDir) -> None:
    """The program in a pseudo-terminal: it draws, obeys keys, quits with q and restores the terminal."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    before = termios.tcgetattr(child)
    code = "from skylite.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "watch", str(hacked.root)], stdin=child, stdout=child, stderr=child,
        env={**os.environ, "TERM": "xterm-256color"},
    )  # fmt: skip
    seen = b""

    def wait_for(part: bytes) -> None:
        nonlocal seen
        deadline = time.monotonic() + TIMEOUT_S
        while part not in seen:
            assert time.monotonic() < deadline, seen[-3000:]
            if select.select([parent], [], [], 1.0)[0]:
                seen += os.read(parent, 65536)
        seen = b""

    try:
        wait_for(b"as stored: 1 of 64")
        os.write(parent, b"\x1b[C")
        wait_for(b"as stored: 2 of 64")
        os.write(parent, b"b")
        wait_for(b"best first: 1 of 64")
        os.write(parent, b"\x1b[B")
        wait_for(b"step 39, best first")
        os.write(parent, b"q")
        wait_for(b"\x1b[?1049l")
        assert process.wait(TIMEOUT_S) == 0
        assert termios.tcgetattr(child) == before
    finally:
        process.kill()
        process.wait()
        os.close(parent)
        os.close(child)
