"""What a run learns besides its adapter: weights of limits, and of the entropy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from skylite.algorithms.advantages import Components
from skylite.algorithms.learned import add_limits, entropy_coef, learn, limit_metrics
from skylite.config.algorithm import AlgorithmConfig
from skylite.config.train import TrainConfig
from skylite.model.process_group import Dist
from skylite.run.rollout_file import examples_of
from skylite.run.run_dir import RunDir
from skylite.trainer.loop import try_step
from skylite.trainer.step import train_step
from skylite.trainer.trainer import Trainer
from tests.cases import optimizer_of, policy_of
from tests.rows import groups_of, random_samples
from tests.small_run import settings
from tests.unit.peer_cases import Case, assert_same_result, make_case, ours
from tests.unit.peer_code import load_trl
from tests.unit.test_peers_trl import trl_loss

LIMITS = AlgorithmConfig(at_most={"long": 2.0}, at_least={"polite": 0.5}, limit_lr=0.1)
SCORES = Components(
    ("right", "long", "polite"),
    torch.tensor([[[1.0, 4.0, 0.0], [0.0, 1.0, 1.0]], [[1.0, 3.0, 0.0], [1.0, 2.0, 0.0]]]),
    torch.tensor([1.0, 0.0, 0.25]),
)
REWARDS = torch.tensor([[1.0, 0.25], [1.0, 1.0]])


def test_weights_move_by_the_violation_and_change_the_rewards() -> None:
    # mean of long 2.5: 0.5 too much; of polite 0.25: 0.25 too little
    metrics = limit_metrics(SCORES, LIMITS, {})
    assert metrics == {
        "limit_weight/at_most/long": 0.0,
        "limit_violation/at_most/long": 0.5,
        "limit_weight/at_least/polite": 0.0,
        "limit_violation/at_least/polite": 0.25,
    }
    learned = learn(LIMITS, {}, metrics)
    assert learned == pytest.approx(
        {"limit_weight/at_most/long": 0.05, "limit_weight/at_least/polite": 0.025}
    )
    rewards, components = add_limits(REWARDS, SCORES, LIMITS, learned)
    assert rewards.flatten().tolist() == pytest.approx([0.8, 0.25 - 0.05 + 0.025, 0.85, 0.9])
    assert components.weights.tolist() == pytest.approx([1.0, -0.05, 0.275])
    assert SCORES.weights.tolist() == [1.0, 0.0, 0.25], "the run's own weights stay"
    kept = {"limit_violation/at_most/long": -0.7, "limit_violation/at_least/polite": 0.0}
    after = learn(LIMITS, learned, kept)
    assert after == pytest.approx({"limit_weight/at_most/long": 0.0, "limit_weight/at_least/polite": 0.025})


def test_a_limit_is_held_in_the_mean() -> None:
    """A policy that writes x of length to earn x, by gradient: its reward has no maximum of its own."""
    config, learned, x = AlgorithmConfig(at_most={"long": 2.0}, limit_lr=0.05), dict[str, float](), 0.0
    for _ in range(2000):
        x += 0.05 * (1 - learned.get("limit_weight/at_most/long", 0.0) - 0.2 * (x - 2.0))
        learned = learn(config, learned, {"limit_violation/at_most/long": x - 2.0})
    assert x == pytest.approx(2.0, abs=1e-3)
    assert learned["limit_weight/at_most/long"] == pytest.approx(1.0, abs=1e-3)


def test_the_entropys_weight_grows_below_its_target_and_acts_only_there() -> None:
    config = AlgorithmConfig(entropy_coef=0.01, entropy_target=0.5, entropy_coef_delta=0.004)
    learned: dict[str, float] = {}
    seen = []
    for entropy in (0.6, 0.4, 0.5, 0.7, 0.2):
        seen.append(entropy_coef(config, learned))
        learned = learn(config, learned, {"policy/entropy": entropy})
    assert seen == pytest.approx([0, 0, 0.010, 0.014, 0])  # after the first step .006, then .010, .014, .010
    assert learned["policy/entropy_coef"] == pytest.approx(0.014)
    low = {"policy/entropy": 0.1, "policy/entropy_coef": 0.999}
    assert learn(config, low, {"policy/entropy": 0.1})["policy/entropy_coef"] == 1.0
    high = {"policy/entropy": 0.9, "policy/entropy_coef": 0.001}
    assert learn(config, high, {"policy/entropy": 0.9})["policy/entropy_coef"] == 0.0


def test_adaptive_entropy_equals_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    case: Case = make_case(12, 33, 2, torch.float64)
    trl, target = load_trl(), 2.0
    controls: dict[str, Any] = {
        "entropy_target": target,
        "entropy_coef_delta": 0.005,
        "entropy_coef_min": 0.0,
        "entropy_coef_max": 1.0,
    }
    config = AlgorithmConfig(entropy_coef=0.2, entropy_target=target)
    learned, coef, last = dict[str, float](), 0.2, float("inf")
    shapes = [1.0, 2.0, 1.0]
    for factor in shapes:
        now = replace(case, entropies=case.entropies * factor)
        theirs, logged = trl_loss(
            trl,
            now,
            loss_type="bnpo",
            entropy_coef=coef,
            _entropy_bonus_enabled=True,
            use_adaptive_entropy=True,
            _last_world_entropy=last,
            _entropy_window_stats=None,
            args=controls,
        )
        mine = ours(now, entropy_coef=entropy_coef(config, learned))
        assert_same_result(mine, theirs, now.mask)
        last = float(mine.sums["policy/entropy"] / now.mask.sum())
        learned = learn(config, learned, {"policy/entropy": last})
        coef = logged["entropy_coef"][-1]
        assert learned["policy/entropy_coef"] == pytest.approx(coef, abs=1e-12)
    assert coef == pytest.approx(0.205), "up, down and up again"


CONFIG = settings(
    algorithm={"at_most": {"long": 0.02}, "limit_lr": 3.0, "entropy_target": 9.0},
    reward={"functions": ["math", "format"], "weights": [1.0, 0.0]},
)


def trainer_of(model: Path, dist: Dist) -> Trainer:
    policy = policy_of(model, CONFIG, dist)
    return Trainer(config=CONFIG, dist=dist, policy=policy, optimizer=optimizer_of(policy, CONFIG))


def step_of(trainer: Trainer, step: int) -> dict[str, float]:
    metrics = train_step(trainer, examples_of(groups_of(random_samples(step))), step)
    trainer.learn(metrics)
    return metrics


def test_a_resumed_run_goes_on_with_the_same_numbers(tiny_llama: Path, tmp_path: Path, dist: Dist) -> None:
    trainer, run = trainer_of(tiny_llama, dist), RunDir(tmp_path)
    run.checkpoints.mkdir()
    first = step_of(trainer, 1)
    assert first["limit_weight/at_most/long"] == first["policy/entropy_coef"] == 0
    assert first["limit_violation/at_most/long"] > 0
    trainer.save(run, 1)
    second = step_of(trainer, 2)
    weight = 3.0 * first["limit_violation/at_most/long"]
    assert second["limit_weight/at_most/long"] == pytest.approx(weight)
    assert second["policy/entropy_coef"] == 0.005
    again = trainer_of(tiny_llama, dist)
    assert again.load(run.checkpoint_path(1)) == 1
    assert step_of(again, 2) == second
    assert again.learned == trainer.learned
    assert all(torch.equal(p, again.policy.lora[n]) for n, p in trainer.policy.lora.items())
    changed = trainer_of(tiny_llama, dist)
    changed.load(run.checkpoint_path(1))
    changed.learned["limit_weight/at_most/long"] = 0.0
    assert step_of(changed, 2)["optim/grad_norm"] != second["optim/grad_norm"], (
        "the weight reaches the gradient"
    )


def test_a_step_that_is_undone_teaches_nothing(
    tiny_llama: Path, tmp_path: Path, dist: Dist, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tiny_llama, dist)
    state: Any = SimpleNamespace(
        trainer=trainer, config=CONFIG, dist=dist, run=RunDir(tmp_path), optimizers=[trainer.optimizer]
    )
    monkeypatch.setattr("skylite.trainer.loop.publish_version", lambda *_: {})
    monkeypatch.setattr("skylite.trainer.loop.metric_anomaly", lambda *_: "made up")
    examples = examples_of(groups_of(random_samples(1)))
    assert try_step(state, examples, 1).anomaly == "made up"
    assert trainer.learned == {}
    monkeypatch.setattr("skylite.trainer.loop.metric_anomaly", lambda *_: "")
    assert try_step(state, examples, 1).anomaly == ""
    assert trainer.learned["limit_weight/at_most/long"] > 0


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        ({"name": "ppo", "at_most": {"a": 1.0}}, "at_most .* which algorithm.advantage=gae does not allow"),
        ({"name": "maxrl", "at_least": {"a": 1.0}}, "at_least .* which algorithm.advantage=maxrl"),
        (
            {"zero_std_groups": "drop", "at_most": {"a": 1.0}},
            "zero_std_groups=drop looks at the reward without",
        ),
    ],
)
def test_what_does_not_go_with_a_limit_is_refused(algorithm: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        TrainConfig.model_validate({"algorithm": algorithm})
    env = {"episode": "guess", "limit_reward": {"b": 1.0}}
    with pytest.raises(ValidationError, match=r"algorithm\.at_most names a, and .* are b"):
        TrainConfig.model_validate({"algorithm": {"at_most": {"a": 1.0}}, "env": env})
