"""What a user sees of episodes: `skylite samples` and the data of the report's page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from skylite.cli.main import app
from skylite.report.completions import read_training
from skylite.report.html import _completion
from skylite.run.rollout_file import write_rollouts
from skylite.types import Call, Group, Prompt, Trajectory
from tests.made_up_runs import write_made_up_run

PROMPT = Prompt(id="p7", messages=[{"role": "user", "content": "which?"}], answer="4", source="guess")
FIRST = Call(prompt_token_ids=[1], completion_token_ids=[2, 3], sampling_logprobs=[-1.0, -1.0], text="nine")
SECOND = replace(FIRST, prompt_token_ids=[1, 2, 3, 4], text="four", observed="user: lower\ntool: \x1b[2J5")
TRAJECTORIES = (
    Trajectory(calls=(FIRST, SECOND), reward=0.75, turn_rewards=(0.25, 0.5)),
    Trajectory(calls=(FIRST, SECOND), reward=0.0, end="turns"),
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = write_made_up_run(tmp_path, "healthy", steps=2)
    write_rollouts(made.rollout_path(2), [Group(prompt=PROMPT, trajectories=TRAJECTORIES)])
    return tmp_path / "healthy"


def samples(run: Path, *more: str) -> str:
    done = CliRunner().invoke(app, ["samples", str(run), *more])
    assert done.exit_code == 0, done.output
    return done.output


def test_samples_show_turns_their_rewards_and_the_end(run: Path) -> None:
    said = samples(run)
    assert "reward 0.75  2 turns  4 tokens\n" in said
    told = "user: lower\ntool:  [2J5"  # without the escape that clears a screen
    assert f"[turn 1, reward 0.25] nine\n{told}\n[turn 2, reward 0.5] four\n" in said
    assert "reward 0  2 turns  4 tokens, truncated by the limit of turns\n" in said
    assert f"[turn 1] nine\n{told}\n[turn 2] four\n" in said


def test_a_search_finds_what_was_said_and_not_its_labels(run: Path) -> None:
    assert samples(run, "--contains", "lower").count("--- step") == 2
    assert samples(run, "--contains", "[turn") == "No completion matches.\n"


def test_samples_as_json_hold_the_same(run: Path) -> None:
    found: list[dict[str, Any]] = json.loads(samples(run, "--json"))
    assert [(c["turn_rewards"], c["end"], c["is_truncated"]) for c in found] == [
        ([0.25, 0.5], "stop", False),
        ([], "turns", True),
    ]


def test_the_page_gets_turn_rewards_and_the_end(run: Path) -> None:
    found = [_completion(c) for c in read_training(run / "rollouts" / "step-000002.parquet", 2)]
    assert [(c["turn_rewards"], c["end"], c["truncated"]) for c in found] == [
        ([0.25, 0.5], "stop", False),
        ([], "turns", True),
    ]
