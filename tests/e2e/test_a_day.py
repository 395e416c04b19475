"""A day in a user's hands: own data, an R1-style reward, two kinds of stop, a logger, report and export.

The fake engine samples. test_finished_run.py stops a run with vLLM by Ctrl-C.

Run `pytest -s` to see how long each part takes. With wandb installed the run is logged by the real library,
offline; otherwise a stand-in takes its place, and pytest's summary says so.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from skylite.rollout.session import read_events
from skylite.run.checkpoint_folder import verify_checkpoint
from skylite.run.run_dir import RunDir
from tests.e2e.project import COMMAND, SETTINGS, descendants
from tests.e2e.running import DEADLINE_S, wait_gone

pytestmark = [pytest.mark.e2e, pytest.mark.dist]
STEPS = 10
REWARD = '''
import re

def r1(completion, answer):
    """0.2 for the tags, 1.0 for the right answer in them; a random model earns a little for letters."""
    found = re.search(r"<think>.*</think>\\s*<answer>(.*)</answer>", completion, re.DOTALL)
    if found is None:
        return 0.01 * sum(c.isalpha() for c in completion) / max(1, len(completion))
    return 0.2 + (1.0 if found[1].strip() == answer else 0.0)
'''
WANDB = """
import json, os
from pathlib import Path

class Settings:
    def __init__(self, **_): pass

class Table:
    def __init__(self, columns, data): pass

class Run:
    def __init__(self, folder):
        folder.mkdir(parents=True)
        self.file = (folder / "run.jsonl").open("a")
        os.symlink("/nonexistent/core-debug.log", folder / "debug-core.log")
    def define_metric(self, *_, **__): pass
    def log(self, values):
        self.file.write(json.dumps({k: v for k, v in values.items() if k != "samples"}) + "\\n")
        self.file.flush()
    def finish(self): self.file.close()

def init(dir, **_):
    return Run(Path(dir) / "wandb" / f"offline-run-{os.getpid()}")
"""


class Day:
    """The project, and a clock for its parts."""

    def __init__(self, root: Path, env: dict[str, str]) -> None:
        self.root, self.env, self.run = root, env, RunDir(root / "mine")
        self.minutes: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.minutes[name] = (time.monotonic() - started) / 60
        print(f"{name}: {self.minutes[name]:.2f} min", flush=True)

    def skylite(self, *words: str) -> str:
        """Run it to its end."""
        done = subprocess.run(
            [*COMMAND, *words], cwd=self.root, env=self.env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            words,
            cwd=self.root,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def lines(self) -> list[str]:
        path = self.run.metrics_path
        return path.read_text().splitlines() if path.exists() else []

    def phase(self) -> str:
        return str(json.loads(self.run.status_path.read_text())["phase"])

    def interrupt(
        self, words: tuple[str, ...], more: int, stop: Callable[[subprocess.Popen[str]], None]
    ) -> tuple[int, str]:
        """Start, let `more` steps be recorded, and stop in the middle of the next. Nothing may be lost."""
        before, deadline = self.lines(), time.monotonic() + DEADLINE_S
        process = self.start(*words)
        try:
            while len(self.lines()) < len(before) + more or not self.is_in_step():
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < deadline, "the steps did not come"
                time.sleep(0.02)
            below, recorded = descendants(process.pid), self.lines()
            stop(process)
            output, _ = process.communicate(timeout=120)
            assert wait_gone(below) == []
        finally:
            process.kill()
        assert "Traceback" not in output, output
        assert recorded[: len(before)] == before, "an earlier step changed"
        after = self.lines()
        assert after[: len(recorded)] == recorded
        for line in after:
            verify_if_kept(self.run, json.loads(line)["step"], newest=len(after))
        return process.returncode, output

    def is_in_step(self) -> bool:
        """Whether the newest event is of a step under way: the trainer has its rollouts."""
        events = read_events(self.run.events_path)
        return bool(events) and events[-1]["event"] == "rollouts_written"


def verify_if_kept(run: RunDir, step: int, newest: int) -> None:
    """The newest steps have an intact checkpoint (checkpoint.keep_last is 2)."""
    if step > newest - 2:
        assert verify_checkpoint(run.checkpoint_path(step)).step == step


def hashes(run: RunDir) -> dict[str, str]:
    """Of each step's completions."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in run.stored_rollouts().values()}


@pytest.fixture
def day(tmp_path: Path, fake_engine: None) -> Day:
    env = dict(os.environ)
    if importlib.util.find_spec("wandb") is None:
        warnings.warn("wandb is not installed: a stand-in took the log", stacklevel=1)
        (tmp_path / "stand_in").mkdir()
        (tmp_path / "stand_in" / "wandb.py").write_text(WANDB)
        env["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(tmp_path / "stand_in"), env.get("PYTHONPATH", "")])
        )
    root = tmp_path / "project"
    root.mkdir()
    return Day(root, env)


def write_project(root: Path) -> None:
    rows = [{"question": f"What is {i} plus {k}?", "answer": str(i + k)} for i in range(12) for k in range(8)]
    (root / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "reward.py").write_text(REWARD)


def test_nothing_is_lost_on_a_day_with_stops(day: Day, tiny_llama: Path) -> None:
    write_project(day.root)
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    train = ("--model", str(tiny_llama), "--data", "data", "--run", "mine", "--steps", str(STEPS))
    logged = ("--log", "wandb", "--set", "log.offline=true", "--set", "eval.limit=0", "--lr", "1e-3")
    fake = ("--set", "sync.rollout_mismatch=warn")  # the fake engine makes its logprobs up
    resume = ("train", "--resume", "mine")
    with day.part("prepare"):
        day.skylite(
            *("prepare", "sums.jsonl", "--question", "question", "--answer", "answer"),
            *("--reward", "reward.py:r1", "--out", "data"),
        )
    with day.part("train, TERM by timeout"):
        words = (*COMMAND, "train", *train, *settings, *logged, *fake, "--rank", "8", "--group-size", "4")
        stopped: list[float] = []

        def stop(process: subprocess.Popen[str]) -> None:
            stopped.append(time.monotonic())
            os.kill(process.pid, signal.SIGTERM)

        code, output = day.interrupt(("timeout", "600", *words), 1, stop)
        assert (code, day.phase()) == (130, "stopped"), output
        finished = [e for e in read_events(day.run.events_path) if e["monotonic"] > stopped[0]]
        assert "adapter_verified" in [e["event"] for e in finished], "the step in flight was finished"
        rollouts = hashes(day.run)
    with day.part("resume, kill -9"):
        code, output = day.interrupt((*COMMAND, *resume), 1, lambda process: process.kill())
        assert code == -signal.SIGKILL
        assert json.loads(day.skylite("runs", ".", "--json"))[0]["phase"] == "dead"
        assert rollouts.items() <= hashes(day.run).items(), "no completions were sampled twice"
        rollouts = hashes(day.run)
    with day.part("resume to the end"):
        day.skylite(*resume)
        assert day.phase() == "done"
        assert [json.loads(line)["step"] for line in day.lines()] == list(range(1, STEPS + 1))
        assert rollouts.items() <= hashes(day.run).items()
    with day.part("logger, report, export"):
        check_log(day)
        day.skylite("report", "mine")
        day.skylite("export", "mine", "--out", "exported")
        assert any(day.root.rglob("*.html"))
        assert (day.root / "exported" / "adapter_model.safetensors").stat().st_size > 0
    print(f"the day: {sum(day.minutes.values()):.1f} min", flush=True)


def check_log(day: Day) -> None:
    """Each start has a run of its own in the logger's folder, and each step was logged."""
    journal = [json.loads(line) for line in (day.run.loggers / "wandb.jsonl").read_text().splitlines()]
    logged: set[Any] = {entry["step"] for entry in journal if "step" in entry}
    assert logged >= set(range(1, STEPS + 1)), journal
    assert list(day.run.loggers.rglob("offline-run-*"))
