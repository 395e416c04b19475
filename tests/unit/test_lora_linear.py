"""The fused LoRA linear layer: PEFT's outputs and gradients, and PEFT's path where it does not apply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from skylite.model import lora_linear
from skylite.model.activation_checkpointing import with_recompute_fn
from skylite.model.lora_linear import drop_after_a, fuse_lora_layers, lora_linears


def model(*, fused: bool, bias: bool = True, dropout: float = 0.0) -> PeftModel:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 12, bias=bias), nn.SiLU(), nn.Linear(12, 6, bias=bias))
    return adapted(plain, ["0", "2"], dropout, fused=fused)


def adapted(plain: nn.Module, targets: list[str], dropout: float = 0.0, *, fused: bool) -> PeftModel:
    """The module with nonzero LoRA matrices."""
    peft = get_peft_model(plain, LoraConfig(r=3, lora_alpha=5, lora_dropout=dropout, target_modules=targets))
    for name, param in peft.named_parameters():
        if "lora_" in name:
            nn.init.normal_(param, std=0.3)
    if fused:
        fuse_lora_layers(peft)
    return peft


def learn(peft: nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    out = peft(x)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    grads = {n: p.grad for n, p in peft.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {"out": out.detach(), "x": x.grad, **grads}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 8), (2, 5, 8)])
def test_output_and_gradients_equal_pefts_layer(bias: bool, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    ours, pefts = learn(model(fused=True, bias=bias), x), learn(model(fused=False, bias=bias), x)
    assert ours.keys() == pefts.keys()
    assert len(ours) == 6
    for name, value in pefts.items():
        assert torch.allclose(ours[name], value, rtol=1e-5, atol=1e-6), name


def test_layers_with_transposed_weights_stay_pefts() -> None:
    """GPT-2's Conv1D, whose weight is [inputs, outputs]."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))

    def learned(*, fused: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        return learn(adapted(nn.Sequential(Conv1D(12, 8)), ["0"], fused=fused), x)

    ours, pefts = learned(fused=True), learned(fused=False)
    assert torch.equal(ours["x"], pefts["x"])
    assert ours["out"].shape == (3, 12)


def test_gradients_equal_finite_differences() -> None:
    def make(*size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(size)))

    weight, bias = make(4, 6), make(4)
    inputs = tuple(t.requires_grad_() for t in (make(5, 6), make(2, 6), make(4, 2)))
    assert torch.autograd.gradcheck(
        lambda x, a, b: lora_linears(x, [weight], [bias], [a], [b], [1.7])[0], inputs
    )
    small_a, large_a, narrow, wide = (
        t.requires_grad_() for t in (make(2, 6), make(5, 6), make(1, 2), make(3, 5))
    )
    weights, biases = torch.split(weight, [1, 3]), [None, bias[1:]]
    both = (inputs[0], small_a, large_a, narrow, wide)
    assert torch.autograd.gradcheck(
        lambda x, *m: lora_linears(x, weights, biases, m[:2], m[2:], [1.7, 0.4]), both
    )
    assert torch.autograd.gradcheck(
        lambda x, *m: lora_linears(x, weights, biases, m[:2], m[2:], [1.7, 0.4])[1], both
    )


def test_only_the_input_and_the_small_product_are_kept_for_backward() -> None:
    kept: list[tuple[int, ...]] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    peft = model(fused=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        peft.base_model.model[0](torch.randn(7, 8, requires_grad=True))
    assert sorted(kept) == sorted([(7, 8), (7, 3), (12, 8), (3, 8), (12, 3)])


def test_unsupported_settings_use_pefts_path() -> None:
    x = torch.randn(7, 8)
    off, plain = model(fused=True), model(fused=False)
    with off.disable_adapter(), plain.disable_adapter():
        assert torch.equal(off(x), plain(x))
    dropping, reference = model(fused=True, dropout=0.5).train(), model(fused=False, dropout=0.5).train()
    torch.manual_seed(3)
    ours = dropping(x)
    torch.manual_seed(3)
    assert torch.equal(ours, reference(x))
    assert not torch.allclose(ours, dropping.eval()(x))


def test_dropout_after_a_zeroes_and_scales_elements_of_its_output() -> None:
    torch.manual_seed(0)
    peft = adapted(nn.Sequential(nn.Linear(8, 3)), ["0"], dropout=0.25, fused=False)
    layer = peft.base_model.model[0]
    layer.lora_B["default"].weight.data = torch.eye(3)  # the adapter's part is the output of A, scaled
    x, scale = torch.randn(200, 8), 5 / 3
    drop_after_a(peft, "default")
    fuse_lora_layers(peft)
    output_of_a = x @ layer.lora_A["default"].weight.T
    assert torch.allclose(peft.eval()(x) - layer.base_layer(x), scale * output_of_a, atol=1e-5)
    factors = (peft.train()(x) - layer.base_layer(x)) / (scale * output_of_a)
    dropped = factors.abs() < 1e-3
    assert torch.allclose(factors[~dropped], torch.tensor(4 / 3), atol=1e-3)
    assert 0.15 < dropped.float().mean() < 0.35
    assert (dropped.sum(dim=1) == 1).any(), "each element of A's output on its own"


def test_autocast_computes_in_its_dtype_with_float32_gradients() -> None:
    peft, reference = model(fused=True), model(fused=False)
    for name, param in peft.named_parameters():
        if "lora_" not in name:
            param.data = param.data.bfloat16()
    x = torch.randn(7, 8)
    with torch.autocast("cpu", torch.bfloat16):
        ours, pefts = learn(peft, x), learn(reference, x)
    assert ours["out"].dtype == torch.bfloat16
    for name, value in pefts.items():
        assert ours[name].dtype == (torch.bfloat16 if name == "out" else torch.float32)
        assert torch.allclose(
            ours[name].float(), value.float(), rtol=0.05, atol=0.05 * value.abs().max().item()
        ), name


class Branches(nn.Module):
    """Three attention layers that read the same x, and one that reads another input."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, size, bias=bias) for size in (12, 4, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.q_proj(x)[..., :4] * self.k_proj(x) + self.v_proj(x)[..., 1:5] + self.k_proj(x * 2)


def branches(*, fused: bool, bias: bool = True) -> PeftModel:
    torch.manual_seed(0)
    return adapted(Branches(bias), ["q_proj", "k_proj", "v_proj"], fused=fused)


@pytest.mark.parametrize("bias", [True, False])
def test_layers_of_one_input_are_fused_with_unchanged_results(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    plain, calls = learn(branches(fused=False, bias=bias), x), list[int]()
    apply = lora_linear.lora_linears

    def counting(x: Tensor, weights: Sequence[Tensor], *rest: Any) -> Any:
        calls.append(len(weights))
        return apply(x, weights, *rest)

    monkeypatch.setattr(lora_linear, "lora_linears", counting)
    ours = learn(branches(fused=True, bias=bias), x)
    assert calls == [3, 3], "all three of x; k's of 2 x brings the others' along, which nobody asks for"
    assert len(ours) == 8
    for name, value in plain.items():
        assert torch.allclose(ours[name], value, rtol=1e-5, atol=1e-5), name


def test_fused_layers_keep_their_matrices_and_no_joined_copy() -> None:
    kept: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    peft = branches(fused=True)
    x = torch.randn(5, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        peft.base_model.model.q_proj(x)
    own = {p.data_ptr() for p in peft.parameters()} | {x.data_ptr()}
    assert [tuple(t.shape) for t in kept if t.data_ptr() not in own] == [(5, 9)], (
        "x A^T of three layers of rank 3"
    )


def test_fused_layers_can_still_disable_the_adapter() -> None:
    ours, plain = branches(fused=True), branches(fused=False)
    x = torch.randn(5, 8)
    with ours.disable_adapter(), plain.disable_adapter():
        assert torch.equal(ours(x), plain(x))


def test_an_input_that_can_be_recomputed_is_not_kept() -> None:
    x = torch.randn(7, 8, requires_grad=True)
    made, kept = [], []

    def doubled() -> Tensor:
        made.append(1)
        return x.detach() * 2

    def note(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    def grads(y: Tensor) -> list[Tensor]:
        layer = model(fused=True).base_model.model[0]
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            out = layer(y)
        return list(
            torch.autograd.grad(
                out.square().sum(), [layer.lora_A.default.weight, layer.lora_B.default.weight]
            )
        )

    ours = grads(with_recompute_fn((x * 2).detach(), doubled))
    assert (7, 8) not in kept
    assert made == [1]
    assert all(map(torch.equal, ours, grads((x * 2).detach())))
    changed = with_recompute_fn(torch.zeros(7, 8), doubled)
    changed.add_(3)
    assert all(map(torch.equal, grads(changed), grads(torch.full((7, 8), 3.0))))
    assert made == [1], "what was changed since is not what the recipe makes"


def test_a_call_of_the_model_rounds_all_matrices_at_once_to_the_bits_of_each_layer_alone() -> None:
    peft, operations = branches(fused=True), list[str]()
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    for name, param in peft.named_parameters():
        if "lora_" not in name:
            param.data = param.data.bfloat16()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operations.append(f"{func} {list(args[0].shape) if isinstance(args[0], Tensor) else ''}")
            return func(*args, **(kwargs or {}))

    def both() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Through the model, and through the module inside, whose layers round their own matrices."""
        results = []
        for module in (peft, peft.base_model.model):
            peft.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                learnt = learn(module, x)
            results.append({n.removeprefix("base_model.model."): t.clone() for n, t in learnt.items()})
        return results[0], results[1]

    for _ in range(2):  # matrices that have changed since count
        at_once, alone = both()
        assert at_once.keys() == alone.keys()
        assert len(at_once) == 8
        assert all(torch.equal(at_once[name], value) for name, value in alone.items())
        with torch.no_grad():
            for name, param in peft.named_parameters():
                if "lora_" in name:
                    param.mul_(1.7)
    with Names(), torch.autocast("cpu", torch.bfloat16):
        peft(x)
    assert [o for o in operations if "foreach" in o] == ["aten._foreach_copy_.default "]
    a_and_b = ("[3, 8]", "[12, 3]", "[4, 3]", "[6, 3]")
    assert not [o for o in operations if "_to_copy" in o and o.endswith(a_and_b)]
