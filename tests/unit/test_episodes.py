"""Episodes: the trajectories they give, their limits, and what happens to those that fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skylite.config.rollout import EnvConfig
from skylite.environments.episode_host import FILE_BYTES
from skylite.environments.episodes_source import read_reward
from skylite.errors import ConfigError, RunFailed
from tests.unit.environment_cases import (
    ScriptedEngine,
    sample,
    to_text,
)

THREE_TURNS = """
    async def episode(task, chat):
        messages = list(task.messages)
        for turn in range(3):
            reply = await chat(messages)
            messages += [reply.message, {"role": "user", "content": f"again {turn}"}]
        return 0.25
"""


def test_each_call_continues_the_sampled_tokens(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda prompt: f"turn {prompt.count('assistant')}")
    (group,) = sample(tmp_path, THREE_TURNS, engine)
    (trajectory,) = group.trajectories
    assert (trajectory.reward, trajectory.end, trajectory.is_truncated) == (0.25, "stop", False)
    assert [to_text(s.completion_token_ids) for s in trajectory.calls] == [
        "turn 1<|im_end|>", "turn 2<|im_end|>", "turn 3<|im_end|>",
    ]  # fmt: skip
    assert to_text(trajectory.calls[2].prompt_token_ids) == (
        "<|im_start|>user\nquestion 0<|im_end|>\n<|im_start|>assistant\nturn 1<|im_end|>\n"
        "<|im_start|>user\nagain 0<|im_end|>\n<|im_start|>assistant\nturn 2<|im_end|>\n"
        "<|im_start|>user\nagain 1<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [s.observed for s in trajectory.calls] == ["user: question 0", "user: again 0", "user: again 1"]
    for before, after in zip(trajectory.calls, trajectory.calls[1:], strict=False):
        known = before.prompt_token_ids + before.completion_token_ids
        assert after.prompt_token_ids[: len(known)] == known


def test_trained_ids_are_the_ids_that_the_engine_saw_and_gave(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda prompt: f" {len(prompt)}  odd\tspaces ")
    groups = sample(tmp_path, THREE_TURNS, engine, num_prompts=3, group_size=4)
    recorded = [
        (s.prompt_token_ids, s.completion_token_ids) for g in groups for t in g.trajectories for s in t.calls
    ]
    assert len(recorded) == 36
    assert sorted(recorded) == sorted(engine.replies)
    assert set(engine.models) == {("policy-v000003", 3)}
    assert {s.temperature for s in engine.samplings} == {1.0}


def test_seeds_differ_between_trajectories_and_repeat_with_the_step(tmp_path: Path) -> None:
    seeds = []
    for run in range(2):
        engine = ScriptedEngine()
        sample(_fresh(tmp_path, run), THREE_TURNS, engine, group_size=4)
        seeds.append(sorted(s.seed for s in engine.samplings))
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 12


def _fresh(tmp_path: Path, number: int) -> Path:
    folder = tmp_path / str(number)
    folder.mkdir()
    return folder


def test_a_cut_reply_is_closed_before_the_next_turn(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda prompt: "x" * 100)
    (group,) = sample(tmp_path, THREE_TURNS, engine)
    first, second, _ = group.trajectories[0].calls
    assert first.finish_reason == "length"
    assert to_text(second.prompt_token_ids[len(first.prompt_token_ids) + 64 :]).startswith(
        "<|im_end|>\n<|im_start|>user"
    )


@pytest.mark.parametrize(
    ("source", "calls", "reward"),
    [
        ("async def episode(task, chat):\n    while True: await chat(task.messages)", 2, -1.0),
        (
            "from skylite.environments.chat import LimitReached\n"
            "async def episode(task, chat):\n"
            "    try:\n"
            "        for _ in range(9): await chat(task.messages)\n"
            "    except LimitReached:\n"
            "        return 0.5",
            2, 0.5,
        ),
    ],
    ids=["unexpected", "expected"],
)  # fmt: skip
def test_a_turn_limit_ends_the_trajectory(tmp_path: Path, source: str, calls: int, reward: float) -> None:
    engine = ScriptedEngine()
    (group,) = sample(tmp_path, source, engine, max_turns=2, limit_reward=-1.0)
    (trajectory,) = group.trajectories
    assert (len(trajectory.calls), trajectory.end, trajectory.reward) == (calls, "turns", reward)
    assert trajectory.is_truncated


def test_a_token_limit_ends_the_trajectory(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda prompt: "y" * 40)
    (group,) = sample(tmp_path, THREE_TURNS, engine, max_tokens=501)
    assert group.trajectories[0].end == "stop"
    (tmp_path / "b").mkdir()
    long = THREE_TURNS.replace('f"again {turn}"', '"z" * 500')
    (group,) = sample(tmp_path / "b", long, engine, max_tokens=520)
    assert (group.trajectories[0].end, len(group.trajectories[0].calls)) == ("tokens", 1)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise ValueError('bad move')", "raised ValueError: bad move"),
        ("raise SystemExit(0)", "raised SystemExit: 0"),
        ("import os; os._exit(0)", "ended its process with 0"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended its process with -9"),
        ("return None", "the episode returned None"),
        ("return [1.0, 2.0]", "returned 2 rewards for 1 turns"),
        ("return {}", "returned no component"),
        ("return {'feedback': 'no'}", "returned no component"),
        ("return {'won': 1.0, 'feedback': 3}", "returned 3 as 'feedback', which must be a text"),
    ],
)
def test_a_failing_episode_stops_the_run_with_the_prompt(tmp_path: Path, body: str, reason: str) -> None:
    source = f"""
    async def episode(task, chat):
        await chat(task.messages)
        {body}
    """
    with pytest.raises(RunFailed, match="prompt p0, trajectory 0") as caught:
        sample(tmp_path, source, ScriptedEngine())
    assert reason in caught.value.what


def test_an_episode_without_a_call_fails(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="made no call of the model"):
        sample(tmp_path, "async def episode(task, chat): return 1.0", ScriptedEngine())


def test_a_failing_group_is_dropped_if_the_settings_say_so(tmp_path: Path) -> None:
    source = """
    async def episode(task, chat):
        await chat(task.messages)
        if task.id == "p1":
            raise ValueError("bad")
        return 1.0
    """
    groups = sample(tmp_path, source, ScriptedEngine(), num_prompts=3, group_size=2, on_error="drop")
    assert [g.prompt.id for g in groups] == ["p0", "p2"]


def test_an_episode_may_be_a_plain_function(tmp_path: Path) -> None:
    source = """
    def episode(task, chat):
        first = chat(task.messages)
        second = chat([*task.messages, first.message, {"role": "user", "content": "more"}])
        return {"length": len(first.text) + len(second.text), "fixed": 2.0}
    """
    (group,) = sample(tmp_path, source, ScriptedEngine(lambda p: "abc"), weights={"length": 0.5})
    (trajectory,) = group.trajectories
    assert trajectory.components == {"length": 6.0, "fixed": 2.0}
    assert trajectory.reward == 0.5 * 6.0 + 2.0


def test_a_call_imports_no_http_library(tmp_path: Path) -> None:
    """In the process of each episode the imports would take longer than all the rest."""
    source = """
    import sys

    async def episode(task, chat):
        before = set(sys.modules)
        await chat(task.messages)
        return len(set(sys.modules) - before)
    """
    (group,) = sample(tmp_path, source, ScriptedEngine(lambda p: "abc"))
    assert group.trajectories[0].reward < 10


def test_a_command_is_an_episode(tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(
        "import json, os\n"
        "import openai\n"
        "task = json.loads(os.environ['SKYLITE_TASK'])\n"
        "client = openai.OpenAI()\n"
        "reply = client.chat.completions.create(model='gpt-4o', messages=task['messages'])\n"
        "print('said', reply.choices[0].message.content)\n"
        "print(json.dumps(0.75))\n"
    )
    engine = ScriptedEngine(lambda p: "hello")
    (group,) = sample(tmp_path, "", engine, episode=f"command:{sys.executable} {program}")
    assert group.trajectories[0].reward == 0.75
    assert to_text(group.trajectories[0].calls[0].completion_token_ids) == "hello<|im_end|>"
    assert "said hello" in (tmp_path / "logs" / "episodes.log").read_text()


PRINTS = """
    import os, subprocess

    async def episode(task, chat):
        await chat(task.messages)
        print(("x" * 1000 + chr(10)) * 3000)
        subprocess.run(["echo", f"{task.id} echoed"], check=True)
        print(task.id, "has", "printed", end="")
        return 1.0
"""


def test_a_log_of_a_gigabyte_ends_no_episode(tmp_path: Path) -> None:
    """It is sparse. A new log begins, and the old one stays beside it."""
    log = tmp_path / "logs" / "episodes.log"
    log.parent.mkdir()
    log.touch()
    os.truncate(log, FILE_BYTES)
    groups = sample(tmp_path, PRINTS, ScriptedEngine(), num_prompts=2)
    assert [group.trajectories[0].reward for group in groups] == [1.0, 1.0]
    printed = log.read_text()
    assert printed.count("x") == 6_000_000
    lines = set(printed.splitlines())
    assert {"p0 echoed", "p1 echoed", "p0 has printed", "p1 has printed"} <= lines
    assert log.with_name("episodes.log.1").stat().st_size == FILE_BYTES


def test_a_full_disk_takes_no_print_and_raises_nothing() -> None:
    code = "from skylite.environments.episode_host import append_to_log; append_to_log(b'text')"
    with open("/dev/full", "wb") as full:
        subprocess.run([sys.executable, "-c", code], stdout=full, check=True)


def test_a_command_without_a_reward_fails(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="must be the reward as JSON"):
        sample(tmp_path, "", ScriptedEngine(), episode="command:echo done")


def test_a_file_that_cannot_be_imported_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no_such_module"):
        sample(tmp_path, "import no_such_module", ScriptedEngine())


TOLD = """
    async def episode(task, chat):
        messages = [{"role": "system", "content": "Play."}, *task.messages]
        turns = task.seed // (1 << 20) % 4  # another number for each trajectory
        for turn in range(max(1, turns)):
            reply = await chat(messages)
            messages += [reply.message, {"role": "user", "content": f"again {turn}"}]
        if turns == 3:
            await chat(messages[1:])  # with another beginning
        return {"turns": float(turns), "feedback": "you lost" if turns else ""}
"""


def test_the_teacher_of_an_episode_sees_its_feedback_in_the_first_message(tmp_path: Path) -> None:
    algorithm = {"name": "sdpo", "teacher_sees_feedback": True, "success_reward": 9.0}
    (group,) = sample(tmp_path, TOLD, ScriptedEngine(), group_size=4, algorithm=algorithm)
    by_turns = {int(t.reward): t for t in group.trajectories}
    assert by_turns.keys() == {0, 1, 2, 3}
    assert {n: t.feedback for n, t in by_turns.items()} == {
        0: "",
        1: "you lost",
        2: "you lost",
        3: "you lost",
    }
    before = "<|im_start|>system\nPlay.<|im_end|>\n<|im_start|>user\nquestion 0"
    said = "\n\nFeedback on an earlier answer of yours:\n\nyou lost\n\nNow answer the question."
    first = f"{before}{said}<|im_end|>\n<|im_start|>assistant\n"
    second = f"{first}ok<|im_end|>\n<|im_start|>user\nagain 0<|im_end|>\n<|im_start|>assistant\n"
    third = f"{second}ok<|im_end|>\n<|im_start|>user\nagain 1<|im_end|>\n<|im_start|>assistant\n"
    prompts = {n: [to_text(c.teacher_prompt_token_ids) for c in t.calls] for n, t in by_turns.items()}
    assert prompts == {0: [""], 1: [first], 2: [first, second], 3: [first, second, third, ""]}


def test_the_teacher_of_an_episode_sees_a_column_and_a_success(tmp_path: Path) -> None:
    algorithm = {"name": "sdpo", "teacher_column": "answer", "teacher_prompt": "{prompt} / {context}"}
    (group,) = sample(tmp_path, TOLD, ScriptedEngine(), group_size=2, algorithm=algorithm)
    shown = {int(t.reward): to_text(t.calls[0].teacher_prompt_token_ids) for t in group.trajectories}
    assert {n for n, text in shown.items() if "question 0 / 0\n\n" in text} == {
        n for n in shown if any(m != n and m >= 1 for m in shown)
    }
    assert all("question 0 / 0" in text for text in shown.values())


def test_rewards_of_turns_add_up() -> None:
    reward = read_reward([0.0, 0.5, 1.0], EnvConfig(), 3)
    assert (reward.reward, reward.turns) == (1.5, (0.0, 0.5, 1.0))
