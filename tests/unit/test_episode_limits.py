"""What an episode gets that its limit ends: env.limit_reward, and only for what the limit raised."""

from __future__ import annotations

from pathlib import Path

import pytest

from skylite.environments.chat import LimitReached, is_limit
from skylite.errors import RunFailed
from tests.unit.environment_cases import ScriptedEngine, sample

AT_THE_LIMIT = """
    import asyncio
    from skylite.environments.chat import LimitReached

    async def play(task, chat):
        while True:
            await chat(task.messages)

    async def episode(task, chat):
"""
OPENAI = """
    import openai

    def episode(task, chat):
        client = openai.OpenAI(base_url=chat.base_url, api_key=chat.api_key)
        while True:
            client.chat.completions.create(model=chat.model, messages=task.messages)
"""


@pytest.mark.parametrize(
    "source",
    [
        OPENAI,
        AT_THE_LIMIT
        + """
        try: await play(task, chat)
        except LimitReached as error: raise RuntimeError("the game is over") from error
        """,
        AT_THE_LIMIT
        + """
        async with asyncio.TaskGroup() as group:
            group.create_task(play(task, chat))
        """,
    ],
    ids=["OpenAI client", "raised from it", "group"],
)
def test_an_exception_that_a_limit_gives_ends_the_trajectory(tmp_path: Path, source: str) -> None:
    (group,) = sample(tmp_path, source, ScriptedEngine(), max_turns=2, limit_reward=-1.0)
    (trajectory,) = group.trajectories
    assert (len(trajectory.calls), trajectory.end, trajectory.reward) == (2, "turns", -1.0)


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        ("raise KeyError('score')", "raised KeyError"),
        ("pass\n        return 1 / 0", "raised ZeroDivisionError"),
        ("pass\n        return None", "returned None"),
        ("import os; os._exit(3)", "ended its process with 3"),
    ],
)
def test_a_mistake_after_a_limit_is_no_limit(tmp_path: Path, after: str, reason: str) -> None:
    source = (
        AT_THE_LIMIT
        + f"""
        try: await play(task, chat)
        except LimitReached: {after}
    """
    )
    with pytest.raises(RunFailed, match="prompt p0, trajectory 0") as caught:
        sample(tmp_path, source, ScriptedEngine(), max_turns=2, limit_reward=-1.0)
    assert reason in caught.value.what


def test_which_exceptions_are_a_limit() -> None:
    class WithCode(Exception):
        code = "turn_limit"

    def chained(error: Exception, cause: Exception) -> Exception:
        error.__cause__ = cause
        return error

    own_cause, limit = ValueError(), LimitReached("the end")
    own_cause.__cause__ = own_cause
    assert all(map(is_limit, [limit, WithCode(), chained(ValueError(), chained(KeyError(), limit))]))
    assert is_limit(ExceptionGroup("", [limit, ExceptionGroup("", [WithCode()])]))
    assert not any(
        map(is_limit, [ValueError("turn_limit"), own_cause, ExceptionGroup("", [limit, KeyError()])])
    )
