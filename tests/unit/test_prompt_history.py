"""Prompts that depend on earlier steps: mixes by weight, retired prompts, sampling by pass rate; resumes."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from skylite.config.rollout import DataConfig
from skylite.config.train import TrainConfig
from skylite.data.prompt_history import PromptHistory, PromptRecord
from skylite.data.prompts import PromptFileInfo, write_rows
from skylite.errors import ConfigError, DataError
from skylite.rollout import loop
from skylite.rollout.plan import plan_run, read_train, train_data_hash
from skylite.rollout.resume import remove_after
from skylite.run.rollout_file import read_rollouts, write_rollouts
from skylite.run.run_dir import RunDir
from skylite.types import Call, Group, Prompt, Score, Trajectory
from tests.forks import in_a_fork
from tests.unit.data_cases import prompt
from tests.unit.simulated_run import PROMPTS, run_of

MIX = {"other": 0.5}


def history(
    folder: Path, count: int = 6, per_step: int = 2, seed: int = 0, others: int = 0, **data: Any
) -> PromptHistory:
    rows = [prompt(id=f"a{i}") for i in range(count)] + [prompt(id=f"b{i}") for i in range(others)]
    sets = {row.id: "other" if row.id.startswith("b") else "" for row in rows if "mix" in data}
    return PromptHistory(rows, DataConfig(**data), per_step, seed, folder / "history.jsonl", sets)


def group(row: Prompt, *scores: float) -> Group:
    call = Call(prompt_token_ids=[1], completion_token_ids=[2], sampling_logprobs=[-1.0])
    return Group(prompt=row, trajectories=tuple(Trajectory(calls=(call,), reward=s) for s in scores))


def ids(rows: Sequence[Prompt]) -> list[str]:
    return [row.id for row in rows]


def test_a_record_counts_visits_in_a_row_and_forgets_by_half() -> None:
    record = PromptRecord()
    assert record.pass_rate == 0.5
    record.add(4, 4)
    assert (record.pass_rate, record.solved_in_row) == (5 / 6, 1)
    record.add(4, 4)
    assert (record.pass_rate, record.solved_in_row) == (7 / 8, 2)  # (2 + 4 + 1) / (2 + 4 + 2)
    record.add(0, 0)  # left out
    assert (record.pass_rate, record.solved_in_row, record.visits) == (7 / 8, 2, 3)
    record.add(1, 4)
    assert (record.pass_rate, record.solved_in_row) == (5 / 9, 0)  # (3 + 1 + 1) / (3 + 4 + 2)


def test_a_prompt_retires_after_it_was_solved_k_times_in_a_row(tmp_path: Path) -> None:
    solved = history(tmp_path, count=3, per_step=3, retire_after=2, solved_at=0.9)
    a0, a1, a2 = solved.prompts
    scores = {1: (1.0, 0.0), 2: (1.0, 1.0), 3: (1.0, 0.8)}
    for step, of_a2 in scores.items():
        groups = [group(a2, *of_a2), *([group(a0, 1.0, 1.0), group(a1, 0.9, 0.95)] if step < 3 else [])]
        assert sorted(ids(solved.chosen(step))) == sorted(g.prompt.id for g in groups)
        solved.record(step, solved.chosen(step), groups)
    assert [solved.num_active(step) for step in range(1, 5)] == [3, 3, 1, 1]
    assert ids(solved.chosen(4)) == ["a2"]


def test_each_prompt_comes_once_before_any_comes_twice(tmp_path: Path) -> None:
    steps = history(tmp_path, count=6, per_step=2, retire_after=9)
    seen: list[str] = []
    for step in range(1, 7):
        chosen = steps.chosen(step)
        seen += ids(chosen)
        steps.record(step, chosen, [group(row, 0.0, 1.0) for row in chosen])
    assert sorted(seen[:6]) == sorted(seen[6:]) == [f"a{i}" for i in range(6)]
    assert seen[:6] != seen[6:]
    firsts = {tuple(ids(history(tmp_path / "b", seed=s, retire_after=9).chosen(1))) for s in range(4)}
    assert len(firsts) > 1


def test_pass_rates_weigh_by_p_times_1_minus_p(tmp_path: Path) -> None:
    """One of two prompts, over many seeds: 0.5 * 0.5 against 17/18 * 1/18 with 16 of 16 solved."""
    first = history(tmp_path, count=2, sampling="pass_rate")
    first.record(1, first.prompts, [group(first.prompts[0], *[1.0] * 16)])
    drawn = Counter(
        history(tmp_path, count=2, per_step=1, seed=seed, sampling="pass_rate").chosen(2)[0].id
        for seed in range(3000)
    )
    easy, even = (17 / 18) * (1 / 18), 0.25
    share = easy / (easy + even)
    assert drawn["a0"] / 3000 == pytest.approx(share, abs=4 * (share * (1 - share) / 3000) ** 0.5)


def test_data_sets_are_mixed_by_weight_exactly(tmp_path: Path) -> None:
    mixed = history(tmp_path, count=30, others=7, per_step=5, mix=MIX)
    counts, seen = Counter[str](), Counter[str]()
    for step in range(1, 7):
        chosen = mixed.chosen(step)
        assert len(set(ids(chosen))) == 5
        counts.update(name[0] for name in ids(chosen))
        seen.update(ids(chosen))
        assert abs(counts["a"] - 5 * step * 2 / 3) <= 1
        mixed.record(step, chosen, [group(row, 0.0, 1.0) for row in chosen])
    assert (counts["a"], counts["b"]) == (20, 10)
    assert {name: n for name, n in seen.items() if name[0] == "a"} == dict.fromkeys(
        [name for name in seen if name[0] == "a"], 1
    )
    assert {seen[f"b{i}"] for i in range(7)} == {1, 2}


def test_rounds_of_a_step_are_disjoint_and_run_out(tmp_path: Path) -> None:
    for data in ({"retire_after": 1}, {"sampling": "pass_rate"}, {"mix": MIX}):
        rows = history(tmp_path, count=3, others=2, per_step=2, **data)
        rounds = [ids(rows.chosen(1, n)) for n in range(4)]
        assert [len(r) for r in rounds] == [2, 2, 1, 0]
        assert len({name for r in rounds for name in r}) == 5


def test_a_missing_step_is_refused_and_a_repeated_one_counts_as_it_was_last(tmp_path: Path) -> None:
    rows = history(tmp_path, per_step=6, retire_after=1)
    rows.record(1, rows.prompts, [group(row, 1.0) for row in rows.prompts[:2]])
    assert rows.num_active(2) == 4
    rows.record(1, rows.prompts, [group(row, 1.0) for row in rows.prompts[:5]])
    with rows.path.open("a") as stream:
        stream.write('{"step": 2, "prom')
    again = history(tmp_path, per_step=6, retire_after=1)
    assert (rows.num_active(2), again.num_active(2)) == (1, 1)
    with pytest.raises(ConfigError, match="does not say which prompts step 2 had"):
        again.chosen(3)


# Runs


class EasyOnes:
    """Solves the prompts with an even number, always."""

    async def score(self, items: Sequence[tuple[Prompt, str]]) -> list[Score]:
        return [Score(1.0 if int(p.id) % 2 == 0 else float(i == 0)) for i, (p, _) in enumerate(items)]


class All:
    async def score(self, items: Sequence[tuple[Prompt, str]]) -> list[Score]:
        return [Score(1.0)] * len(items)


DATA = {"retire_after": 1, "sampling": "pass_rate", "mix": {"other": 2.0}}


def prompts_of(run: RunDir) -> dict[int, list[str]]:
    stored = run.stored_rollouts().items()
    return {step: ids([group.prompt for group in read_rollouts(path)]) for step, path in stored}


@pytest.mark.parametrize("moment", ["before the rollouts", "after the rollouts"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_that_was_killed_chooses_the_same_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, staleness: int
) -> None:
    quick = {"sample_s": 0.001, "train_s": 0.001, "scorer": EasyOnes(), "data": DATA}
    whole, _, _ = run_of(tmp_path / "whole", staleness, 8, **quick)  # type: ignore[arg-type]

    def dies(path: Path, groups: Sequence[Group], batches: Sequence[int]) -> None:
        if path.stem.endswith("5") and moment == "before the rollouts":
            os.kill(os.getpid(), signal.SIGKILL)
        write_rollouts(path, groups, batches)
        if path.stem.endswith("5"):
            os.kill(os.getpid(), signal.SIGKILL)

    def until_death() -> None:
        monkeypatch.setattr(loop, "write_rollouts", dies)
        run_of(tmp_path / "killed", staleness, 8, **quick)  # type: ignore[arg-type]

    assert in_a_fork(until_death, 60) == ""
    killed = RunDir(tmp_path / "killed")
    assert len(killed.prompt_history_path.read_text().splitlines()) == 5
    assert len(prompts_of(killed)) == 5 - (moment == "before the rollouts")
    # With staleness the fake trainer would run ahead on stored rollouts; the fake engine has two adapters.
    remove_after(killed, killed.default_adapters, 3, reuse_rollouts=staleness == 0)
    run_of(killed.root, staleness, 8, first_step=4, **quick)  # type: ignore[arg-type]
    assert prompts_of(killed) == prompts_of(whole)
    assert len({name for step in prompts_of(whole).values() for name in step}) >= 8


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_ends_well_when_too_few_prompts_are_left(tmp_path: Path, staleness: int) -> None:
    run, _, logged = run_of(
        tmp_path, staleness, 20, sample_s=0.001, train_s=0.001, scorer=All(), data={"retire_after": 1},
        eval_every=4,
    )  # fmt: skip
    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 8))
    assert [line["prompts/retired"] for line in lines] == list(range(0, 14, 2))
    assert "after step 7 the run is done: 0 of 14 prompts are not retired" in logged
    assert sorted(p.name for p in run.evals.glob("after-*.parquet")) == ["after-v000007.parquet"]
    assert sorted(name for step in prompts_of(run).values() for name in step) == sorted(ids(PROMPTS))


# Before a run


def write_data(folder: Path, names: Sequence[str], reward: str = "math") -> Path:
    info = PromptFileInfo(
        dataset="t", source_kind="generated", source="t", source_sha256="0", count=len(names), seed=0,
        split="train", reward=reward, system="", few_shot=[],
    )  # fmt: skip
    write_rows(folder / "train.parquet", [prompt(id=name) for name in names], info)
    return folder


def mixed_config(folder: Path, **sections: Any) -> TrainConfig:
    data = {"path": str(folder / "a"), "mix": {str(folder / "b"): 0.5}}
    return TrainConfig.model_validate({"data": data, "rollout": {"prompts_per_step": 2}, **sections})


def test_the_rows_of_a_mix_are_read_hashed_and_counted(tmp_path: Path, tiny_llama: Path) -> None:
    write_data(tmp_path / "a", ["1", "2"])
    write_data(tmp_path / "b", ["3"])
    model = {"model": {"name": str(tiny_llama)}, "num_steps": 2, "eval": {"limit": 0}}
    plan = plan_run(mixed_config(tmp_path, **model), RunDir(tmp_path / "run"))
    assert ids(plan.train) == ["1", "2", "3"]
    assert plan.mixed == {"1": "", "2": "", "3": str(tmp_path / "b")}
    assert any(f"mixed with {tmp_path / 'b'} (weight 0.5)" in note.text for note in plan.resolved.notes)
    before = train_data_hash(plan.config)
    write_data(tmp_path / "b", ["4"])
    assert train_data_hash(plan.config) != before


def test_mixes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_data(tmp_path / "a", ["1", "2"])
    write_data(tmp_path / "b", ["2"])
    with pytest.raises(DataError, match=r"both have a prompt 2"):
        read_train(mixed_config(tmp_path))
    write_data(tmp_path / "b", ["3"], reward="gsm8k")
    with pytest.raises(DataError, match=r"was prepared for the reward gsm8k, and .* for math"):
        read_train(mixed_config(tmp_path))
    assert len(read_train(mixed_config(tmp_path, reward={"functions": ["math"]}))[0]) == 3
    (tmp_path / "b" / "train.parquet").unlink()
    with pytest.raises(DataError, match="does not exist"):
        read_train(mixed_config(tmp_path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": {"mix": {"b": 0.0}}}, "greater than 0"),
        ({"data": {"retire_after": 1}, "algorithm": {"name": "sft"}}, "samples nothing"),
        ({"data": {"sampling": "pass_rate"}, "algorithm": {"name": "dpo"}}, "samples nothing"),
        ({"data": {"path": "b", "mix": {"b": 1.0}}}, "names data.path"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate(settings)
