"""The trainer's gaps from the engine by depth of context, and a sliding window that only one side has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from skylite.engine.canary_limits_float32 import MIN_NOISE
from skylite.model.fast_path_check import enable_shortcuts
from skylite.model.policy import Policy, load_policy
from skylite.model.process_group import Dist
from skylite.rollout.judge_rollouts import RolloutJudge
from skylite.run.rollout_file import examples_of
from skylite.trainer.micro_batches import KEY_STRIDE, arrange
from skylite.trainer.optimizer import make_optimizer
from skylite.trainer.rollout_gaps import depth_edges, rollout_gaps
from skylite.trainer.step import train_step
from skylite.trainer.trainer import Trainer, make_algorithm
from skylite.types import Call, Group
from tests.decisions import resolved
from tests.rows import Row, groups_of
from tests.small_run import settings
from tests.tiny_models import make_tiny_model

WINDOW = 64


def test_the_bins_begin_at_powers_of_two_and_halfway_between() -> None:
    assert depth_edges(100) == [0, 32, 64, 96, 128, 192]
    assert depth_edges(1000)[6:] == [256, 384, 512, 768, 1024, 1536]


def rows(prompts: list[int], completion: int = 4) -> list[Row]:
    """Groups of two trajectories, with prompts of these lengths."""
    return [
        Row(
            group=group,
            prompt_token_ids=[65 + k % 26 for k in range(length)],
            completion_token_ids=[97 + (7 * k + column) % 26 for k in range(completion)],
            sampling_logprobs=[-1.0] * completion,
            reward=float(column),
        )
        for group, length in enumerate(prompts)
        for column in range(2)
    ]


def found(
    groups: list[Group], gaps: dict[int, list[float]], dist: Dist, step: int = 1, **sections: Any
) -> Any:
    keys = [number * KEY_STRIDE + k for number, values in gaps.items() for k in range(len(values))]
    values = [x for row in gaps.values() for x in row]
    config = settings(**sections)
    scored = [(torch.tensor(keys), torch.tensor(values))]
    table = arrange(examples_of(groups), make_algorithm(config), config)
    return rollout_gaps(table, scored, step, config, dist)


def test_gaps_by_depth_by_hand(dist: Dist) -> None:
    """Prompts of 30 and 70 tokens, four sampled tokens each: depths 30 to 33, and 70 to 73."""
    gaps = {0: [1.0, -1.0, 2.0, 2.0], 3: [0.0, 0.0, -4.0, 0.0]}
    bins = found(groups_of(rows([30, 70])), gaps, dist)["bins"]
    assert [(b["from"], b["tokens"], b["gap_mean"], b["gap_max"]) for b in bins] == [
        (0, 2, 1.0, 1.0),
        (32, 2, 2.0, 2.0),
        (64, 4, 1.0, 4.0),
    ]
    assert (bins[2]["worst_depth"], bins[2]["worst_prompt"]) == (72, "test/1")


def test_one_wild_token_counts_as_ten_means(dist: Dist) -> None:
    gaps = {0: [0.0] * 100}
    gaps[0][5] = 100.0
    [b] = found(groups_of(rows([128, 10], completion=100)[:2]), gaps, dist)["bins"][:1]
    assert b["gap_mean"] * b["tokens"] == pytest.approx(10.0)


def test_tokens_of_an_older_version_are_left_out(dist: Dist) -> None:
    groups = groups_of(rows([30]))
    gaps = {0: [1.0] * 4, 1: [3.0] * 4}
    assert "older version" in found(groups, gaps, dist, step=2)["not_judged"]

    def newer(sample: Call) -> Call:
        return replace(sample, adapter_version=1)

    old, new = groups[0].trajectories
    mixed = replace(groups[0], trajectories=(old, replace(new, calls=tuple(map(newer, new.calls)))))
    assert {b["gap_mean"] for b in found([mixed], gaps, dist, step=2)["bins"]} == {3.0}


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}])
def test_a_cut_distribution_is_not_judged(dist: Dist, cut: dict[str, float]) -> None:
    rollout = {"prompts_per_step": 4, "group_size": 4, **cut}
    assert "top_p" in found(groups_of(rows([30])), {0: [9.0] * 4}, dist, rollout=rollout)["not_judged"]


def engine_logprobs(model_path: Path, own: Row, window: int, temperature: float) -> list[float]:
    """As an engine with this window computes them."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="eager")
    model.config.sliding_window = window
    for layer in model.model.layers:
        if layer.self_attn.sliding_window is not None:
            layer.self_attn.sliding_window = window
    ids = torch.tensor([own.prompt_token_ids + own.completion_token_ids])
    with torch.no_grad():
        table = torch.log_softmax(model(ids, use_cache=False).logits[0, :-1] / temperature, dim=-1)
    chosen = table.gather(1, ids[0, 1:, None])[:, 0]
    return [float(x) for x in chosen[len(own.prompt_token_ids) - 1 :]]


@pytest.fixture(scope="module")
def cohere2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("cohere2"), "cohere2")


def policy_of(model: Path, folder: Path, dist: Dist) -> Policy:
    policy = load_policy(resolved(model, folder), settings(), dist)
    return enable_shortcuts(policy, list(range(20, 40)))[0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("window", [WINDOW, 4096])
def test_a_window_that_the_engine_lacks_is_found_where_it_begins(
    cohere2: Path, tmp_path: Path, dist: Dist, window: int, temperature: float
) -> None:
    """The canary's 24 tokens never reach the window, so it cannot tell."""
    rollout = {"prompts_per_step": 4, "group_size": 2, "temperature": temperature}
    config, policy = settings(rollout=rollout), policy_of(cohere2, tmp_path, dist)
    given = [
        replace(r, sampling_logprobs=engine_logprobs(cohere2, r, window, temperature))
        for r in rows([20, 40, 90, 130], completion=24)
    ]
    optimizer = make_optimizer("policy", policy.lora, 1e-3, 1e9, config.optim)
    facts: dict[str, Any] = {}
    trainer = Trainer(config=config, dist=dist, policy=policy, optimizer=optimizer)
    train_step(trainer, examples_of(groups_of(given)), 1, facts)
    bins = facts["rollout_gaps"]["bins"]
    judge = RolloutJudge("float32", temperature, "stop")
    warning = judge.judge(1, bins, noise=MIN_NOISE)
    if window == WINDOW:
        assert warning == "", bins
        assert sum(b["tokens"] for b in bins) == 8 * 24
    else:
        assert "from a context of 64 tokens on" in warning or "from a context of 96 tokens on" in warning
        assert np.mean([b["gap_mean"] for b in bins if b["from"] < WINDOW]) < 1e-5
