"""What a step samples: bounded, repeatable replacement of zero-std groups; penalties; vLLM requests."""

from __future__ import annotations

import asyncio
import io
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from skylite.config.train import TrainConfig
from skylite.engine.canary_reading import CanaryReading
from skylite.engine.engine_pool import EnginePool, SyncReport
from skylite.engine.interface import Sampling
from skylite.environments.single_turn import SingleTurn, overlong_penalty
from skylite.rollout.plan import RunPlan
from skylite.rollout.sampling import SampledStep, replace_zero_std_groups, sample_step
from skylite.rollout.session import Progress, Session
from skylite.rollout.step_metrics import StepTimings, completion_view, step_metrics
from skylite.run.rollout_file import read_examples, write_rollouts
from skylite.run.run_dir import AdapterVersion, RunDir
from skylite.types import Call, EncodedPrompt, Group, Prompt, Score, Trajectory
from skylite.ui.dashboard import Screen
from tests.decisions import resolved
from tests.logs import logged_messages
from tests.small_run import settings
from tests.unit.data_cases import prompt
from tests.unit.simulated_run import NUMBERS

PROMPTS = [prompt(id=str(i), messages=[{"role": "user", "content": str(i)}]) for i in range(14)]


def group(name: str, *rewards: float, penalties: Sequence[float] = (), tokens: int = 1) -> Group:
    """A group of prompt `name` with these rewards."""
    sample = Call(prompt_token_ids=[1], completion_token_ids=[2] * tokens, sampling_logprobs=[-0.5] * tokens)
    trajectories = tuple(
        Trajectory(calls=(sample,), reward=reward, penalty=penalty)
        for reward, penalty in itertools.zip_longest(rewards, penalties, fillvalue=0.0)
    )
    return Group(prompt=prompt(id=name), trajectories=trajectories)


def names(groups: Sequence[Group]) -> list[str]:
    return [g.prompt.id for g in groups]


def replaced(
    first: Sequence[Group], rounds: Sequence[Sequence[Group]], max_rounds: int
) -> tuple[SampledStep, list[int]]:
    """The outcome if further rounds sample these groups, and the number of groups asked of each round."""
    asked: list[int] = []

    async def sample_more(round_number: int, count: int) -> Sequence[Group]:
        assert round_number == len(asked) + 1
        asked.append(count)
        return rounds[round_number - 1][:count]

    return asyncio.run(replace_zero_std_groups(first, sample_more, max_rounds)), asked


def test_zero_std_groups_are_replaced_in_place_until_the_step_is_full() -> None:
    first = [group("a", 0, 1), group("b", 0, 0), group("c", 1, 1), group("d", 1, 0)]
    sampled, asked = replaced(first, [[group("e", 1, 1), group("f", 0, 1)], [group("g", 0, 1)]], max_rounds=4)
    assert names(sampled.groups) == ["a", "f", "g", "d"]
    assert sorted(names(sampled.left_out)) == ["b", "c", "e"]
    assert (asked, sampled.missing) == ([2, 1], 0)
    assert sampled.zero_std_frac == pytest.approx(3 / 7)


def test_resampling_rounds_are_bounded_and_missing_groups_counted() -> None:
    first = [group("a", 0, 1), group("b", 0, 0), group("c", 1, 1)]
    sampled, asked = replaced(
        first, [[group("d", 0, 0), group("e", 1, 1)], [group("f", 0, 0), group("g", 0, 1)]], max_rounds=2
    )
    assert (asked, sampled.missing, len(sampled.left_out)) == ([2, 2], 1, 4)
    assert names(sampled.groups) == ["a", "g", "c"]


def test_resampling_ends_when_the_data_set_runs_out() -> None:
    sampled, asked = replaced([group("a", 0, 0), group("b", 1, 1)], [[group("c", 0, 1)], []], max_rounds=9)
    assert names(sampled.groups) == ["c", "b"]
    assert (asked, sampled.missing) == ([2, 1], 1)


def test_nothing_more_is_sampled_for_a_full_step() -> None:
    sampled, asked = replaced([group("a", 0, 1)], [], max_rounds=4)
    assert (asked, list(sampled.left_out), sampled.missing) == ([], [], 0)


def test_zero_std_is_decided_on_the_reward_that_is_trained(tmp_path: Path) -> None:
    """Both sampling and trainer use reward plus penalty in float32."""
    import torch

    from skylite.trainer.micro_batches import arrange
    from skylite.trainer.trainer import make_algorithm

    cases = [
        group("only the penalty differs", 1.0, 1.0, penalties=[0.0, -0.5]),
        group("the penalty evens it out", 1.0, 0.5, penalties=[-0.5, 0.0]),
        group("rounding alone differs", 0.1 + 0.2, 0.3),
        group("rounding each before the sum differs", 0.9, 0.3, penalties=[-0.6, 0.0]),
        group("just over float32", 1.0, 1.0 + 2e-7),
    ]
    assert [g.is_zero_std for g in cases] == [False, True, True, True, False]
    write_rollouts(tmp_path / "r.parquet", cases)
    examples, config = read_examples(tmp_path / "r.parquet"), settings()
    table = arrange(examples, make_algorithm(config), config)
    assert table.zero_std == [g.is_zero_std for g in cases]
    assert torch.equal(table.rewards[0], torch.tensor([1.0, 0.5]))


NONE = [[math.nan] * 2, [math.inf] * 2, [-math.inf, math.inf], [1.0, math.nan], [1e39] * 2]


def test_a_group_with_a_nan_reward_reaches_the_anomaly_rules() -> None:
    first = [group(str(i), *rewards) for i, rewards in enumerate(NONE)]
    sampled, asked = replaced(first, [], max_rounds=4)
    assert (asked, list(sampled.groups), sampled.missing, sampled.zero_std_frac) == ([], first, 0, 0.0)
    sampled, _ = replaced([group("a", 0, 0)], [[group("b", math.nan, math.nan)]], max_rounds=1)
    assert names(sampled.groups) == ["b"]


@pytest.mark.parametrize("rewards", NONE)
def test_a_step_with_a_nan_reward_has_metrics(rewards: list[float]) -> None:
    step = SampledStep(groups=[group("a", 0.0, 1.0), group("b", *rewards)], left_out=[group("c", 1.0, 1.0)])
    metrics = metrics_of(step)
    assert all(math.isnan(metrics[k]) for k in ("reward/mean", "reward/std", "reward/sampled_mean"))
    assert metrics["completion/tokens_mean"] == 1.0
    assert completion_view(step.groups).answer


class FakeEngine:
    """Returns completions as long as the prompt's number. `score` decides which are correct."""

    tokens_in_flight = 0

    def __init__(self) -> None:
        self.requests: list[tuple[int, Sampling]] = []

    async def generate(
        self, model: str, prompt: EncodedPrompt, n: int, sampling: Sampling, version: int
    ) -> list[Call]:
        ids = list(prompt.token_ids)
        self.requests.append((ids[0], sampling))
        tokens = [7] * (ids[0] + 1)
        completion = Call(
            prompt_token_ids=ids,
            completion_token_ids=tokens,
            sampling_logprobs=[-0.5] * len(tokens),
            adapter_version=version,
        )
        return [completion] * n


class FakeScorer:
    """The first completion of a group is correct if `informative` accepts the prompt, all others wrong."""

    def __init__(self, informative: Callable[[int], bool]) -> None:
        self.informative = informative

    async def score(self, items: Sequence[tuple[Prompt, str]]) -> list[Score]:
        return [Score(float(i == 0 and self.informative(int(p.id)))) for i, (p, _) in enumerate(items)]


def sampled_step(
    folder: Path,
    informative: Callable[[int], bool],
    algorithm: dict[str, Any],
    rollout: dict[str, Any] | None = None,
) -> tuple[SampledStep, FakeEngine, str]:
    """Step 3 on a fake engine: the sampled step, the requests, the log."""
    settings = {"prompts_per_step": 4, "group_size": 2, "max_completion_tokens": 10} | (rollout or {})
    config = TrainConfig.model_validate({"algorithm": algorithm, "rollout": settings})
    run, engine = RunDir(folder), FakeEngine()
    plan = RunPlan(
        run=run,
        config=config,
        resolved=resolved(Path("m"), Path("a")),
        train=PROMPTS,
        held_out=[],
        rewards=("math",),
        first_step=1,
    )
    screen = Screen(9, Console(file=io.StringIO()))
    session = Session(
        plan=plan,
        engines=EnginePool([engine], 0.1),  # type: ignore[list-item]
        source=SingleTurn(config, NUMBERS, FakeScorer(informative)),
        progress=Progress(run, 9, screen, dict),
    )
    with logged_messages() as logged:
        return asyncio.run(sample_step(session, 3, AdapterVersion(2, folder))), engine, "\n".join(logged)


RESAMPLE = {"zero_std_groups": "resample", "max_resample_rounds": 2}


def test_a_step_is_repeatable_and_uses_no_prompt_or_seed_twice(tmp_path: Path) -> None:
    once, engine, _ = sampled_step(tmp_path, lambda i: i % 3 == 0, RESAMPLE)
    again, other, _ = sampled_step(tmp_path, lambda i: i % 3 == 0, RESAMPLE)
    assert engine.requests == other.requests
    assert names(once.groups) == names(again.groups)
    assert len(engine.requests) > 4
    for values in zip(*((i, s.seed) for i, s in engine.requests), strict=True):
        assert len(set(values)) == len(values)
    assert len(once.groups) == 4
    assert len(once.groups) + len(once.left_out) == len(engine.requests)


def test_without_resampling_a_step_is_one_round(tmp_path: Path) -> None:
    for zero_std_groups in ("keep", "drop"):
        sampled, engine, logged = sampled_step(
            tmp_path, lambda i: False, {"zero_std_groups": zero_std_groups}
        )
        assert (len(engine.requests), sampled.missing, logged) == (4, 0, "")


def test_groups_that_could_not_be_replaced_are_logged_and_recorded(tmp_path: Path) -> None:
    sampled, engine, logged = sampled_step(tmp_path, lambda i: False, RESAMPLE)
    assert len(engine.requests) == 12
    assert "step 3: 4 of 4 groups still have equal rewards after 8 more were sampled" in logged
    metrics = metrics_of(sampled)
    assert (
        metrics["groups/resampled"],
        metrics["groups/zero_std_sampled_frac"],
        metrics["groups/missing"],
    ) == (
        8,
        1.0,
        4,
    )
    assert metrics["perf/completion_tokens_per_s"] == sum(2 * (i + 1) for i, _ in engine.requests) / 2.0


def test_the_data_set_may_run_out(tmp_path: Path) -> None:
    _, engine, logged = sampled_step(tmp_path, lambda i: False, RESAMPLE | {"max_resample_rounds": 9})
    assert sorted(i for i, _ in engine.requests) == list(range(14))
    assert "after 10 more were sampled" in logged


def metrics_of(step: SampledStep) -> dict[str, Any]:
    """Metrics of step 1, which took 2 s to sample."""
    update = {"time/publish_s": 0.0, "time/canary_s": 0.0}
    canary = CanaryReading(gap_max=0.0, gap_mean=0.0, base_distance=0.0, projection=1.0)
    return step_metrics(
        1,
        step,
        update,
        SyncReport(load_s=0.1, canary_s=0.1, canary=canary),
        StepTimings(rollout_s=2.0, step_s=3.0),
    )


def test_reported_rewards_are_raw_and_include_every_sampled_group() -> None:
    metrics = metrics_of(
        SampledStep(
            groups=[group("a", 0.0, 1.0, penalties=[0.0, -0.5])], left_out=[group("b", 1.0, 1.0, tokens=3)]
        )
    )
    assert (metrics["reward/mean"], metrics["reward/sampled_mean"], metrics["reward/penalty_mean"]) == (
        0.5,
        0.75,
        -0.25,
    )
    assert metrics["completion/tokens_mean"] == 1.0
    assert metrics["perf/completion_tokens_per_s"] == (2 + 6) / 2.0


def test_overlong_completions_are_penalised_near_the_length_limit(tmp_path: Path) -> None:
    """Completion i has i + 1 tokens of 10, and the last 4 cost a quarter each."""
    sampled, _, _ = sampled_step(tmp_path, lambda i: False, {"overlong_buffer_frac": 0.4})
    for g in sampled.groups:
        length = g.trajectories[0].num_tokens
        expected = -min(1.0, max(0, length - 6) / 4)
        assert [r.penalty for r in g.trajectories] == pytest.approx([expected] * 2)
        assert overlong_penalty(length, 10, 0.4) == pytest.approx(expected)
    free, _, _ = sampled_step(tmp_path, lambda i: False, {})
    assert {r.penalty for g in free.groups for r in g.trajectories} == {0.0}


def test_sampling_settings_reach_every_request(tmp_path: Path) -> None:
    _, engine, _ = sampled_step(
        tmp_path, lambda i: False, RESAMPLE, {"temperature": 0.7, "top_p": 0.8, "top_k": 5, "stop": ["</a>"]}
    )
    assert {
        (s.temperature, s.top_p, s.top_k, s.max_tokens, s.stop_token_ids, s.stop) for _, s in engine.requests
    } == {(0.7, 0.8, 5, 10, (5,), ("</a>",))}
