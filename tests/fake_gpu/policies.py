"""A policy of any shape on a fake GPU, through skylite's own code: loading, adapters, shortcuts, packing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from skylite.algorithms.losses import BatchSize
from skylite.config.train import TrainConfig
from skylite.model import fast_path_check
from skylite.model import policy as policy_module
from skylite.model.attention_backends import register_backends
from skylite.model.fast_path_check import enable_shortcuts
from skylite.model.packing import Packing
from skylite.model.policy import Policy, load_policy
from skylite.model.process_group import Dist
from skylite.trainer.micro_batches import MicroBatch, Table, make_micro_batch
from skylite.trainer.trainer import make_algorithm
from tests.decisions import resolved
from tests.fake_gpu.mode import GPU
from tests.one_rank import OneRank


def one_rank() -> Dist:
    return cast(Dist, OneRank(GPU))


def fake_policy(
    model_config: Any,
    config: TrainConfig,
    packing: Packing,
    dtype: torch.dtype = torch.bfloat16,
    probes: bool = False,
) -> Policy:
    """The policy with all shortcuts on. Call it inside `fake_gpu`.

    `probes`: run them too, which takes most of the time. Without values their result is ignored.
    """

    def load_base(path: str, dtype: torch.dtype, *_: Any) -> tuple[Any, str]:
        register_backends()
        with GPU:
            base = AutoModelForCausalLM.from_config(model_config, dtype=dtype)
        return base.eval(), ""

    def gap(
        policy: Policy, probe: list[int], reference: Tensor, attention: str | None = None
    ) -> tuple[float, str]:
        if attention is not None:
            policy.model.get_base_model().set_attn_implementation(attention)
        if probes:
            assert probe_logprobs(policy, probe).shape == reference.shape
        return 0.0, "fake"

    probe_logprobs = fast_path_check._probe_logprobs
    decided = resolved(
        Path(),
        Path(),
        placement={"device": "cuda", "dtype": "bfloat16" if dtype == torch.bfloat16 else "float32"},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_module, "load_base", load_base)
        patch.setattr(fast_path_check, "_gap", gap)
        patch.setattr(fast_path_check, "_probe_logprobs", probe_logprobs if probes else lambda *_: None)
        policy = load_policy(decided, config, one_rank())
        policy, _ = enable_shortcuts(policy, list(range(24)))
    if packing == "padded":
        policy.model.get_base_model().set_attn_implementation("sdpa")
        policy = replace(policy, packing="padded")
    return policy


def micro_batch(table: Table, numbers: Sequence[int], policy: Policy, config: TrainConfig) -> MicroBatch:
    """The micro-batch of these trajectories, as `pack` makes it."""
    size = BatchSize(1000, len(numbers), config.rollout.max_completion_tokens)
    examples = [e for n in numbers for e in table.trajectories[n]]
    return make_micro_batch(table, examples, size, make_algorithm(config), policy)
