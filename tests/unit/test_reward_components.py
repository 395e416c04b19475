"""Weighted reward lists: sums in real workers, in the rollout file and in the metrics."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from skylite.cli.samples import completion_text
from skylite.config.algorithm import AlgorithmConfig
from skylite.config.rollout import EnvConfig, RewardConfig
from skylite.config.train import TrainConfig
from skylite.errors import ConfigError, DataError, RunFailed
from skylite.report.completions import read_training
from skylite.rewards import OTHER_METRICS, component_names, load_components, score_components
from skylite.rewards.worker_pool import RewardPool
from skylite.rollout.plan import plan_run
from skylite.rollout.reward_check import check_calls
from skylite.rollout.sampling import SampledStep
from skylite.rollout.sources import reward_pool
from skylite.rollout.step_metrics import component_means, recovered_metrics
from skylite.run.rollout_file import examples_of, read_examples, read_rollouts, write_rollouts
from skylite.run.run_dir import RunDir
from skylite.trainer.anomaly import rollout_anomaly
from skylite.types import Call, Group, Score, Trajectory
from tests.settings import load_config
from tests.unit.data_cases import prompt
from tests.unit.run_cases import make_model, write_data
from tests.unit.test_sampling import metrics_of

OWN = r"""
import os

def length(prompt, completion):
    return float(len(completion))

def odd(prompt, completion):
    if completion == "raise": raise LookupError("odd one")
    return float(completion) if completion in ("nan", "inf", "-inf") else 0.5

def parts(completion):
    return {"right": float(completion == "7"), "short": 1.0 / (1 + len(completion)), "metric/length": 9.0}

def told(completion):
    return {"told": 0.5, "feedback": {"long": "x" * 9, "number": 3}.get(completion, f"{completion} \ud800")}

def told_too(completions):
    return [{"too": 0.0, "feedback": " \n" if c == "long" else "second"} for c in completions]

def only_told(completion):
    return {"feedback": "nothing else"}

def verls(completion):
    return {"score": 1.0, "acc": True}

def clash(completions):
    return [{"right": 1.0}] * len(completions)

def pid(prompt, completion):
    return float(os.getpid())
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(OWN, encoding="utf-8")
    return str(tmp_path / "mine.py")


@pytest.fixture
def pool(own: str) -> Iterator[RewardPool]:
    """A pool of two processes for gsm8k + 0.25 * format - 0.01 * length."""
    pool = RewardPool(["gsm8k", "format", f"{own}:length"], [1.0, 0.25, -0.01], num_workers=2)
    yield pool
    pool.close()


def scores_of(pool: RewardPool, *completions: str) -> list[Score]:
    return asyncio.run(pool.score([(prompt(id=f"t/{i}"), c) for i, c in enumerate(completions)]))


def test_workers_return_the_weighted_sum_and_the_score_of_each_function(pool: RewardPool) -> None:
    right, wrong, silent = scores_of(pool, "#### 7", "#### 8", "many words")
    assert right.reward == pytest.approx(1.0 + 0.25 - 0.06)
    assert wrong.reward == pytest.approx(0.25 - 0.06)
    assert silent.reward == pytest.approx(-0.10)
    assert right.components == {"gsm8k": 1.0, "format": 1.0, "length": 6.0}
    assert wrong.components == {"gsm8k": 0.0, "format": 1.0, "length": 6.0}
    assert list(silent.components) == ["gsm8k", "format", "length"], "the first one decides what is right"


def test_without_weights_every_function_has_weight_1(own: str) -> None:
    components = load_components(["gsm8k", "format", f"{own}:length"])
    assert score_components(components, [(prompt(), "#### 7")])[0].reward == 8.0
    (alone,) = score_components(load_components(["gsm8k"], [0.5]), [(prompt(), "#### 7")])
    assert (alone.reward, alone.components) == (0.5, {"gsm8k": 1.0})


@pytest.mark.parametrize(
    ("value", "weight"), [("nan", 1.0), ("inf", 1.0), ("-inf", -2.0), ("inf", 0.0), ("nan", 0.0)]
)
def test_a_nan_score_makes_the_sum_nan_and_the_anomaly_rules_find_it(
    own: str, value: str, weight: float
) -> None:
    components = load_components(["format", f"{own}:odd"], [1.0, weight])
    (score,) = score_components(components, [(prompt(), value)])
    assert not math.isfinite(score.reward)
    assert score.components["format"] == 0.0
    reason = rollout_anomaly(examples_of([group(score)]))
    assert "is nan" in reason or "is inf" in reason


def test_a_function_that_returns_a_dict_gives_named_components(own: str) -> None:
    functions = [f"{own}:parts", f"{own}:length"]
    (score,) = score_components(load_components(functions), [(prompt(), "7")])
    assert score == Score(1 + 0.5 + 1, {"right": 1.0, "short": 0.5, "metric/length": 9.0, "length": 1.0})
    weights = {"short": -2.0, "metric/length": 0.5, "length": 3.0}
    pool = RewardPool(functions, weights)
    try:
        assert scores_of(pool, "7")[0].reward == 1 - 2 * 0.5 + 0.5 * 9 + 3
    finally:
        pool.close()


def test_feedback_comes_beside_the_points_and_stays_with_the_rollout(own: str, tmp_path: Path) -> None:
    pool = RewardPool([f"{own}:told", "math", f"{own}:told_too"])
    try:
        scores = scores_of(pool, "seven", "long")
    finally:
        pool.close()
    assert [score.feedback for score in scores] == ["seven \ufffd\n\nsecond", "xxxxxxxxx"]
    assert scores[0].components == {"told": 0.5, "math": 0.0, "too": 0.0}
    step = [group(*scores, Score(0.0))]
    write_rollouts(tmp_path / "step.parquet", step)
    (again,) = read_rollouts(tmp_path / "step.parquet")
    assert [t.feedback for t in again.trajectories] == ["seven \ufffd\n\nsecond", "xxxxxxxxx", ""]
    shown = [completion_text(c) for c in read_training(tmp_path / "step.parquet", 1)]
    assert [text.rpartition("\nfeedback: ")[2] for text in shown[:2]] == [
        "seven \ufffd\n\nsecond\n",
        "xxxxxxxxx\n",
    ]
    assert "feedback" not in shown[2]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("told", r"told returned 3 as 'feedback', which must be a text \(prompt t/1\)"),
        ("only_told", "no finite number|returned .*nothing else"),
    ],
)
def test_a_feedback_that_is_no_text_or_stands_alone_is_refused(own: str, function: str, reason: str) -> None:
    pool = RewardPool([f"{own}:{function}"])
    try:
        with pytest.raises(RunFailed, match=reason):
            scores_of(pool, "7", "number")
    finally:
        pool.close()


def test_a_run_without_feedback_to_show_is_refused_or_warned_of(own: str, tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    write_data(tmp_path / "data", 4)
    config = TrainConfig.model_validate(
        {
            "model": {"name": str(tmp_path / "model")},
            "data": {"path": str(tmp_path / "data")},
            "algorithm": {"name": "sdpo", "teacher_sees_feedback": True},
            "reward": {"functions": ["gsm8k", "format"]},
        }
    )
    with pytest.raises(ConfigError, match=r"teacher_sees_feedback shows .* gsm8k and format returns none"):
        plan_run(config, RunDir(tmp_path / "run"))
    guess = config.model_copy(update={"env": EnvConfig(episode="guess"), "reward": RewardConfig()})
    with pytest.raises(ConfigError, match=r"teacher_sees_feedback shows .* guess returns none"):
        plan_run(guess, RunDir(tmp_path / "run"))
    (note,) = check_calls([f"{own}:length"], config, [prompt()], {})
    assert "no reward returned a feedback" in str(note)
    assert check_calls([f"{own}:told_too"], config, [prompt()], {}) == []
    column = AlgorithmConfig(name="opsd", teacher_column="hint")
    with pytest.raises(DataError, match="has no text in the column 'hint'"):
        plan_run(config.model_copy(update={"algorithm": column}), RunDir(tmp_path / "run"))


@pytest.mark.parametrize(
    ("functions", "reason"),
    [
        (["verls"], "'score' for prompt .*verl takes that as the reward"),
        (["parts", "clash"], "clash returned 'right' .* another component has"),
    ],
)
def test_names_that_mean_two_things_are_refused(own: str, functions: list[str], reason: str) -> None:
    components = load_components([f"{own}:{name}" for name in functions])
    with pytest.raises(RunFailed, match=reason):
        score_components(components, [(prompt(), "7")])


def test_an_exception_names_the_function_and_the_prompt(own: str) -> None:
    pool = RewardPool(["gsm8k", f"{own}:odd"])
    try:
        with pytest.raises(
            RunFailed, match=r"The reward function odd raised LookupError: odd one \(prompt t/1,"
        ):
            scores_of(pool, "#### 7", "raise")
    finally:
        pool.close()


def test_a_run_scores_with_the_reward_list_of_its_settings(own: str, tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    write_data(tmp_path / "data", 4)
    tree = {
        "model": {"name": str(tmp_path / "model")},
        "data": {"path": str(tmp_path / "data")},
        "reward": {"functions": ["math", f"{own}:length"], "weights": [2.0, -0.5]},
    }
    plan = plan_run(TrainConfig.model_validate(tree), RunDir(tmp_path / "run"))
    assert plan.rewards == ("math", f"{own}:length")
    pool = reward_pool(plan.scored, plan.run.logs)
    try:
        assert scores_of(pool, "7") == [Score(1.5, {"math": 1.0, "length": 1.0})]
    finally:
        pool.close()


def test_gdpo_refuses_a_run_with_one_component(own: str, tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    write_data(tmp_path / "data", 4)
    tree = {
        "model": {"name": str(tmp_path / "model")},
        "data": {"path": str(tmp_path / "data")},
        "algorithm": {"name": "gdpo"},
        "reward": {"functions": ["math"]},
    }
    with pytest.raises(ConfigError, match=r"this run has only math\. Return a dict with two"):
        plan_run(TrainConfig.model_validate(tree), RunDir(tmp_path / "run"))
    tree["reward"] = {"functions": ["math", f"{own}:length"]}
    assert plan_run(TrainConfig.model_validate(tree), RunDir(tmp_path / "run")).rewards[1].endswith("length")
    tree["reward"] = {"functions": [f"{own}:parts"], "weights": {"short": 2.0}}
    config = TrainConfig.model_validate(tree)
    assert plan_run(config, RunDir(tmp_path / "run")).rewards == (f"{own}:parts",)
    assert config.component_weights(["right", "short", "metric/length"]) == [1.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("reward", "algorithm", "reason"),
    [
        ({"weights": [1.0]}, {}, r"functions return right, short, metric/length\. Give the weights by name"),
        ({"weights": {"shrt": 1.0}}, {}, r"reward\.weights names shrt, and .* are right, short"),
        ({}, {"name": "gdpo", "component_advantages": {"x": "rloo"}}, "component_advantages names x"),
    ],
)
def test_settings_that_do_not_fit_the_components_are_refused(
    own: str, tmp_path: Path, reward: dict[str, object], algorithm: dict[str, object], reason: str
) -> None:
    make_model(tmp_path / "model")
    write_data(tmp_path / "data", 4)
    tree = {
        "model": {"name": str(tmp_path / "model")},
        "data": {"path": str(tmp_path / "data")},
        "algorithm": algorithm,
        "reward": {"functions": [f"{own}:parts"], **reward},
    }
    with pytest.raises(ConfigError, match=reason):
        plan_run(TrainConfig.model_validate(tree), RunDir(tmp_path / "run"))


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        (["gsm8k", "/a/mine.py:score"], ["gsm8k", "score"]),
        (["/a/mine.py:score", "/a/other.py:score"], ["mine.score", "other.score"]),
        (["format", "/a/mine.py:format"], ["format", "mine.format"]),
        (["/a/mine.py:score", "/b/mine.py:score"], ["/a/mine.py:score", "/b/mine.py:score"]),
        (["/a/mine.py:mean", "gsm8k"], ["mine.mean", "gsm8k"]),
    ],
)
def test_component_names_are_unique(specs: list[str], names: list[str]) -> None:
    assert component_names(specs) == names


def group(*scores: Score) -> Group:
    """A group of one-token trajectories with these scores."""
    return Group(
        prompt=prompt(),
        trajectories=tuple(
            Trajectory(
                calls=(Call(prompt_token_ids=[1], completion_token_ids=[2], sampling_logprobs=[-1.0]),),
                reward=score.reward,
                components=score.components,
                feedback=score.feedback,
            )
            for score in scores
        ),
    )


STEP = [
    group(
        Score(1.25, {"gsm8k": 1.0, "format": 1.0}),
        Score(0.25, {"gsm8k": 0.0, "format": 1.0}),
        Score(0.0, {"gsm8k": 0.0, "format": 0.0}),
        Score(1.0, {"gsm8k": 0.75, "format": 1.0}),
    )
]


def test_metrics_have_each_components_mean_and_the_first_defines_correctness() -> None:
    metrics = metrics_of(SampledStep(groups=STEP))
    assert metrics["reward/mean"] == 2.5 / 4
    assert metrics["reward/gsm8k"] == 1.75 / 4
    assert metrics["reward/format"] == 3 / 4
    assert metrics["reward/right_frac"] == 1 / 4, "1.0 in total is not right"


def test_the_rollout_file_keeps_the_order_of_components(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "step.parquet", STEP)
    again = read_rollouts(tmp_path / "step.parquet")
    assert [list(t.components.items()) for t in again[0].trajectories] == [
        list(t.components.items()) for t in STEP[0].trajectories
    ]
    examples = read_examples(tmp_path / "step.parquet")
    assert [e.components for e in examples] == [t.components for t in STEP[0].trajectories]
    recovered = recovered_metrics(1, again, {})
    assert (recovered["reward/gsm8k"], recovered["reward/right_frac"]) == (1.75 / 4, 1 / 4)


def test_one_function_has_no_component_metric_and_nan_is_reported() -> None:
    assert component_means(group(Score(1.0, {"gsm8k": 1.0})).trajectories) == {}
    bad = group(Score(math.nan, {"gsm8k": 1.0, "odd": math.nan}), Score(0.5, {"gsm8k": 0.0, "odd": 0.5}))
    means = component_means(bad.trajectories)
    assert means["reward/gsm8k"] == 0.5
    assert math.isnan(means["reward/odd"])


def test_no_component_can_hide_another_metric() -> None:
    names = {
        name.removeprefix("reward/") for name in metrics_of(SampledStep(groups=STEP)) if "reward/" in name
    }
    assert names - {"gsm8k", "format"} == set(OTHER_METRICS)


def test_the_list_is_set_on_the_command_line() -> None:
    reward = load_config(
        None, {}, ['reward.functions=["gsm8k", "format"]', "reward.weights=[1.0, -0.2]"]
    ).reward
    assert (reward.functions, reward.weights) == (["gsm8k", "format"], [1.0, -0.2])
    own = load_config(None, {}, ['reward.functions=["sub/mine.py:score"]']).reward
    assert own.functions == [f"{Path.cwd()}/sub/mine.py:score"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (['reward.functions=["gsm8k"]', "reward.weights=[1, 2]"], "has 2 numbers for the 1 names"),
        (["reward.weights=[1.0]"], "has 1 numbers for the 0 names"),
        (['reward.functions=["gsm8k", "gsm8k"]'], "names gsm8k twice"),
        (['reward.functions=["./a.py:f", "a.py:f"]'], r"names \S+/a\.py:f twice"),
        (['reward.functions=["gsm8k"]', "reward.weights=[nan]"], "finite number"),
        (['reward.functions=["gsm8k"]', "reward.weights=[inf]"], "finite number"),
        (["reward.functions=gsm8k"], "valid list"),
    ],
)
def test_bad_reward_lists_are_refused(settings: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config(None, {}, settings)
