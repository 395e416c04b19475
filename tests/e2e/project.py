"""A user's project in a temporary folder (tiny model, data set, reward file), and `skylite` as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

FAKE_LAUNCHER = f"{Path(__file__).parents[1] / 'fakes' / 'launcher.py'}:FakeLauncher"
FAKE_ENGINE = (f"engine.launcher={FAKE_LAUNCHER}", "sync.rollout_mismatch=warn")
"""Settings of a run with fake engines, whose logprobs are made up."""
FAKE_WORDS = [word for setting in FAKE_ENGINE for word in ("--set", setting)]
WITH_FAKE_ENGINE = "SKYLITE_TESTS_FAKE_ENGINE"
"""Environment variable of a test whose runs have FAKE_ENGINE."""
COMMAND = [sys.executable, "-c", "from skylite.entry_point import main; main()"]
REWARD_FILE = '''
def letters(prompt, completion):
    """Share of ASCII letters: a random byte model gets some of it, training raises it."""
    return sum(c.isascii() and c.isalpha() for c in completion) / max(1, len(completion))
'''
SETTINGS = (
    "rollout.prompts_per_step=4",
    "rollout.max_prompt_tokens=128",
    "rollout.max_completion_tokens=12",
    "trainer.tokens_per_micro_batch=256",
    "engine.max_num_seqs=32",
    "engine.kv_cache_gib=0.25",
)


@dataclass(frozen=True, slots=True)
class Project:
    """Paths of the project and ways to run skylite in it."""

    root: Path
    model: Path

    def train_args(self, run: str, steps: int, *extra: str) -> list[str]:
        """A short run of the tiny model on the project's data. Its name must be new: tests share projects."""
        assert not (self.root / run).exists(), f"another test has a run {run}"
        settings = [word for setting in SETTINGS for word in ("--set", setting)]
        named = [
            "--recipe",
            "gsm8k_cpu",
            "--model",
            str(self.model),
            "--data",
            "data",
            "--rank",
            "8",
            "--alpha",
            "16",
        ]
        more = ["--set", "data.difficulty=[]", "--set", "eval.limit=8", "--lr", "1e-2", "--group-size", "4"]
        if WITH_FAKE_ENGINE in os.environ:
            more += FAKE_WORDS
        return ["train", *named, *settings, *more, "--steps", str(steps), "--run", run, *extra]

    def start(self, *args: str) -> subprocess.Popen[str]:
        """Start `skylite ARGS` in a new session and capture its output."""
        return subprocess.Popen(
            [*COMMAND, *args],
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=os.environ,
        )

    def run(self, *args: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        """Run `skylite ARGS` until it ends."""
        return subprocess.run(
            [*COMMAND, *args], cwd=self.root, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        path = self.root / run / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def status(self, run: str) -> dict[str, Any]:
        """status.json."""
        value: dict[str, Any] = json.loads((self.root / run / "status.json").read_text())
        return value


def make_project(root: Path, model: Path) -> Project:
    """Write the data file and the reward, and prepare them."""
    rows = [
        {"q": f"say {word} {i}", "a": word} for i in range(20) for word in ("alpha", "beta", "gamma", "delta")
    ]
    (root / "words.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (root / "reward.py").write_text(REWARD_FILE)
    project = Project(root, model)
    done = project.run(
        "prepare",
        "words.jsonl",
        "--question",
        "q",
        "--answer",
        "a",
        "--reward",
        "reward.py:letters",
        "--out",
        "data",
    )
    assert done.returncode == 0, done.stderr
    return project


def descendants(pid: int) -> list[psutil.Process]:
    """Every process below `pid`."""
    return psutil.Process(pid).children(recursive=True)


def torn(folder: Path) -> list[Path]:
    """Incomplete adapters and checkpoints under their final name."""
    versions = [p for p in folder.glob("adapters/policy-v*") if not (p / "manifest.json").exists()]
    return versions + [p for p in folder.glob("checkpoints/step-*") if not (p / "state.json").exists()]
