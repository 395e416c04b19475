"""A user's file that raises SystemExit or KeyboardInterrupt fails. The run never ends without an error."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from skylite.algorithms.user_functions import group_advantage
from skylite.config.algorithm import AlgorithmConfig
from skylite.data.data_prep_file import load_dataset, module_examples
from skylite.errors import ConfigError, DataError, RunFailed
from skylite.rewards import load_reward
from skylite.rewards.call_rewards import finite_scores
from skylite.rewards.worker_pool import RewardPool
from tests.unit.bad_inputs import call
from tests.unit.data_cases import prompt

RAISES = [
    "sys.exit()",
    "sys.exit(0)",
    "raise SystemExit('bye')",
    "raise KeyboardInterrupt",
    "raise GeneratorExit",
    "raise asyncio.CancelledError",
    "raise BaseException('odd')",
    "raise Unprintable",
    "os._exit(0)",
    "end_now(0)",
]
HEAD = """
import asyncio, os, sys
from os import _exit as end_now
class Unprintable(Exception):
    def __str__(self): sys.exit(0)
"""


def reward_file(folder: Path, body: str, top: str = "pass") -> str:
    (folder / "mine.py").write_text(
        f"{HEAD}\n{top}\ndef f(prompt, completion):\n    {body}\n    return 1.0\n"
    )
    return f"{folder / 'mine.py'}:f"


@pytest.mark.parametrize("body", RAISES)
def test_a_reward_that_exits_fails_with_the_prompts_id(tmp_path: Path, body: str) -> None:
    reward = load_reward(reward_file(tmp_path, body))
    with pytest.raises(RunFailed, match=r"reward function own raised \w+.*prompt gsm/7, completion 'x'"):
        finite_scores("own", reward, [(prompt(id="gsm/7"), "x")])


def test_a_result_that_exits_when_it_is_read_fails_too(tmp_path: Path) -> None:
    top = "class Odd(float):\n    def __float__(self): sys.exit(0)\n    __repr__ = __float__"
    reward = load_reward(reward_file(tmp_path, "return Odd(1)", top))
    with pytest.raises(RunFailed, match="prompt gsm/7"):
        finite_scores("own", reward, [(prompt(id="gsm/7"), "x")])


def test_a_worker_survives_and_names_the_prompt(tmp_path: Path) -> None:
    """In one pool, because a start takes seconds."""
    lines = [f"if completion == '{i}': {body}" for i, body in enumerate(RAISES)]
    pool = RewardPool([reward_file(tmp_path, "\n    ".join(lines))])
    try:
        for i in range(len(RAISES)):
            with pytest.raises(RunFailed, match=f"prompt gsm/{i},"):
                asyncio.run(pool.score([(prompt(id=f"gsm/{i}"), str(i))]))
        assert asyncio.run(pool.score([(prompt(), "fine")]))[0].reward == 1.0
    finally:
        pool.close()


@pytest.mark.parametrize("body", RAISES)
def test_a_file_that_exits_when_it_is_run_is_refused(tmp_path: Path, body: str) -> None:
    with pytest.raises(ConfigError, match=r"mine\.py cannot be imported: \w+"):
        load_reward(reward_file(tmp_path, "pass", top=body))


@pytest.mark.parametrize("body", RAISES)
def test_an_advantage_that_exits_fails(tmp_path: Path, body: str) -> None:
    advantage = group_advantage(AlgorithmConfig(advantage=reward_file(tmp_path, body)))
    with pytest.raises(RunFailed, match=r"The advantage f in \S+mine.py raised \w+"):
        advantage(torch.ones(2, 3), torch.ones(2, 3), None)


@pytest.mark.parametrize("body", RAISES)
@pytest.mark.parametrize("name", ["load_rows", "to_prompt", "reference", "synthetic_rows"])
def test_a_data_prep_function_that_exits_is_refused(tmp_path: Path, body: str, name: str) -> None:
    good = (Path(__file__).parents[2] / "data_prep" / "gsm8k.py").read_text()
    (tmp_path / "mine.py").write_text(f"{good}\n{HEAD}\ndef {name}(*_):\n    {body}\n")
    with pytest.raises(DataError, match=rf"{name} in \S+mine\.py raised \w+"):
        module_examples(
            load_dataset(str(tmp_path / "mine.py")),
            source=tmp_path if name == "load_rows" else None,
            synthetic=name != "load_rows",
            first_source=False,
            difficulties=(),
            limit=3,
            seed=0,
        )


def test_a_refusal_of_a_data_prep_file_keeps_its_words(tmp_path: Path) -> None:
    good = (Path(__file__).parents[2] / "data_prep" / "gsm8k.py").read_text()
    text = "from skylite.errors import DataError\ndef to_prompt(*_): raise DataError('ours.', 'do.')"
    (tmp_path / "mine.py").write_text(f"{good}\n{text}\n")
    reply = call(["prepare", str(tmp_path / "mine.py"), "--synthetic", "--out", str(tmp_path / "out")])
    assert reply.output == "skylite: ours. do.\n"


@pytest.mark.parametrize("body", ["sys.exit(0)", "raise KeyboardInterrupt", "os._exit(0)"])
def test_prepare_does_not_succeed_by_an_exit(
    tmp_path: Path, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps({"q": f"{i}?", "a": "1"}) + "\n" for i in range(9)))
    reward_file(tmp_path, body)
    columns = ["--question", "q", "--answer", "a"]
    reply = call(["prepare", "rows.jsonl", *columns, "--reward", "mine.py:f", "--out", "data"])
    assert reply.code in (1, 2), reply.output
    assert "mine.py:f raised" in reply.output
    assert "rows/train/" in reply.output
    assert not Path("data").exists()


def test_a_process_that_a_users_code_forks_may_end(tmp_path: Path) -> None:
    body = """
    if (child := os.fork()) == 0:
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])"""
    reward = load_reward(reward_file(tmp_path, body))
    assert finite_scores("own", reward, [(prompt(), "x")]) == [7.0]


SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C
from skylite.errors import SkyliteError
from skylite.rewards.call_rewards import reward_function, score
from tests.unit.data_cases import prompt
def reward(completion):
    print("up", flush=True)
    time.sleep(60)
try:
    score("own", reward_function(reward), [(prompt(), "x")])
except KeyboardInterrupt:
    sys.exit(42)
except SkyliteError:
    sys.exit(43)
"""


def test_ctrl_c_during_a_reward_is_still_ctrl_c() -> None:
    child = subprocess.Popen([sys.executable, "-c", SLOW], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    os.kill(child.pid, signal.SIGINT)
    started = time.monotonic()
    assert child.wait() == 42
    assert time.monotonic() - started < 30
    child.stdout.close()
