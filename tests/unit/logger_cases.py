"""Runs with metrics and completions for tests of the loggers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from skylite.config.loading import read_run_config
from skylite.loggers.follow import Follower, open_journal
from skylite.loggers.writers import LoggedSample, LoggerRun, Writer
from skylite.run.rollout_file import write_rollouts
from skylite.run.run_dir import RunDir
from skylite.types import Call, Group, Message, Prompt, Trajectory
from tests.small_run import make_run, settings


def logged_run(root: Path, rewards: Sequence[float], **log: Any) -> RunDir:
    """A run with one finished step for each reward."""
    config = settings(log={"project": "tests", "offline": True, **log}, eval={"limit": 4})
    run = make_run(root, root / "model", config, {})
    set_metrics(run, rewards)
    return run


def set_metrics(run: RunDir, rewards: Sequence[float], seconds: float = 1.0) -> None:
    """Write metrics.jsonl and the rollouts again. A resume replaces the file, too."""
    lines = [
        {"step": k, "reward/mean": reward, "time/step_s": seconds, "kl": None, "anomaly/reason": "text"}
        for k, reward in enumerate(rewards, 1)
    ]
    fresh = run.root / "fresh"
    fresh.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fresh.rename(run.metrics_path)
    for step, reward in enumerate(rewards, 1):
        write_rollouts(run.rollout_path(step), [group(name, step, reward) for name in "ab"])


def group(name: str, step: int, reward: float) -> Group:
    sample = Call(
        prompt_token_ids=[1], completion_token_ids=[2], sampling_logprobs=[-1.0], text=f"<b>{name}{step}</b>"
    )
    prompt = Prompt(id=name, messages=[Message(role="user", content=f"Why {name}?")], answer="42", source="")
    return Group(prompt=prompt, trajectories=(Trajectory(calls=(sample,), reward=reward),) * 2)


def set_accuracy(run: RunDir, version: int, accuracy: float) -> None:
    """The run's own held-out result of a version."""
    run.evals.mkdir(exist_ok=True)
    body = {"version": version, "split": "test", "limit": 4, "mean": accuracy}
    (run.evals / f"step-v{version:06d}.json").write_text(json.dumps(body))


class MemoryWriter(Writer):
    """Remembers what it gets."""

    calls: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, run: LoggerRun) -> None:
        self.run = run
        self.calls.append(("open", run.name, run.last_step))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.calls.append(("log", step, dict(values)))

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        self.calls.append(("samples", step, [s.completion for s in samples]))

    def close(self) -> None:
        self.calls.append(("close",))


def follower(run: RunDir, writer: type[Writer], name: str = "memory") -> Follower:
    """A logger as a new process has it. Close its journal's lock before the next."""
    journal = open_journal(run.loggers / f"{name}.jsonl")
    assert journal is not None
    return Follower(run, read_run_config(run.config_path), journal, writer)


def log_once(run: RunDir, writer: type[Writer], name: str = "memory") -> None:
    """One life of a logger's process."""
    one = follower(run, writer, name)
    one.catch_up()
    one.close()
    one.journal.lock.close()
