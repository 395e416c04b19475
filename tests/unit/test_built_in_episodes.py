"""The built-in episodes calculator and reasoning-gym, with a scripted engine; their data and recipes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from skylite.config.bundled import bundled_folder
from skylite.config.provenance import Provenance
from skylite.data.prompts import read_prompts
from skylite.environments.episode_spec import check_episode
from skylite.errors import ConfigError
from skylite.rollout.trusted_programs import allow_episode
from skylite.types import Prompt, Trajectory
from tests.prepared import prepare
from tests.settings import load_config
from tests.unit.environment_cases import (
    Script,
    ScriptedEngine,
    environment,
    make_prompt,
    make_request,
    to_text,
)

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "%s"}}\n</tool_call>'


def play(folder: Path, episode: str, prompt: Prompt, script: Script, **env: Any) -> Trajectory:
    """The one trajectory of a built-in episode."""

    async def run() -> Trajectory:
        async with environment(folder, "", episode=episode, max_completion_tokens=100, **env) as running:
            request = make_request(ScriptedEngine(script))
            (group,) = await running.sample([prompt], request)
            return group.trajectories[0]

    return asyncio.run(run())


def test_the_calculator_computes_and_the_answer_is_scored(tmp_path: Path) -> None:
    def script(prompt: str) -> str:
        return "#### 20" if prompt.rstrip().count("assistant") > 1 else CALL % "3 * 6 + 2"

    prompt = make_prompt(0, answer="20")
    trajectory = play(tmp_path, "calculator", prompt, script, max_tokens=2000, weights={"calls": 0.0})
    assert dict(trajectory.components) == {"right": 1.0, "calls": 1.0}
    assert (trajectory.reward, len(trajectory.calls)) == (1.0, 2)
    first, second = trajectory.calls
    result = to_text(second.prompt_token_ids[len(first.prompt_token_ids + first.completion_token_ids) :])
    assert "20" in result


def test_a_wrong_expression_is_an_answer_to_the_model(tmp_path: Path) -> None:
    def script(prompt: str) -> str:
        return "#### 1" if "only numbers" in prompt else CALL % "__import__(1)"

    prompt = make_prompt(0, answer="2")
    trajectory = play(tmp_path, "calculator", prompt, script, max_tokens=2000)
    assert dict(trajectory.components) == {"right": 0.0, "calls": 1.0}


ENTRY = {
    "question": "State the final answer to the following arithmetic problem: 4 + 3 =",
    "answer": "7",
    "metadata": {},
}


@pytest.mark.parametrize(
    ("right_at", "components"),
    [(1, {"score": 1.0, "first": 1.0}), (2, {"score": 1.0, "first": 0.0}), (9, {"score": 0.0, "first": 0.0})],
)
def test_reasoning_gym_gives_three_tries(tmp_path: Path, right_at: int, components: dict[str, float]) -> None:
    pytest.importorskip("reasoning_gym")

    def script(prompt: str) -> str:
        return f"<answer>{7 if prompt.count('That is wrong') + 1 >= right_at else 'x'}</answer>"

    prompt = make_prompt(0, answer="7", extra={"task": "chain_sum", "entry": ENTRY})
    trajectory = play(tmp_path, "reasoning-gym", prompt, script, max_tokens=2000)
    assert dict(trajectory.components) == pytest.approx(components, abs=0.02)
    assert len(trajectory.calls) == min(right_at, 3)


def test_reasoning_gym_needs_the_users_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="episode reasoning-gym, which evaluates parts of data"):
        allow_episode("reasoning-gym", Provenance(file=tmp_path / "recipe.toml"))
    allow_episode("reasoning-gym")
    allow_episode("reasoning-gym", Provenance(file=tmp_path / "recipe.toml"))


@pytest.mark.parametrize(
    ("recipe", "episode"),
    [("gsm8k_calculator_cpu", "calculator"), ("reasoning_gym_cpu", "reasoning-gym")],
)
def test_the_recipes_load(recipe: str, episode: str) -> None:
    config = load_config(bundled_folder("recipes") / f"{recipe}.toml", {}, ())
    assert config.env.episode == episode
    check_episode(config.env.episode)


def test_the_calculators_data_teaches_the_tool(tmp_path: Path) -> None:
    folder = prepare("gsm8k_calculator", out=tmp_path / "data", synthetic=True, difficulty="1", limit=4)
    prompts, info = read_prompts(folder / "train.parquet")
    assert len(prompts) == 4
    assert (info.dataset, info.reward) == ("gsm8k-calculator-synthetic", "gsm8k")
    assert "<tool_call>" in prompts[0].messages[0]["content"]
    assert "<tool_call>" not in prompts[0].messages[-1]["content"]
