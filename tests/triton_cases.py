"""The Triton kernels under triton's interpreter, which computes on a CPU.

tests/unit/test_triton_kernels.py runs this file in a process of its own, because TRITON_INTERPRET must be set
before triton is imported.

The interpreter cuts float32 to bfloat16 instead of rounding, so bfloat16's limits are twice a GPU's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from skylite.model import chunked_logprobs, fast_path_check, triton_kernels
from skylite.model.activation_checkpointing import recompute_fn_of
from skylite.model.chunked_logprobs import head_logprobs
from skylite.model.fused_ops import RMS_NORM_GAINS, fuse_mlps, fuse_norms, fuse_rotary_embedding
from skylite.model.kernel_check import TOLERANCE, kernel_differences, kernel_fault, relative_difference
from skylite.model.policy import load_policy
from skylite.model.process_group import Dist
from tests.cases import PROBE, assert_same_gradients, model_with_norms
from tests.decisions import resolved
from tests.one_rank import OneRank
from tests.small_run import settings
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
ROWS = torch.tensor([0, 1, 1, 3, 8, 5, 5, 5, 4])
"""Rows 2, 6 and 7 predict no token; rows 1 and 5 several."""
NUM_ROWS = 9


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, TOLERANCE[torch.bfloat16])]
)
def test_every_kernel_equals_its_torch_form_in_float64(dtype: torch.dtype, limit: float):
    differences = kernel_differences(CPU, dtype, [100, 896])
    assert max(differences.values()) < limit, differences
    assert len(differences) == 6


def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch):
    right = triton_kernels.gate_and_multiply_backward
    monkeypatch.setattr(
        triton_kernels, "gate_and_multiply_backward", lambda *inputs: tuple(reversed(right(*inputs)))
    )
    fault = kernel_fault(CPU, torch.float32, [128])
    assert fault is not None
    assert fault.startswith("SiLU differs by ")
    assert "norm" not in fault


def test_a_result_that_is_not_a_number_is_a_fault(monkeypatch: pytest.MonkeyPatch):
    right = triton_kernels.normalize
    monkeypatch.setattr(triton_kernels, "normalize", lambda *inputs: right(*inputs) * torch.nan)
    assert kernel_fault(CPU, torch.float32, [128]) == "norm of 128 differs by nan"


def reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """In float64, all logits at once. The logits are rounded as the product's dtype is."""
    logits = nn.functional.linear(hidden, weight, bias).double() / temperature
    logprobs = logits.log_softmax(-1)
    return logprobs[ROWS, targets], -(logprobs.exp() * logprobs).sum(-1)[ROWS]


@pytest.mark.parametrize(
    ("vocab", "through"),
    [(1003, "logprobs"), (1003, "entropies"), (1003, "both"), (16384, "both"), (151936, "logprobs")],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_heads_logprobs_and_gradients(
    vocab: int, through: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(0)
    if vocab > 2000:
        monkeypatch.setattr(triton_kernels, "LOGITS_BLOCK", 1 << 14)  # the interpreter takes 3 ms a program
    hidden, weight = torch.randn(NUM_ROWS, 32).to(dtype), (torch.randn(vocab, 32) / 4).to(dtype)
    targets = torch.tensor([5, 0, vocab - 1, 7, 7, 3, 3, 9, vocab // 2])
    upstream = [torch.randn(len(ROWS)) * (through in (name, "both")) for name in ("logprobs", "entropies")]
    used = [i for i, name in enumerate(("logprobs", "entropies")) if through in (name, "both")]
    mine, wide = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    outputs = head_logprobs(mine, weight, None, ROWS, targets, 0.7, kernels=True)
    right = reference(wide, weight.double(), None, targets, 0.7)
    (grad,) = torch.autograd.grad([outputs[i] for i in used], mine, [upstream[i] for i in used])
    (right_grad,) = torch.autograd.grad([right[i] for i in used], wide, [upstream[i].double() for i in used])
    limit = 1e-6 if dtype == torch.float32 else TOLERANCE[dtype]
    for a, b in zip(outputs, right, strict=True):
        assert relative_difference(a, b) < limit
    limit *= 1 if through == "logprobs" else 2  # log p + H cancels
    assert relative_difference(grad, right_grad) < limit
    assert torch.equal(grad[[2, 6, 7]], torch.zeros_like(grad[[2, 6, 7]]))


def test_chunks_and_passes_without_a_gradient_give_the_same_bits(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    hidden, weight = torch.randn(20, 16), torch.randn(203, 16)
    for name in ("LOGITS_LANES", "LOGITS_BLOCK"):
        monkeypatch.setattr(triton_kernels, name, 128)
    rows, targets = torch.randint(20, (30,)), torch.randint(203, (30,))

    def run(gradient: bool) -> list[Tensor]:
        mine = hidden.clone().requires_grad_(gradient)
        logprobs, entropies = head_logprobs(mine, weight, None, rows, targets, 0.7, kernels=True)
        grads = torch.autograd.grad(logprobs.square().sum(), mine) if gradient else ()
        return [logprobs.detach(), entropies.detach(), *grads]

    whole = run(gradient=True)
    monkeypatch.setattr(chunked_logprobs, "KERNEL_CHUNK_ROWS", 8)
    monkeypatch.setattr(chunked_logprobs, "KERNEL_CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(chunked_logprobs, "LATER_TOKENS", 3)
    for ours, right in zip(run(gradient=True), whole, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(run(gradient=False), run(gradient=True), strict=False))


def test_the_gradient_of_a_nearly_certain_token_does_not_cancel():
    """p of the token is 1 - 1e-4: bfloat16 would round it to 1."""
    torch.manual_seed(0)
    weight = torch.randn(1003, 32).bfloat16()
    hidden = (weight[:NUM_ROWS].float() * 0.9).bfloat16()
    targets = torch.arange(NUM_ROWS)[ROWS]
    mine, wide = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    logprobs, _ = head_logprobs(mine, weight, None, ROWS, targets, 1.0, kernels=True)
    right, _ = reference(wide, weight.double(), None, targets, 1.0)
    assert -1e-3 < right.median() < -1e-6
    (grad,), (right_grad,) = (torch.autograd.grad(x.sum(), of) for x, of in ((logprobs, mine), (right, wide)))
    close = [relative_difference(grad[row], right_grad[row]) for row in ROWS[right < -1e-5].tolist()]
    assert len(close) > 3
    assert max(close) < 0.1, "logits of 25 round by 0.06"


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("shift", [0.0, 3e4])
def test_entropies_of_flat_and_sharp_rows_far_from_zero(scale: float, shift: float):
    torch.manual_seed(0)
    logits = scale * torch.randn(NUM_ROWS, 1003) + shift
    weight, hidden = logits.t().contiguous(), torch.eye(NUM_ROWS)
    targets = torch.arange(len(ROWS))
    logprobs, entropies = head_logprobs(hidden, weight, None, ROWS, targets, 1.0, kernels=True)
    right_logprobs, right_entropies = reference(hidden, weight, None, targets, 1.0)
    ulp = float(np.spacing(np.float32(logits.abs().max())))
    torch.testing.assert_close(logprobs.double(), right_logprobs, rtol=1e-6, atol=2 * ulp)
    torch.testing.assert_close(entropies.double(), right_entropies, rtol=1e-5, atol=1e-6)


def test_logits_that_are_not_numbers_or_minus_infinity():
    logits = torch.randn(3, 1003)
    logits[0, 17] = torch.nan
    logits[1, 5:900] = -torch.inf
    first, targets = torch.tensor([0, 1, 3, 4]), torch.tensor([3, 3, 5, 3])
    logprobs, normalizers, entropies = torch.empty(4), torch.empty(3), torch.empty(3)
    place = (0, first, targets, 1.0)
    triton_kernels.token_logprobs(logits, *place, logprobs, normalizers, entropies)
    assert logprobs.isnan().tolist() == [True, False, False, False]
    assert entropies.isnan().tolist() == normalizers.isnan().tolist() == [True, False, False]
    kept = torch.cat([logits[1, :5], logits[1, 900:]]).log_softmax(0)
    ones = torch.ones(4)
    grads = triton_kernels.logits_gradient_(logits, *place, normalizers, entropies, ones, ones[:3])
    assert grads.isnan().any(1).tolist() == [True, False, False]
    assert torch.equal(grads[1, 6:900], torch.zeros(894))
    torch.testing.assert_close(logprobs[1], kept[3], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropies[1], -(kept.exp() * kept).sum(), rtol=1e-6, atol=1e-6)
    assert logprobs[2] == -torch.inf


def test_a_micro_batch_without_tokens():
    hidden = torch.randn(1, 8, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.int64)
    logprobs, entropies = head_logprobs(hidden, torch.randn(50, 8), None, empty, empty, 1.0, kernels=True)
    assert logprobs.shape == entropies.shape == (0,)
    (grad,) = torch.autograd.grad(logprobs.sum(), hidden)
    assert torch.equal(grad, torch.zeros(1, 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("angles", [1, 2])
def test_rotary_embedding_equals_transformers(dtype: torch.dtype, angles: int):
    """For a batch of two, with angles of each or of both, from the memory layout of a layer's projections."""
    torch.manual_seed(0)
    q, k = (torch.randn(2, 13, n * 64).to(dtype).requires_grad_() for n in (6, 2))
    turns = torch.randn(angles, 13, 64).to(dtype)

    def run(rotary: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
        heads = [x.to(dtype).view(2, 13, -1, 64).transpose(1, 2) for x in (q, k)]
        rotated = rotary(*heads, turns.cos().to(dtype), turns.sin().to(dtype))
        # Attention's gradients have another layout.
        grads = [torch.arange(float(x.numel())).cos().view(x.shape).to(dtype) for x in rotated]
        return [*rotated, *torch.autograd.grad(rotated, (q, k), grads)]

    ours, theirs = run(triton_kernels.rotary_embedding, dtype), run(apply_rotary_pos_emb, torch.float64)
    limit = 1e-6 if dtype == torch.float32 else TOLERANCE[dtype]
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert relative_difference(a, b) < limit


def test_a_rotary_embedding_of_another_form_is_refused():
    q, cos = torch.randn(1, 2, 5, 64), torch.randn(1, 5, 32)
    with pytest.raises(ValueError, match="rotary embedding of q"):
        triton_kernels.rotary_embedding(q, q, cos, cos)


@pytest.mark.parametrize("kind", ["norm", "gated"])
def test_recomputing_gives_the_same_bits(kind: str):
    torch.manual_seed(0)
    x, up = torch.randn(5, 96).bfloat16().requires_grad_(), torch.randn(5, 96).bfloat16().requires_grad_()

    def made(recompute: bool) -> Tensor:
        if kind == "norm":
            return triton_kernels.rms_norm(x, up[0].detach(), 1, 1e-5, recompute)
        return triton_kernels.gated_activation(x, up, False, recompute)

    y = made(recompute=True)
    recompute_fn = recompute_fn_of(y)
    assert recompute_fn is not None
    assert torch.equal(recompute_fn(), y)
    assert recompute_fn_of(made(recompute=False)) is None


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "gemma3"])
def test_a_model_with_kernels_has_the_models_gradients(family: str, tmp_path: Path):
    model, gain = model_with_norms(tmp_path, family)
    fused = copy.deepcopy(model)
    undos = [
        fuse_norms(fused, RMS_NORM_GAINS[gain], recompute=True, kernels=True),
        fuse_mlps(fused, recompute=True, kernels=True),
        fuse_rotary_embedding(fused),
    ]
    assert_same_gradients(fused, model)
    for undo in undos:
        assert undo is not None
        undo()
    assert not any("forward" in vars(m) for m in fused.modules())


@pytest.mark.parametrize(("family", "gain"), [("llama", "weight"), ("gemma", "1 + weight")])
def test_the_probe_chooses_kernels_and_a_pass_uses_them(
    family: str, gain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = make_tiny_model(tmp_path, family)
    policy = load_policy(resolved(model, tmp_path), settings(), cast(Dist, OneRank(CPU)))
    reference = fast_path_check._probe_logprobs(policy, PROBE)
    policy = replace(policy, kernels=True)
    lines = fast_path_check._replace_modules(policy, PROBE, reference)
    starts = [f"norms: fused as {gain}; ", "MLPs: fused as act(gate) * up; ", "rotary embedding: fused; "]
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=False)), lines
    calls = []
    for name in ("normalize", "gate_and_multiply", "rotate", "token_logprobs"):
        right = getattr(triton_kernels, name)

        def counted(*inputs: Any, name: str = name, right: Any = right) -> Any:
            calls.append(name)
            return right(*inputs)

        monkeypatch.setattr(triton_kernels, name, counted)
    head = policy.model.get_base_model().get_output_embeddings()
    with torch.no_grad():
        ours = fast_path_check._probe_logprobs(replace(policy, lm_head=head), PROBE)
    assert set(calls) == {"normalize", "gate_and_multiply", "rotate", "token_logprobs"}
    torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)
