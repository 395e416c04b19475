"""Two ranks each hold their shard of the base model. Together they equal one rank's model.

They read it from the files, or rank 0 sends it where the files hold other tensors than the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from skylite.model.fast_path_check import enable_shortcuts
from skylite.model.packing import pack_tokens
from skylite.model.policy import load_policy, score
from tests.cases import PROBE
from tests.decisions import resolved
from tests.integration.sharded_loading import examples_of, lora_of
from tests.integration.torchrun import run_module
from tests.small_run import lone_rank, settings
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.dist
FAMILIES = ("llama", "qwen2", "gemma", "qwen3_vl")
"""Untied, tied with biases, tied with a scaled embedding and an odd vocabulary head, with a tower."""
EXPERTS = "qwen3_moe"
"""A file of it holds each expert on its own, and the model holds all experts of a layer in one tensor."""
ALL = (*FAMILIES, EXPERTS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: make_tiny_model(tmp_path_factory.mktemp("models") / family, family) for family in ALL}


@pytest.fixture(scope="module")
def found(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("sharded") / "found.pt"
    done = run_module("sharded_loading", 2, str(out), *map(str, models.values()))
    assert done.stderr.count("each rank read its shard") == len(FAMILIES)
    assert done.stderr.count("rank 0 read the full model and sent each rank its shard") == 1
    return torch.load(out, weights_only=True)


def plain(name: str) -> str:
    """The name of a parameter without PEFT's additions."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


@pytest.mark.parametrize("family", FAMILIES)
def test_joined_shards_equal_the_files(family: str, found: Any, models: dict[str, Path]) -> None:
    stored = load_file(models[family] / "model.safetensors")
    weights = {plain(n): w for n, w in found[family]["weights"].items()}
    assert weights.keys() == stored.keys()
    assert all(torch.equal(weights[n], stored[n]) for n in stored)


def test_experts_are_loaded_once_and_sent(found: Any, models: dict[str, Path]) -> None:
    right = dict(AutoModelForCausalLM.from_pretrained(models[EXPERTS]).named_parameters())
    assert any(".experts." in n for n in right)
    weights = {plain(n): w for n, w in found[EXPERTS]["weights"].items()}
    assert weights.keys() == right.keys()
    assert all(torch.equal(weights[n], right[n]) for n in right)
    assert [found[family]["full_loads"] for family in ALL] == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("family", ALL)
def test_the_sharded_model_computes_the_same_as_the_full_one(
    family: str, found: Any, models: dict[str, Path]
) -> None:
    config = settings(lora=lora_of(family))
    with lone_rank() as dist:
        policy, _ = enable_shortcuts(
            load_policy(resolved(models[family], models[family]), config, dist), PROBE
        )
        tokens = pack_tokens(examples_of(family), policy.packing, policy.device, policy.images)
        logprobs = score(policy, tokens, 1.0)[0]
        logprobs.sum().backward()
    torch.testing.assert_close(found[family]["logprobs"], logprobs.detach(), atol=1e-5, rtol=1e-5)
    right = {n: p.grad for n, p in policy.lora.items() if "lora_B" in n and p.grad is not None}
    torch.testing.assert_close(found[family]["gradients"], right, atol=1e-4, rtol=1e-4)
    on_tower = [n for n in right if ".visual." in n]
    assert bool(on_tower) == (family == "qwen3_vl")
    assert all(right[n].abs().max() > 0 for n in on_tower), "beside a rank that has no image"


@pytest.mark.parametrize("family", ALL)
def test_each_rank_holds_about_half_of_the_weights(family: str, found: Any) -> None:
    assert found[family]["share"] < 0.52
