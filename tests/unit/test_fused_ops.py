"""Norms and gated MLPs that keep only their inputs: same results as transformers, gradients, memory."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from skylite.model.activation_checkpointing import recompute_fn_of
from skylite.model.fast_path_check import enable_shortcuts
from skylite.model.fused_ops import RMS_NORM_GAINS, fuse_mlps, fuse_norms, gated_activation, rms_norm
from skylite.model.policy import load_policy
from skylite.model.process_group import Dist
from tests.cases import PROBE, assert_same_gradients, model_with_norms
from tests.decisions import resolved
from tests.small_run import settings
from tests.tiny_models import FAMILIES

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(size)))


def test_gradients_equal_finite_differences() -> None:
    assert torch.autograd.gradcheck(
        lambda x: rms_norm(x, make(6), 0.1, recompute=False), make(3, 6).requires_grad_()
    )
    for act in (nn.SiLU(), nn.GELU("tanh")):
        inputs = make(3, 6).requires_grad_(), make(3, 7)[:, :6].requires_grad_()
        assert torch.autograd.gradcheck(
            lambda gate, up, act=act: gated_activation(gate, up, act, recompute=False), inputs
        )


def test_a_norm_by_hand() -> None:
    # mean of squares (9 + 16) / 2 = 12.5; with eps 3.5 the root is 4
    assert rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([2.0, 8.0]), 3.5, recompute=False).tolist() == [
        [1.5, 8.0]
    ]


@pytest.mark.parametrize("kind", ["norm", "gated"])
def test_recomputing_gives_the_same_bits(kind: str) -> None:
    x, up = make(5, 8).float(), make(5, 9)[:, :8].float()

    def made(recompute: bool) -> Tensor:
        return (
            rms_norm(x, up[0], 1e-5, recompute)
            if kind == "norm"
            else gated_activation(x, up, nn.functional.silu, recompute)
        )

    recompute_fn = recompute_fn_of(made(recompute=True))
    assert recompute_fn is not None
    assert torch.equal(recompute_fn(), made(recompute=True))
    assert recompute_fn_of(made(recompute=False)) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_norms_and_mlps_equal_the_models(family: str, tmp_path: Path) -> None:
    model, gain = model_with_norms(tmp_path, family)
    fused = copy.deepcopy(model)
    assert fuse_norms(fused, RMS_NORM_GAINS[gain], recompute=True) is not None
    undo = fuse_mlps(fused, recompute=True)
    assert undo is not None
    assert_same_gradients(fused, model)
    undo()
    assert all("forward" not in vars(m) for m in fused.modules() if type(m).__name__.endswith("MLP"))


def test_an_unusual_mlp_is_not_fused(tmp_path: Path, dist: Dist, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(vocab_size=260, initializer_range=0.2, **SIZES)
    ).save_pretrained(tmp_path)
    mlp = transformers.models.llama.modeling_llama.LlamaMLP
    monkeypatch.setattr(
        mlp, "forward", lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) * (1 + self.up_proj(x)))
    )
    policy, reasons = enable_shortcuts(load_policy(resolved(tmp_path, tmp_path), settings(), dist), PROBE)
    assert any(r.startswith("MLPs: unchanged") for r in reasons)
    assert all("forward" not in vars(m) for m in policy.model.modules() if type(m) is mlp)
