"""Which recorded call a request continues, and the order of parallel calls."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from skylite.engine.interface import Sampling
from skylite.environments.episodes_source import Episodes
from skylite.environments.trajectory_log import AnsweredRequest, TrajectoryLog
from skylite.rollout.step_metrics import turn_metrics
from skylite.types import Call, EncodedPrompt, Trajectory
from tests.tiny_models import CHAT_TEMPLATE
from tests.unit.environment_cases import ScriptedEngine, sample, to_text
from tests.unit.test_openai_server import HELLO, open_log, post, visit

WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t.function.name }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% if mood %}<|im_start|>system\nBe {{ mood }}.<|im_end|>\n{% endif %}" + CHAT_TEMPLATE
)


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


ADD, MOOD = {"tools": [tool("add")]}, {"chat_template_kwargs": {"mood": "kind"}}


@pytest.mark.parametrize(
    ("first", "second", "begin"),
    [
        (ADD, ADD, None),
        ({}, {"tools": []}, None),
        (
            ADD,
            ADD | {"tools": [tool("subtract")]},
            "<|im_start|>system\nsubtract<|im_end|>\n<|im_start|>user",
        ),
        ({}, ADD, "<|im_start|>system\nadd<|im_end|>\n<|im_start|>user"),
        (ADD, ADD | {"tool_choice": "none"}, "<|im_start|>user"),
        (ADD, {}, "<|im_start|>user"),
        ({}, MOOD, "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user"),
        (MOOD, MOOD, None),
    ],
    ids=["same", "none", "other tools", "tools later", "tool_choice", "tools gone", "arguments", "same args"],
)
def test_a_call_with_other_tools_is_rendered_anew(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], begin: str | None
) -> None:
    """And counted as a branch. `begin`: of its prompt; None where it continues the first call."""

    async def body(running: Episodes) -> None:
        log, key = open_log(running.server, ScriptedEngine(lambda p: "hi"))
        reply = await post(running.server, key, {"messages": HELLO, **first})
        said = reply.json()["choices"][0]["message"]
        later = {"messages": [*HELLO, said, {"role": "user", "content": "on"}], **second}
        assert (await post(running.server, key, later)).status_code == 200
        samples = tuple(answered.call for answered in log.calls)
        known = samples[0].prompt_token_ids + samples[0].completion_token_ids
        prompt = samples[1].prompt_token_ids
        branches = turn_metrics([Trajectory(calls=samples, reward=0.0)])["turns/branches_mean"]
        if begin is None:
            assert (prompt[: len(known)], branches) == (known, 0.0)
        else:
            assert to_text(prompt).startswith(begin)
            assert branches == 1.0

    visit(tmp_path, body, template=WITH_TOOLS)


class Uneven(ScriptedEngine):
    """Answers prompts with "slow" later than others."""

    async def generate(
        self, model: str, prompt: EncodedPrompt, n: int, sampling: Sampling, version: int
    ) -> list[Call]:
        await asyncio.sleep(1.5 if "slow" in to_text(prompt.token_ids) else 0.0)
        return await super().generate(model, prompt, n, sampling, version)


def test_parallel_calls_stay_in_the_order_in_which_they_were_asked(tmp_path: Path) -> None:
    """So that the reward of each turn is that turn's."""
    source = """
    import asyncio
    async def episode(task, chat):
        slow = asyncio.ensure_future(chat([{"role": "user", "content": "slow"}]))
        await asyncio.sleep(0.5)
        await chat([{"role": "user", "content": "fast"}])
        assert not slow.done()
        await slow
        return [1.0, 2.0]
    """
    engine = Uneven()
    (group,) = sample(tmp_path, source, engine)
    (trajectory,) = group.trajectories
    assert ["slow" in to_text(prompt) for prompt, _ in engine.replies] == [False, True]
    assert ["slow" in to_text(s.prompt_token_ids) for s in trajectory.calls] == [True, False]
    assert trajectory.turn_rewards == (1.0, 2.0)


def log_of(*replies: dict[str, Any]) -> TrajectoryLog:
    """Calls with the same messages and these replies."""
    engine: Any = ScriptedEngine()
    log = TrajectoryLog(name="p0", model="m", version=1, engine=engine, seed=1, temperature=1.0)
    for number, reply in enumerate(replies, 1):
        empty = Call(prompt_token_ids=[1], completion_token_ids=[2], sampling_logprobs=[0.0])
        log.record(
            AnsweredRequest(number=number, messages=HELLO, tools=None, arguments={}, reply=reply, call=empty)
        )
    return log


def continued(log: TrajectoryLog, reply: dict[str, Any]) -> int | None:
    found = log.continued([*HELLO, reply, {"role": "user", "content": "on"}], None, {})
    return None if found is None else found.number


def calling(arguments: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": arguments}}],
    }


@pytest.mark.parametrize(
    ("sampled", "sent", "continues"),
    [
        ('{"a":1,"b":[2]}', '{ "b": [2], "a": 1 }', True),
        ('{"a": 1}', '{"a": 2}', False),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": 1', '{"a": 1', True),
        ('{"a": 1', '{"a":1', False),
        ("[" * 5000, "[" * 5000, True),
    ],
)
def test_arguments_of_tools_are_compared_as_json(sampled: str, sent: str, continues: bool) -> None:
    assert (continued(log_of(calling(sampled)), calling(sent)) == 1) is continues


def test_of_equal_replies_the_one_with_the_same_reasoning_continues() -> None:
    said = {"role": "assistant", "content": "4"}
    thoughts = [said | {"reasoning_content": thought} for thought in ("two and two", "two times two")]
    log = log_of(*thoughts)
    assert [continued(log, thought) for thought in thoughts] == [1, 2]
    assert continued(log, said) == 1, "the first, where a program drops reasoning"
    assert continued(log_of(*thoughts, said), said) == 3
