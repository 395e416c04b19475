"""Frozen matrices held in bfloat16: same results as float32 in half the bytes, if every value fits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from skylite.model import fast_path_check
from skylite.model.bf16_weights import store_in_bf16
from skylite.model.chunked_logprobs import head_logprobs
from skylite.model.fast_path_check import enable_shortcuts
from skylite.model.policy import load_policy
from skylite.model.process_group import Dist
from tests.cases import PROBE, gradients_after_step, policy_of
from tests.decisions import resolved
from tests.small_run import settings
from tests.tiny_models import FAMILIES, make_tiny_model

Module = TypeVar("Module", bound=nn.Module)


def rounded(module: Module) -> Module:
    """The frozen module with values that bfloat16 represents exactly."""
    for param in module.parameters():
        param.data = param.data.bfloat16().float()
    return module.requires_grad_(False)


def rounded_model(folder: Path, family: str = "llama") -> Path:
    """A tiny model saved as float32 whose values bfloat16 represents exactly."""
    make_tiny_model(folder, family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rounded(model).save_pretrained(folder)
    return folder


def held(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


def test_output_and_gradient_equal_float32_and_the_float32_matrix_is_not_kept() -> None:
    torch.manual_seed(0)
    in_fp32 = rounded(
        nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 12), nn.SiLU(), nn.Linear(12, 6, bias=False))
    )
    in_bf16 = copy.deepcopy(in_fp32)
    assert store_in_bf16(in_bf16.modules()) is not None
    assert held(in_bf16) - 12 * 4 == (held(in_fp32) - 12 * 4) / 2  # the bias stays float32
    kept: list[torch.dtype] = []

    def learn(model: nn.Sequential) -> tuple[Tensor, Tensor]:
        shift = torch.linspace(-1, 1, 8, requires_grad=True)
        out = model[1:](model[0](torch.tensor([3, 1, 8])) + shift)
        return out, torch.autograd.grad(out.square().sum(), shift)[0]

    def note(tensor: Tensor) -> Tensor:
        if tensor.shape[0] in (6, 12):
            kept.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        ours = learn(in_bf16)
    assert all(torch.equal(a, b) for a, b in zip(ours, learn(in_fp32), strict=True))
    assert kept == [torch.bfloat16, torch.bfloat16]


def test_matrices_that_do_not_fit_or_train_or_have_a_custom_class_stay_float32() -> None:
    class Scaled(nn.Embedding):
        pass

    linears = {k: rounded(nn.Linear(4, 4)) for k in ("fits", "fine", "learns", "tied")}
    model = nn.ModuleDict({**linears, "scaled": Scaled(4, 4), "norm": rounded(nn.LayerNorm(4))})
    linears["fine"].weight[0, 0] = 1 + 2**-20
    linears["learns"].weight.requires_grad_(True)
    model["scaled"].weight = model["tied"].weight
    assert store_in_bf16(model.modules()) is not None
    types = {name: module.weight.dtype for name, module in model.items()}
    assert {name for name, kind in types.items() if kind == torch.bfloat16} == {"fits"}
    assert store_in_bf16([model["fine"], model["norm"]]) is None


def test_tied_matrices_stay_tied_and_undo_restores_float32() -> None:
    model = nn.ModuleDict({"embed": rounded(nn.Embedding(9, 8)), "head": nn.Linear(8, 9, bias=False)})
    model["head"].weight = model["embed"].weight
    before = model["head"].weight.detach().clone()  # type: ignore[operator]
    undo = store_in_bf16(model.modules())
    assert undo is not None
    assert model["head"].weight is model["embed"].weight
    assert held(model) == 9 * 8 * 2
    undo()
    assert model["head"].weight is model["embed"].weight
    assert torch.equal(model["head"].weight, before)  # type: ignore[arg-type]
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize("way", ["blocks", "entropy", "softcap"])
def test_a_bf16_lm_head_gives_the_same_numbers_as_float32(way: str) -> None:
    torch.manual_seed(0)
    weight, rows, targets = (
        torch.randn(40, 8).bfloat16(),
        torch.tensor([0, 2, 2, 4]),
        torch.tensor([7, 1, 39, 0]),
    )
    x = torch.randn(5, 8)

    def found(weight: Tensor) -> list[Tensor]:
        hidden = x.clone().requires_grad_()
        logprobs, entropies = head_logprobs(
            hidden, weight, None, rows, targets, 0.7, 3.0 if way == "softcap" else None
        )
        loss = logprobs.sum() + (entropies.sum() if way == "entropy" else 0)
        return [logprobs, entropies, *torch.autograd.grad(loss, hidden)]

    assert all(torch.equal(a, b) for a, b in zip(found(weight), found(weight.float()), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_gives_the_same_gradient_and_the_base_takes_half_the_bytes(
    family: str, tmp_path: Path, dist: Dist, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = rounded_model(tmp_path, family)
    config = settings(algorithm={"kl_coef": 0.1, "entropy_coef": 0.01})  # also runs the base model
    in_bf16 = policy_of(model, config, dist)
    ours = gradients_after_step(in_bf16, config, dist)[0]
    monkeypatch.setattr(fast_path_check, "store_in_bf16", lambda modules: None)
    in_fp32 = policy_of(model, config, dist)
    assert torch.equal(ours, gradients_after_step(in_fp32, config, dist)[0])
    assert held(in_bf16.model) < 0.7 * held(in_fp32.model)  # norms and LoRA stay float32


def test_pefts_layer_accepts_bf16_weights(
    tmp_path: Path, dist: Dist, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout the fused operation is not used."""
    model, config = rounded_model(tmp_path), settings(lora={"dropout": 0.3})
    ours = gradients_after_step(policy_of(model, config, dist), config, dist)[0]
    monkeypatch.setattr(fast_path_check, "store_in_bf16", lambda modules: None)
    assert torch.equal(ours, gradients_after_step(policy_of(model, config, dist), config, dist)[0])


def test_the_choice_is_logged_and_a_model_that_needs_float32_keeps_it(tmp_path: Path, dist: Dist) -> None:
    def reason(model: Path) -> str:
        _, reasons = enable_shortcuts(load_policy(resolved(model, model), settings(), dist), PROBE)
        return next(r for r in reasons if r.startswith("frozen weights"))

    assert reason(make_tiny_model(tmp_path / "in_fp32")).startswith("frozen weights: none")
    assert reason(rounded_model(tmp_path / "in_bf16")).startswith("frozen weights: stored in bfloat16")


def test_a_model_that_computes_in_its_weights_dtype_stays_float32(
    tmp_path: Path, dist: Dist, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    plain = layer.forward

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return plain(self, x.to(self.self_attn.o_proj.weight.dtype), *args, **kwargs)

    monkeypatch.setattr(layer, "forward", forward)
    model = rounded_model(tmp_path)
    policy, reasons = enable_shortcuts(load_policy(resolved(model, model), settings(), dist), PROBE)
    assert any(r.startswith("frozen weights: unchanged") for r in reasons)
    assert all(p.dtype == torch.float32 for p in policy.model.parameters())
