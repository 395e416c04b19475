"""Environments of verifiers: their tasks become data, and each episode is exactly its task."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skylite.config.bundled import bundled_folder
from skylite.data.prompts import read_prompts
from skylite.environments.episode_spec import check_episode
from skylite.errors import ConfigError, RunFailed
from skylite.types import Prompt, Trajectory
from tests.settings import load_config
from tests.unit.environment_cases import (
    Script,
    ScriptedEngine,
    environment,
    make_prompt,
    make_request,
    to_text,
)
from tests.unit.verifiers_cases import add_verifiers, prepare, refusals

SPEC = "verifiers:sums-env"


@pytest.fixture(scope="module", autouse=True)
def verifiers_found() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        add_verifiers(patch)
        yield


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> list[Prompt]:
    """The training rows of sums_env."""
    folder = tmp_path_factory.mktemp("sums")
    done = prepare(SPEC, folder, "--limit", "8")
    assert done.returncode == 0, done.stderr
    assert f"wrote {folder}: 8 train, 1 validation, 1 test" in done.stdout
    assert f"--env {SPEC}" in done.stdout
    rows, info = read_prompts(folder / "train.parquet")
    assert (info.dataset, info.reward, info.has_answers) == ("verifiers-sums-env", SPEC, False)
    return rows


def play(
    folder: Path, prompts: list[Prompt], script: Script, spec: str = SPEC, **env: Any
) -> list[Trajectory]:
    """The trajectory of each prompt."""

    async def run() -> list[Trajectory]:
        env.setdefault("max_tokens", 2000)
        async with environment(folder, "", episode=spec, max_completion_tokens=100, **env) as running:
            request = make_request(ScriptedEngine(script))
            groups = await running.sample(prompts, request)
            return [group.trajectories[0] for group in groups]

    return asyncio.run(run())


def test_a_row_keeps_its_task(prompts: list[Prompt]) -> None:
    for prompt in prompts:
        number = int(prompt.id.rpartition("/")[2])
        assert prompt.messages == [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": f"What is {number} + {number + 1}?"},
        ]
        assert prompt.answer == str(2 * number + 1)
        assert prompt.extra["verifiers_task"]["idx"] == number


def test_each_episode_is_its_rows_task(tmp_path: Path, prompts: list[Prompt]) -> None:
    """The reply adds the two numbers of the prompt: all are right only if no task was swapped."""

    def script(prompt: str) -> str:
        a, b = map(int, re.findall(r"What is (\d+) \+ (\d+)", prompt)[-1])
        return f"It is {a + b}."

    for prompt, trajectory in zip(prompts, play(tmp_path, prompts, script), strict=True):
        assert dict(trajectory.components) == {
            "right": 1.0,
            "short": 0.25,
            "metric/letters": len(text_of(trajectory)),
        }
        assert (trajectory.reward, trajectory.end, len(trajectory.calls)) == (1.25, "stop", 1)
        (sample,) = trajectory.calls
        assert to_text(sample.prompt_token_ids) == (
            "<|im_start|>system\nAdd.<|im_end|>\n"
            f"<|im_start|>user\n{prompt.messages[-1]['content']}<|im_end|>\n<|im_start|>assistant\n"
        )


def text_of(trajectory: Trajectory) -> str:
    return trajectory.calls[-1].text


def test_an_endless_environment_with_worked_examples(tmp_path: Path) -> None:
    spec = f"{SPEC} taskset.tasks=null taskset.chat=true"
    done = prepare(spec, tmp_path / "data", "--limit", "3")
    assert ": 3 train, 23 validation, 25 test" in done.stdout, done.stderr
    prompts, _ = read_prompts(tmp_path / "data" / "train.parquet")
    (trajectory,) = play(tmp_path, prompts[:1], lambda prompt: "3", spec)
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in prompts[0].messages]
    assert len(turns) == 4
    assert to_text(trajectory.calls[0].prompt_token_ids) == "".join(turns) + "<|im_start|>assistant\n"


def test_tools_answer_over_mcp_and_a_limit_leaves_the_scoring(tmp_path: Path, prompts: list[Prompt]) -> None:
    """The model calls a tool, an unknown one, one without an object, and then past its limit of turns."""
    add, wrong = '"sums_add", "arguments": {"a": 2, "b": 3}', '"sums_add", "arguments": {"a": "x", "b": 3}'
    calls = [add, '"open", "arguments": {}', wrong]

    def script(prompt: str) -> str:
        number = prompt.count("<|im_start|>assistant") - 1
        return f'<tool_call>\n{{"name": {calls[number % 3]}}}\n</tool_call>'

    (trajectory,) = play(tmp_path, [prompts[0]], script, f"{SPEC} taskset.task.tool=true", max_turns=4)
    answers = ["the sum is 5", "there is no tool 'open'; there are sums_add", "validation error"]
    for before, after, answer in zip(trajectory.calls, trajectory.calls[1:], answers, strict=False):
        known = before.prompt_token_ids + before.completion_token_ids
        assert after.prompt_token_ids[: len(known)] == known
        assert answer in to_text(after.prompt_token_ids[len(known) :])
    assert (trajectory.end, len(trajectory.calls)) == ("turns", 4)
    assert set(trajectory.components) == {"right", "short", "metric/letters"}


def test_an_error_of_the_environment_names_row_and_task(tmp_path: Path, prompts: list[Prompt]) -> None:
    with pytest.raises(RunFailed) as error:
        play(tmp_path, [prompts[0]], lambda prompt: "1", f"{SPEC} taskset.task.fails=true")
    task = prompts[0].extra["verifiers_task"]["name"]
    assert (
        f"The episode of prompt {prompts[0].id}, trajectory 0 raised VerifiersFailed: task {task}: TaskError"
        in (error.value.what)
    )
    assert "KeyError: 'no such answer'" in error.value.what


def test_a_row_without_a_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="the row has no task of verifiers"):
        play(tmp_path, [make_prompt()], lambda prompt: "1")


def test_what_cannot_run_is_refused_before_the_first_step() -> None:
    other = "user.client.type=eval user.client.base_url=http://127.0.0.1:9/v1 user.model=m"
    expected = {
        "verifiers:no-such-env": "ModuleNotFoundError: taskset 'no-such-env' not found",
        f"{SPEC} taskset.tusks=3": "cannot open verifiers:sums-env taskset.tusks=3: taskset.tusks: ",
        f"{SPEC} id=user-sim": "has 2 agents without a client of their own: assistant, user.",
        f"{SPEC} id=user-sim {other}": "",
        f"{SPEC} agent.harness.id=codex": "needs a container for its program codex",
        f"{SPEC} taskset.tasks=2": "has 2 task(s); train, validation and test need one each",
    }
    found = refusals(list(expected))
    for (spec, what), error in zip(expected.items(), found, strict=True):
        assert what in error, spec
        assert bool(error) == bool(what), spec


def test_a_refusal_reaches_the_user(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="taskset 'no-such-env' not found") as error:
        play(tmp_path, [make_prompt()], lambda prompt: "1", "verifiers:no-such-env")
    assert error.value.hint == "Install the environment's package, and check its name and settings."


def test_the_example_plays_textarena(tmp_path: Path) -> None:
    """The recipe's environment: a game of several turns, whose tokens continue."""
    done = prepare("verifiers:textarena-number taskset.games=10", tmp_path / "data")
    assert done.returncode == 0, done.stderr
    (prompt, *_), _ = read_prompts(tmp_path / "data" / "train.parquet")

    def bisect(text: str) -> str:
        low, high = 1, 20
        for guess, hint in re.findall(r"\[(\d+)\]<\|im_end\|>\n<\|im_start\|>user\n.*?(higher|lower)", text):
            low, high = (int(guess) + 1, high) if hint == "higher" else (low, int(guess) - 1)
        return f"[{(low + high) // 2}]"

    (trajectory,) = play(
        tmp_path, [prompt], bisect, "verifiers:textarena-number", max_tokens=3000, max_prompt_tokens=900
    )
    assert trajectory.components["won"] == 1.0
    assert trajectory.components["metric/replies"] == len(trajectory.calls)
    for before, after in zip(trajectory.calls, trajectory.calls[1:], strict=False):
        known = before.prompt_token_ids + before.completion_token_ids
        assert after.prompt_token_ids[: len(known)] == known


def test_the_recipe_loads() -> None:
    config = load_config(bundled_folder("recipes") / "verifiers_number_cpu.toml", {}, ())
    assert config.env.episode == "verifiers:textarena-number"
    check_episode(config.env.episode)
