"""Async reward functions, and functions for several completions in real workers."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from skylite.errors import RunFailed
from skylite.rewards.call_rewards import reward_function, score
from skylite.rewards.worker_pool import RewardPool
from tests.unit.data_cases import prompt


def test_async_calls_run_at_once_and_keep_their_order() -> None:
    async def judge(completion: str, *, answer: str) -> float:
        await asyncio.sleep(0.3)
        return float(completion == answer)

    items = [(prompt(answer=str(k % 2)), "1") for k in range(20)]
    started = time.monotonic()
    assert score("judge", reward_function(judge), items) == [0.0, 1.0] * 10
    assert time.monotonic() - started < 3, "one after the other they take 6 s"


def test_an_async_batch_and_an_async_object() -> None:
    async def judge(completions: list[str], **columns: Any) -> list[float]:
        await asyncio.sleep(0)
        return [float(len(c)) for c in completions]

    class Judge:
        async def __call__(self, completion: str) -> float:
            return float(len(completion))

    items = [(prompt(), "x"), (prompt(), "xyz")]
    assert score("judge", reward_function(judge), items) == [1.0, 3.0]
    assert score("judge", reward_function(Judge()), items) == [1.0, 3.0]


def test_an_async_function_keeps_its_event_loop_between_calls() -> None:
    """An HTTP client belongs to the loop that it was made in."""
    loops: list[asyncio.AbstractEventLoop] = []

    async def judge(completion: str) -> float:
        loops.append(asyncio.get_running_loop())
        return 1.0

    for _ in range(2):
        score("judge", reward_function(judge), [(prompt(), "x")])
    assert loops[0] is loops[1]


@pytest.mark.parametrize(
    "error", [LookupError("odd"), SystemExit(0), KeyboardInterrupt(), asyncio.CancelledError()]
)
def test_an_async_failure_names_its_prompt_and_cancels_the_others(error: BaseException) -> None:
    ended: list[str] = []

    async def judge(completion: str) -> float:
        if completion == "bad":
            await asyncio.sleep(0.05)
            raise error
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(completion)
        return 1.0

    async def fine(completion: str) -> float:
        return 1.0

    items = [(prompt(id="t/good"), "good"), (prompt(id="t/bad"), "bad")]
    started = time.monotonic()
    with pytest.raises(
        RunFailed, match=rf"judge raised {type(error).__name__}.*prompt t/bad, completion 'bad'"
    ):
        score("judge", reward_function(judge), items)
    assert score("fine", reward_function(fine), items) == [1.0, 1.0], "the loop still works"
    assert ended == ["good"]
    assert time.monotonic() - started < 20


OWN = """
import asyncio, os

sizes = []

async def judge(completion, answer):
    sizes.append(completion)
    while len(sizes) < 4:  # ends only if four calls run at once
        await asyncio.sleep(0.01)
    return float(completion == answer)

def batch(completions, **columns):
    return [len(completions) + columns["level"][i] for i in range(len(completions))]

def pid(completion):
    return float(os.getpid())
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    return str(tmp_path / "own.py")


def test_workers_take_a_group_at_once_for_async_and_batch_functions(own: str) -> None:
    pool = RewardPool([f"{own}:judge", f"{own}:batch"], [1.0, 0.5], num_workers=2, timeout_s=60)
    items = [(prompt(answer=str(k), extra={"level": k}), "1") for k in range(4)]
    try:
        scores = asyncio.run(pool.score(items))
    finally:
        pool.close()
    assert [s.components for s in scores] == [{"judge": float(k == 1), "batch": 4.0 + k} for k in range(4)]
    assert [s.reward for s in scores] == [2.0, 3.5, 3.0, 3.5]
