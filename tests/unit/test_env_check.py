"""`skylite env check`: what it reports about episodes that repeat or differ, with which model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from skylite.cli import env as env_check
from skylite.cli.env import CheckFlags
from skylite.cli.main import app
from tests.e2e.project import FAKE_ENGINE
from tests.settings import typed
from tests.unit.work_cases import parts, recorded_work

Check = Callable[..., list[dict[str, Any]]]
RANDOM = """
import os, random

async def episode(task, chat):
    await chat(task.messages)
    return {expression}
"""
TIDY = """
import asyncio, subprocess, tempfile

clients = []

async def episode(task, chat):
    await chat(task.messages)
    clients.append(chat)  # its connection stays open
    with tempfile.TemporaryFile(), open(__file__):
        subprocess.run(["true"])
    child = await asyncio.create_subprocess_exec("true", stdout=subprocess.PIPE)
    await child.communicate()
    await asyncio.to_thread(len, "in a thread")
    return 1.0
"""
WITH_SANDBOX = """
from skylite.environments.python_tool import python_tool

async def episode(task, chat):
    await chat(task.messages)
    return float(python_tool()("print(1)"))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    rows = [{"q": f"say {i}", "a": str(i)} for i in range(40)]
    (root / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ["prepare", str(root / "rows.jsonl"), "--question", "q", "--answer", "a"]
    done = CliRunner().invoke(app, [*words, "--reward", "exact_match", "--out", str(root / "out")])
    assert done.exit_code == 0, done.output
    return root / "out"


@pytest.fixture
def check(data: Path, tiny_llama: Path, tmp_path: Path) -> Check:
    """Runs the command on an episode's source; the facts of each model."""

    def run(source: str, *words: str) -> list[dict[str, Any]]:
        program = tmp_path / "program.py"
        program.write_text(source)
        named = [] if "--model" in words else ["--set", f'model.name="{tiny_llama}"']
        args = ["env", "check", f"{program}:episode", "--data", str(data), *named, *words]
        done = CliRunner().invoke(app, [*args, "--json"])
        assert done.exit_code == 0, done.output
        facts: list[dict[str, Any]] = json.loads(done.stdout)["models"]
        return facts

    return run


@pytest.mark.parametrize(
    ("expression", "repeated"),
    [
        ("float(os.urandom(8)[0]) + os.urandom(1)[0] / 256", 0),
        ("random.random()", 2),
        ("random.Random(task.seed).random()", 2),
    ],
    ids=["urandom", "random", "own_generator"],
)
def test_an_episode_that_differs_under_a_seed_is_found(check: Check, expression: str, repeated: int) -> None:
    (facts,) = check(RANDOM.format(expression=expression), "--reply", "ok", "--episodes", "2")
    assert facts["repeated"] == repeated
    assert {e["repeated"] for e in facts["episodes"]} == {bool(repeated)}
    assert len({e["reward"] for e in facts["episodes"]}) == 2, "two seeds"


@pytest.mark.parametrize("source", [TIDY, WITH_SANDBOX], ids=["own", "sandbox"])
def test_an_episode_that_tidies_up_leaves_nothing(
    check: Check, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    (facts,) = check(source, "--reply", "ok", "--episodes", "2")
    assert facts["reward_mean"] == 1.0
    assert list(folder.iterdir()) == []


def test_each_episode_has_seconds_of_its_own_without_the_start(check: Check) -> None:
    source = """
import time

def episode(task, chat):
    chat(task.messages)
    pause = int(task.answer) % 3 * 0.4
    time.sleep(pause)
    return pause
"""
    (facts,) = check(source, "--reply", "ok", "--episodes", "6")
    assert len({e["reward"] for e in facts["episodes"]}) > 1
    for episode in facts["episodes"]:
        assert 0 <= episode["seconds"] - episode["reward"] < facts["start_seconds"]


def test_an_episode_that_its_time_limit_ends_has_seconds_too(check: Check) -> None:
    source = "async def episode(task, chat):\n    await chat(task.messages)\n    while True: pass\n"
    (facts,) = check(source, "--reply", "ok", "--episodes", "1", "--set", "env.timeout_s=1")
    (episode,) = facts["episodes"]
    assert episode["end"] == "time"
    assert episode["seconds"] > 0.9  # the limit is counted in another process


def test_the_episodes_are_counted_while_they_run(data: Path, tiny_llama: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("async def episode(task, chat):\n    await chat(task.messages)\n    return 1.0\n")
    flags = CheckFlags(
        episode=f"{program}:episode", data=data, episodes=3, reply=["ok"], as_json=True,
        provenance=typed({}, [f'model.name="{tiny_llama}"']),
    )  # fmt: skip
    with recorded_work() as found:
        env_check.run_check(flags)
    assert parts(found) == [("playing every episode twice", 6, 6)]


def test_the_scripted_model_plays_first_and_the_named_one_after_it(check: Check, tiny_llama: Path) -> None:
    source = "async def episode(task, chat):\n    return float((await chat(task.messages)).text == 'ok')\n"
    name, few = str(tiny_llama), ("--episodes", "2")
    settings = ("rollout.max_completion_tokens=12", "env.max_tokens=1536", FAKE_ENGINE[0])
    limits = [word for setting in settings for word in ("--set", setting)]
    both = check(source, "--model", name, "--reply", "ok", *few, *limits)
    assert [(facts["model"], facts["reward_mean"]) for facts in both] == [("scripted", 1.0), (name, 0.0)]
    (alone,) = check(source, "--model", name, *few, *limits)
    assert alone["model"] == name
    assert [e["sampled_tokens"] for e in alone["episodes"]] == [
        e["sampled_tokens"] for e in both[1]["episodes"]
    ]


def test_people_read_the_same(check: Check, data: Path, tiny_llama: Path, tmp_path: Path) -> None:
    source = "async def episode(task, chat):\n    await chat(task.messages)\n    return 0.5\n"
    check(source, "--reply", "ok", "--episodes", "1")
    words = ["--data", str(data), "--set", f'model.name="{tiny_llama}"', "--reply", "ok", "--episodes", "1"]
    done = CliRunner().invoke(app, ["env", "check", f"{tmp_path / 'program.py'}:episode", *words])
    assert done.exit_code == 0, done.output
    assert re.search(r"reward 0\.5, 1 turns, 3 sampled tokens, \d+\.\d\d s, end: stop\n", done.stdout)
    assert "scripted: 1 episodes, twice each, after a start of" in done.stdout
