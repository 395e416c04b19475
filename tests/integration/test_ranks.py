"""Every algorithm gives the same gradients on two ranks as in the plain reference, or as on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import plain_model, policy_of, reference_gradient, relative_difference
from tests.integration.ranks import CALL_TREES, CASES, REPLICATED, SEVERAL_TURNS, rows_of
from tests.integration.torchrun import run_module
from tests.small_run import lone_rank, settings

pytestmark = pytest.mark.dist
NO_REFERENCE = ("ppo", "gkd", "two updates", f"{SEVERAL_TURNS}ppo")
ON_ONE_RANK = (
    *NO_REFERENCE,
    "grpo",
    "gspo",
    "clip_cov",
    "reject",
    f"{SEVERAL_TURNS}kl_cov",
    f"{CALL_TREES}0",
)
"""Compared with one rank, metrics too; the reference computes the other gradients."""


@pytest.fixture(scope="module")
def by_ranks(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> dict[int, Any]:
    """What `ranks.py` finds with 1 and 2 processes."""
    found = {}
    for num_ranks in (1, 2):
        out = tmp_path_factory.mktemp("ranks") / "found.pt"
        run_module("ranks", num_ranks, str(tiny_llama), str(out), *(ON_ONE_RANK if num_ranks == 1 else CASES))
        found[num_ranks] = torch.load(out, weights_only=True)
    return found


@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_two_ranks_give_the_gradient_and_the_metrics_of_one(name: str, by_ranks: dict[int, Any]) -> None:
    one, two = by_ranks[1]["cases"][name], by_ranks[2]["cases"][name]
    assert relative_difference(two["grads"], one["grads"]) < 1e-5
    if one["critic"] is not None:
        assert relative_difference(two["critic"], one["critic"]) < 1e-5
    assert one["metrics"].keys() == two["metrics"].keys()
    timed = {"time/teacher_s"}
    for key in one["metrics"].keys() - {"tokens/unique"} - timed:  # two ranks hold the shared prefix twice
        assert two["metrics"][key] == pytest.approx(one["metrics"][key], rel=1e-4, abs=1e-6), key


def test_on_each_rank_the_examples_of_a_group_share_the_object_of_their_image(
    by_ranks: dict[int, Any],
) -> None:
    assert by_ranks[2]["images"] == 2


def test_ranks_shard_the_base_unless_each_holds_it(by_ranks: dict[int, Any]) -> None:
    assert {name for name, found in by_ranks[2]["cases"].items() if not found["sharded"]} == {REPLICATED}
    assert not by_ranks[1]["cases"]["grpo"]["sharded"]


@pytest.mark.parametrize("name", [n for n in CASES if n not in NO_REFERENCE])
def test_two_ranks_give_the_gradient_of_the_plain_reference(
    name: str, by_ranks: dict[int, Any], tiny_llama: Path
) -> None:
    config = settings(**CASES[name])
    rows = rows_of(name)
    with lone_rank() as dist:
        policy = policy_of(tiny_llama, config, dist)
        expected = reference_gradient(plain_model(tiny_llama, policy, config), policy, config, rows)
    assert relative_difference(by_ranks[2]["cases"][name]["grads"], expected) < 1e-5
