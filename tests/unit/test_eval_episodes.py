"""`skylite eval` in an environment: scores, kept conversations, and who may name the episode function."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skylite.config.rollout import RewardParameters
from skylite.errors import ConfigError
from skylite.evaluation.evaluate import EvalResult, write_results
from skylite.evaluation.results import Report, Scored
from skylite.evaluation.summary import lines_of
from skylite.evaluation.versions import ProblemSet, Subject, evaluate_subjects
from skylite.report.completions import read_held_out
from skylite.rollout.eval_data import DataChoice, read_data
from skylite.run.run_dir import AdapterVersion
from tests.settings import load_config, typed
from tests.unit.environment_cases import ScriptedEngine, environment, make_prompt
from tests.unit.export_cases import write_problems

GAME = """
    async def episode(task, chat):
        messages, number = list(task.messages), int(task.answer)
        for turn in range(number + 1):
            reply = await chat(messages)
            messages += [reply.message, {"role": "user", "content": f"again {turn}"}]
        if number == 9:
            raise ValueError("no such game")
        return {"won": float(number % 2), "seed": task.seed % 1000 / 1000}
"""


class LoadingEngine(ScriptedEngine):
    """Records which adapters are loaded and unloaded."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: f"turn {prompt.count('assistant')}")
        self.events: list[str] = []

    async def load_adapter(self, adapter: AdapterVersion) -> None:
        self.events.append(f"load {adapter.version}")

    async def unload_adapter(self, name: str) -> None:
        self.events.append(f"unload {name}")


def evaluate(
    folder: Path, engine: LoadingEngine, subjects: list[Subject], numbers: list[int], n: int = 1, **env: Any
) -> tuple[dict[str, EvalResult], int]:
    """Subject -> result, and the number of problems that were reported as done."""
    found: dict[str, EvalResult] = {}
    done: list[None] = []

    async def run() -> None:
        async with environment(folder, GAME, **env) as running:
            problems = ProblemSet(name="g", prompts=[make_prompt(i) for i in numbers], source=running)
            any_engine: Any = engine
            await evaluate_subjects(
                any_engine,
                subjects,
                [problems],
                n,
                max_loras=1,
                on_problem=lambda: done.append(None),
                on_result=lambda subject, _, result: found.update({subject.name: result}),
            )

    asyncio.run(run())
    return found, len(done)


def test_versions_play_the_same_games_greedily(tmp_path: Path) -> None:
    engine = LoadingEngine()
    subjects = [Subject(None), Subject(AdapterVersion(4, tmp_path))]
    found, done = evaluate(tmp_path, engine, subjects, [0, 1, 3])
    assert done == 6
    assert engine.events == ["load 4", "unload policy-v000004"]
    assert {s.temperature for s in engine.samplings} == {0.0}
    assert {m for m, _ in engine.models} == {"base", "policy-v000004"}
    for result in found.values():
        assert result.score.mean == pytest.approx(2 / 3), "the first component, not the sum"
        assert result.turns_mean == pytest.approx((1 + 2 + 4) / 3)
    seeds = [[t.components["seed"] for g in r.groups for t in g.trajectories] for r in found.values()]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3


def test_several_episodes_per_problem_sample_at_temperature_1(tmp_path: Path) -> None:
    engine = LoadingEngine()
    found, _ = evaluate(tmp_path, engine, [Subject(None)], [1], n=3)
    assert {s.temperature for s in engine.samplings} == {1.0}
    assert len({s.seed for s in engine.samplings}) == 6, "three episodes of two calls"
    assert [len(g.trajectories) for g in found["base"].groups] == [3]


def test_results_keep_every_turn_and_the_end(tmp_path: Path) -> None:
    found, _ = evaluate(tmp_path, LoadingEngine(), [Subject(None)], [1, 3], max_turns=3)
    write_results(tmp_path / "results.parquet", found["base"])
    first, second = read_held_out(tmp_path / "results.parquet", 0)
    assert (first.turns, first.end, first.is_truncated) == (("turn 1", "turn 2"), "stop", False)
    assert first.observed == ("user: question 1", "user: again 0")
    assert (second.turns, second.end, second.is_truncated) == (("turn 1", "turn 2", "turn 3"), "turns", True)


def test_a_failed_episode_is_left_out_counted_and_not_compared(tmp_path: Path) -> None:
    found, done = evaluate(tmp_path, LoadingEngine(), [Subject(None)], [1, 9], on_error="drop")
    whole, _ = evaluate(tmp_path, LoadingEngine(), [Subject(None)], [1, 0])
    assert (done, found["base"].left_out, found["base"].score.mean) == (2, 1, 1.0)
    report = Report(
        model="m", difficulty=[], data={"g": "data/g"}, rewards={"g": "guess"},
        parameters={"g": RewardParameters()}, split="test", seed=0,
    )  # fmt: skip
    subjects = (Subject(None), Subject(AdapterVersion(1, tmp_path)))
    for subject, result in zip(subjects, (found["base"], whole["base"]), strict=True):
        report.add(Scored(subject=subject, data="g", result=result))
    base, later = report.results
    assert "1 more left out" in "\n".join(lines_of(report.facts_of(base)))
    compared = report.compared(later)
    assert compared is not None
    assert (compared.difference, compared.only_model, compared.only_baseline) == (0.0, 0, 0)


def data_of(tmp_path: Path, spec: str, *settings: str, run: Path | None = None) -> Any:
    write_problems(tmp_path / "data", "test")
    config = load_config(None, {} if settings else {"env.episode": spec}, settings)
    provenance = replace(typed({}, settings), file=run)
    choice = DataChoice(
        paths=(tmp_path / "data",), split="test", limit=None, provenance=provenance, is_own=False
    )
    (data,) = read_data(choice, config)
    return data


def test_the_episodes_of_an_environment_score_its_data(tmp_path: Path) -> None:
    data = data_of(tmp_path, "guess")
    assert data.reward == "guess"


def test_an_episode_function_that_only_a_run_names_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "theirs.py"
    program.write_text("async def episode(task, chat):\n    return 0.0\n")
    spec = f"{program}:episode"
    with pytest.raises(ConfigError, match=r"theirs\.py"):
        data_of(tmp_path, spec, run=tmp_path / "run")
    own = data_of(tmp_path, spec, f'env.episode="{spec}"', run=tmp_path / "run")
    assert list(own.scored.programs) == [spec]
