"""raft and online_dpo on sampled groups have the gradients of sft and dpo on the rows that they choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from skylite.algorithms.dpo import OnlineDPO
from skylite.config.train import TrainConfig
from skylite.model.packing import Packing
from skylite.model.process_group import Dist
from skylite.run.rollout_file import examples_of
from skylite.trainer.step import train_step
from skylite.trainer.trainer import Trainer
from skylite.types import TrainingExample, completion_example
from tests.cases import optimizer_of, policy_of, relative_difference
from tests.rows import Row, groups_of, random_samples
from tests.small_run import settings


def groups_by_reward() -> list[list[Row]]:
    """The groups with unequal rewards, each from the worst to the best."""
    rows = [list(group) for _, group in groupby(random_samples(0), key=lambda row: row.group)]
    assert any(len({row.reward for row in group}) == 1 for group in rows), "one of them has no pair"
    unequal = [group for group in rows if len({row.reward for row in group}) > 1]
    assert len(unequal) > 1
    return [sorted(group, key=lambda row: row.reward) for group in unequal]


def example_of(row: Row, group: int, trajectory: int = 0) -> TrainingExample:
    return completion_example(row.prompt_token_ids, row.completion_token_ids, group, trajectory)


def gradient(
    model: Path, dist: Dist, packing: Packing, examples: Sequence[TrainingExample], config: TrainConfig
) -> tuple[torch.Tensor, dict[str, float]]:
    policy = policy_of(model, config, dist, packing)
    optimizer = optimizer_of(policy, config)
    metrics = train_step(Trainer(config=config, dist=dist, policy=policy, optimizer=optimizer), examples, 1)
    return optimizer.grads, metrics


@pytest.mark.parametrize(
    ("packing", "online", "prepared"),
    [("tree", "raft", "sft"), ("tree", "online_dpo", "dpo"), ("padded", "online_dpo", "ipo")],
)
def test_the_gradient_is_that_of_the_chosen_rows(
    packing: Packing, online: str, prepared: str, tiny_llama: Path, dist: Dist
) -> None:
    groups, more = groups_by_reward(), {"tokens_per_micro_batch": 64}
    if prepared == "sft":
        tops = [[row for row in group if row.reward == group[-1].reward] for group in groups]
        assert all(len(top) == 1 for top in tops)
        rows = [example_of(top[0], n) for n, top in enumerate(tops)]
    else:
        rows = [example_of(group[i], n, k) for n, group in enumerate(groups) for k, i in enumerate((-1, 0))]
    algorithm: dict[str, Any] = {"name": online}
    if prepared == "ipo":
        algorithm["preference_loss"] = "ipo"
    sampled = examples_of(groups_of(random_samples(0)))
    mine, metrics = gradient(tiny_llama, dist, packing, sampled, settings(algorithm=algorithm, trainer=more))
    theirs, of_rows = gradient(
        tiny_llama, dist, packing, rows, settings(algorithm={"name": prepared}, trainer=more)
    )
    assert float(theirs.norm()) > 0
    assert relative_difference(mine, theirs) < 1e-5
    assert metrics["loss/policy"] == pytest.approx(of_rows["loss/policy"], rel=1e-5)
    assert metrics["groups/zero_std_frac"] > 0


def test_a_step_of_equal_rewards_moves_nothing(tiny_llama: Path, dist: Dist) -> None:
    rows = [replace(row, reward=0.25) for row in random_samples(0) if row.group < 2]
    for name in ("online_dpo", "raft"):
        config = settings(algorithm={"name": name}, rollout={"prompts_per_step": 2})
        grads, metrics = gradient(tiny_llama, dist, "tree", examples_of(groups_of(rows)), config)
        assert float(grads.abs().max()) == 0
        assert metrics["loss/policy"] == 0


def test_online_dpo_takes_the_best_and_the_worst() -> None:
    rewards = torch.tensor([[0.5, 1.0, 0.0, 0.5], [1.0, 0.0, 1.0, 0.0], [0.2, 0.2, 0.2, 0.2]])
    signs = [[0, 1, -1, 0], [0, -1, 1, 0], [0, 0, 0, 0]]
    online = OnlineDPO(0.1)
    assert online.credit(rewards, rewards, None).tolist() == signs
    assert online.keep(rewards, rewards > 2).tolist() == [[s != 0 for s in group] for group in signs]
    assert online.is_sampled
    assert online.keep_together == "group"
