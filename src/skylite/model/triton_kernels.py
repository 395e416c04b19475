"""The element-wise work of a step as Triton kernels: norms, gated activations, rotary embedding, LM head.

Each kernel reads its inputs once, computes in float32 and rounds its output once, where torch's operations
write every intermediate result. Imported only where a GPU computes; kernel_check.py compares each with its
torch form first. Inputs are bfloat16 or float32.

`ROWS`, `BLOCK`, `LANES` and `STEPS` are sizes of a program's tile, powers of two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from skylite.model.activation_checkpointing import with_recompute_fn

TILE = 4096
"""Elements of a program's tile in the kernels over rows: enough loads in flight to use all bandwidth."""
GATED_BLOCK = 2048
LOGITS_LANES, LOGITS_STEPS = 1024, 8
LOGITS_BLOCK = 4096
LOWEST = tl.constexpr(-1.0e30)
"""Stands for -inf, whose differences are not numbers."""


def rms_norm(x: Tensor, weight: Tensor, offset: float, eps: float, recompute: bool) -> Tensor:
    """y = (offset + weight) x / sqrt(mean(x^2) + eps) over the last dimension.

    As `fused_ops.rms_norm`: the weight is frozen, and `recompute` attaches what recomputes y.
    """
    y: Tensor = _RmsNorm.apply(x, weight, offset, eps)
    if not (recompute and torch.is_grad_enabled()):
        return y
    x = x.detach()
    return with_recompute_fn(y, lambda: normalize(x, weight, offset, eps))


def gated_activation(gate: Tensor, up: Tensor, gelu: bool, recompute: bool) -> Tensor:
    """y = act(gate) * up. The activation is GELU in its tanh form, or SiLU."""
    y: Tensor = _GatedActivation.apply(gate, up, gelu)
    if not (recompute and torch.is_grad_enabled()):
        return y
    gate, up = gate.detach(), up.detach()
    return with_recompute_fn(y, lambda: gate_and_multiply(gate, up, gelu))


def rotary_embedding(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Queries and keys with rotary position embedding (RoPE, arXiv 2104.09864), halves as in Llama.

    Replaces `apply_rotary_pos_emb` of transformers' models.

    Args:
        q: [B, heads, T, D]
        k: [B, key-value heads, T, D]
        cos: [1 or B, T, D]
        sin: as cos.
        unsqueeze_dim: 1, the dimension of the heads. Raises ValueError for another form.

    Returns:
        q and k of the same shapes; in memory, the heads of a token stand together.
    """
    if unsqueeze_dim != 1 or q.dim() != 4 or q.shape[-1] != cos.shape[-1] or cos.stride() != sin.stride():
        raise ValueError(f"rotary embedding of q {list(q.shape)} with cos {list(cos.shape)}")
    rotated: tuple[Tensor, Tensor] = _RotaryEmbedding.apply(q, k, cos, sin)
    return rotated


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offset: float, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.offset, ctx.eps = offset, eps
        return normalize(x, weight, offset, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        return normalize_backward(grad, x, weight, ctx.offset, ctx.eps), None, None, None


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.gelu = gelu
        return gate_and_multiply(gate, up, gelu)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        return *gate_and_multiply_backward(grad, gate, up, ctx.gelu), None


class _RotaryEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return rotate(q, k, cos, sin, False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return *rotate(grad_q, grad_k, cos, sin, True), None, None


def normalize(x: Tensor, weight: Tensor, offset: float, eps: float) -> Tensor:
    """The norm's output."""
    x = x.contiguous()
    y, width = torch.empty_like(x), x.shape[-1]
    num_rows, rows, block, warps = _rows_of(x.numel() // width, width)
    _normalize[(triton.cdiv(num_rows, rows),)](
        x, weight, y, num_rows, width, eps, float(offset), ROWS=rows, BLOCK=block, num_warps=warps
    )
    return y


def normalize_backward(grad: Tensor, x: Tensor, weight: Tensor, offset: float, eps: float) -> Tensor:
    """The gradient of x."""
    grad, x = grad.contiguous(), x.contiguous()
    grad_x, width = torch.empty_like(x), x.shape[-1]
    num_rows, rows, block, warps = _rows_of(x.numel() // width, width)
    _normalize_backward[(triton.cdiv(num_rows, rows),)](
        grad, x, weight, grad_x, num_rows, width, eps, float(offset), ROWS=rows, BLOCK=block, num_warps=warps
    )
    return grad_x


def gate_and_multiply(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    """act(gate) * up."""
    gate, up = gate.contiguous(), up.contiguous()
    y, size = torch.empty_like(gate), gate.numel()
    _gate[(triton.cdiv(size, GATED_BLOCK),)](gate, up, y, size, GELU=gelu, BLOCK=GATED_BLOCK, num_warps=8)
    return y


def gate_and_multiply_backward(grad: Tensor, gate: Tensor, up: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up, size = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    _gate_backward[(triton.cdiv(size, GATED_BLOCK),)](
        grad, gate, up, grad_gate, grad_up, size, GELU=gelu, BLOCK=GATED_BLOCK, num_warps=8
    )
    return grad_gate, grad_up


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Rotate q and k by the angles; `transposed` rotates back, as the gradient does."""
    batch, q_heads, length, width = q.shape
    k_heads, half = k.shape[1], width // 2
    rotated_q = torch.empty((batch, length, q_heads, width), dtype=q.dtype, device=q.device)
    rotated_k = torch.empty((batch, length, k_heads, width), dtype=k.dtype, device=k.device)
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    block = triton.next_power_of_2(half)
    rows = max(1, TILE // 2 // block)
    q_programs = triton.cdiv(batch * length * q_heads, rows)
    k_programs = triton.cdiv(batch * length * k_heads, rows)
    _rotate[(q_programs + k_programs,)](
        q, k, cos, sin, rotated_q, rotated_k, batch * length, length, q_programs, q_heads, k_heads, half,
        q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
        cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1),
        TRANSPOSED=transposed, ROWS=rows, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return rotated_q.transpose(1, 2), rotated_k.transpose(1, 2)


def token_logprobs(
    logits: Tensor, start: int, first: Tensor, targets: Tensor, temperature: float,
    logprobs: Tensor, normalizers: Tensor, entropies: Tensor,
) -> None:  # fmt: skip
    """Logprobs of the tokens that rows `start` and following predict, from their logits, in one read.

    Args:
        logits: [K, V] of K rows.
        start: number of rows before them.
        first: [N + 1] index of each row's first token, and their number.
        targets: [C] token ids in the order of their rows.
        temperature: divides the logits.
        logprobs: [C] float32, written.
        normalizers: [N] float32, written: log sum exp(logits / temperature).
        entropies: [N] float32, written, in nats.
    """
    num_rows, vocab = logits.shape
    _token_logprobs[(num_rows,)](
        logits, first, targets, logprobs, normalizers, entropies, start, vocab, 1 / temperature,
        LANES=LOGITS_LANES, STEPS=LOGITS_STEPS, num_warps=4,
    )  # fmt: skip


def logits_gradient_(
    logits: Tensor, start: int, first: Tensor, targets: Tensor, temperature: float,
    normalizers: Tensor, entropies: Tensor, grad_logprobs: Tensor, grad_entropies: Tensor | None,
) -> Tensor:  # fmt: skip
    """`logits`, overwritten by their gradient.

    Args:
        logits, start, first, targets, temperature, normalizers, entropies: as for `token_logprobs`.
        grad_logprobs: [C] float32, in the order of the rows.
        grad_entropies: [N] float32 or None.
    """
    num_rows, vocab = logits.shape
    _logits_gradient[(num_rows, triton.cdiv(vocab, LOGITS_BLOCK))](
        logits, first, targets, normalizers, entropies, grad_logprobs, grad_entropies, start, vocab,
        1 / temperature, BLOCK=LOGITS_BLOCK, num_warps=8,
    )  # fmt: skip
    return logits


def _rows_of(num_rows: int, width: int) -> tuple[int, int, int, int]:
    """`num_rows`, and the tile of a program: rows, columns and warps."""
    block = triton.next_power_of_2(width)
    return num_rows, max(1, TILE // block), block, max(4, min(16, block // 512))


@triton.jit(do_not_specialize=["num_rows"])
def _normalize(X, W, Y, num_rows, width, eps, offset, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """y = x s g with s = 1 / sqrt(mean(x^2) + eps) and g = offset + w (RMSNorm, arXiv 1910.07467, eq. 4)."""
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    places = rows.to(tl.int64)[:, None] * width + columns[None, :]
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    x = tl.load(X + places, inside, 0.0).to(tl.float32)
    gain = offset + tl.load(W + columns, columns < width, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / width + eps)
    tl.store(Y + places, (x * scale[:, None] * gain[None, :]).to(Y.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["num_rows"])
def _normalize_backward(GY, X, W, GX, num_rows, width, eps, offset, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """dx = s (g dy - x s^2 mean(x g dy)), with s and g as in `_normalize`."""
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    places = rows.to(tl.int64)[:, None] * width + columns[None, :]
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    x = tl.load(X + places, inside, 0.0).to(tl.float32)
    gain = offset + tl.load(W + columns, columns < width, 0.0).to(tl.float32)
    grad = tl.load(GY + places, inside, 0.0).to(tl.float32) * gain[None, :]
    scale = tl.rsqrt(tl.sum(x * x, 1) / width + eps)
    shared = scale * scale * (tl.sum(x * grad, 1) / width)
    grad_x = scale[:, None] * (grad - x * shared[:, None])
    tl.store(GX + places, grad_x.to(GX.dtype.element_ty), inside)


@triton.jit
def _sigmoid_argument(a, GELU: tl.constexpr):
    """u(a) of act(a) = a sigmoid(u(a)), and u'(a).

    SiLU: u = a. GELU's tanh form, 0.5 a (1 + tanh z) with z = sqrt(2 / pi) (a + 0.044715 a^3): u = 2 z.
    """
    if GELU:
        u = 1.5957691216057308 * (a + 0.044715 * a * a * a)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * a * a)
    else:
        u = a
        slope = tl.full(a.shape, 1.0, tl.float32)
    return u, slope


@triton.jit
def _gate(GATE, UP, Y, size, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """y = act(gate) up; act(gate) is rounded to the output's type first, as torch and vLLM do."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    a = tl.load(GATE + places, inside, 0.0).to(tl.float32)
    up = tl.load(UP + places, inside, 0.0).to(tl.float32)
    u, _ = _sigmoid_argument(a, GELU)
    act = (a * tl.sigmoid(u)).to(Y.dtype.element_ty).to(tl.float32)
    tl.store(Y + places, (act * up).to(Y.dtype.element_ty), inside)


@triton.jit
def _gate_backward(GY, GATE, UP, GGATE, GUP, size, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """dup = dy act(gate); dgate = dy up (sigmoid(u) + gate sigmoid(u) (1 - sigmoid(u)) u')."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    a = tl.load(GATE + places, inside, 0.0).to(tl.float32)
    up = tl.load(UP + places, inside, 0.0).to(tl.float32)
    grad = tl.load(GY + places, inside, 0.0).to(tl.float32)
    u, slope = _sigmoid_argument(a, GELU)
    s = tl.sigmoid(u)
    tl.store(GUP + places, (grad * a * s).to(GUP.dtype.element_ty), inside)
    grad_gate = grad * up * (s + a * s * (1.0 - s) * slope)
    tl.store(GGATE + places, grad_gate.to(GGATE.dtype.element_ty), inside)


@triton.jit
def _rotate_heads(
    X, COS, SIN, Y, program, num_tokens, length, heads, half, batch_stride, head_stride, token_stride,
    angle_batch_stride, angle_stride, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows are pairs (token, head). See `_rotate`."""
    rows, columns = program * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    token, head = rows // heads, rows % heads
    batch, position = (token // length).to(tl.int64), (token % length).to(tl.int64)
    inside = (rows < num_tokens * heads)[:, None] & (columns < half)[None, :]
    x = batch * batch_stride + head.to(tl.int64) * head_stride + position * token_stride
    angle = batch * angle_batch_stride + position * angle_stride
    first = tl.load(X + x[:, None] + columns[None, :], inside, 0.0).to(tl.float32)
    second = tl.load(X + x[:, None] + half + columns[None, :], inside, 0.0).to(tl.float32)
    cos_first = tl.load(COS + angle[:, None] + columns[None, :], inside, 0.0).to(tl.float32)
    cos_second = tl.load(COS + angle[:, None] + half + columns[None, :], inside, 0.0).to(tl.float32)
    sin_first = tl.load(SIN + angle[:, None] + columns[None, :], inside, 0.0).to(tl.float32)
    sin_second = tl.load(SIN + angle[:, None] + half + columns[None, :], inside, 0.0).to(tl.float32)
    if TRANSPOSED:
        rotated_first = first * cos_first + second * sin_second
        rotated_second = second * cos_second - first * sin_first
    else:
        rotated_first = first * cos_first - second * sin_first
        rotated_second = second * cos_second + first * sin_second
    y = rows.to(tl.int64)[:, None] * (2 * half) + columns[None, :]
    tl.store(Y + y, rotated_first.to(Y.dtype.element_ty), inside)
    tl.store(Y + y + half, rotated_second.to(Y.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["num_tokens", "length", "q_programs"])
def _rotate(
    Q, K, COS, SIN, RQ, RK, num_tokens, length, q_programs, q_heads, k_heads, half,
    q_batch_stride, q_head_stride, q_token_stride, k_batch_stride, k_head_stride, k_token_stride,
    angle_batch_stride, angle_stride, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Halves (a, b) of a head become (a cos - b sin, b cos + a sin); TRANSPOSED: by the transposed matrix.

    The first programs rotate q, the others k: one launch for both.
    """
    program = tl.program_id(0)
    if program < q_programs:
        _rotate_heads(
            Q, COS, SIN, RQ, program, num_tokens, length, q_heads, half, q_batch_stride, q_head_stride,
            q_token_stride, angle_batch_stride, angle_stride, TRANSPOSED, ROWS, BLOCK,
        )  # fmt: skip
    else:
        _rotate_heads(
            K, COS, SIN, RK, program - q_programs, num_tokens, length, k_heads, half, k_batch_stride,
            k_head_stride, k_token_stride, angle_batch_stride, angle_stride, TRANSPOSED, ROWS, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["start"])
def _token_logprobs(
    LOGITS, FIRST, TARGETS, LOGPROBS, NORMALIZERS, ENTROPIES, start, vocab, inverse_temperature,
    LANES: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """For a row of scores s = logits / temperature: log sum exp(s), the entropy, and each target's logprob.

    Each lane visits every LANES-th score and keeps, for its running maximum m, the sums z of exp(s - m) and w
    of exp(s - m) (s - m); a new maximum m' rescales them by exp(m - m') (online softmax, arXiv 1805.02867,
    alg. 3). With m, z and w of all lanes: log sum exp = m + log z, entropy = log z - w / z.
    """
    row = tl.program_id(0)
    logits = LOGITS + row.to(tl.int64) * vocab
    columns = tl.arange(0, STEPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    top = tl.full((LANES,), LOWEST, tl.float32)
    total = tl.full((LANES,), 0.0, tl.float32)
    weighted = tl.full((LANES,), 0.0, tl.float32)
    for begin in range(0, vocab, STEPS * LANES):
        score = tl.load(logits + begin + columns, begin + columns < vocab, float("-inf")).to(tl.float32)
        score = tl.maximum(score * inverse_temperature, LOWEST, propagate_nan=tl.PropagateNan.ALL)
        new = tl.maximum(top, tl.max(score, 0))
        shift = top - new
        rescale = tl.exp(shift)
        distance = score - new[None, :]
        exponential = tl.exp(distance)
        weighted = (weighted + total * shift) * rescale + tl.sum(exponential * distance, 0)
        total = total * rescale + tl.sum(exponential, 0)
        top = new
    highest = tl.max(top, 0)
    shift = top - highest
    rescale = tl.exp(shift)
    sum_weighted = tl.sum((weighted + total * shift) * rescale, 0)
    sum_total = tl.sum(total * rescale, 0)
    normalizer = highest + tl.log(sum_total)
    tl.store(NORMALIZERS + start + row, normalizer)
    tl.store(ENTROPIES + start + row, tl.log(sum_total) - sum_weighted / sum_total)
    for token in range(tl.load(FIRST + start + row), tl.load(FIRST + start + row + 1)):
        logit = tl.load(logits + tl.load(TARGETS + token)).to(tl.float32)
        tl.store(LOGPROBS + token, logit * inverse_temperature - normalizer)


@triton.jit(do_not_specialize=["start"])
def _logits_gradient(
    LOGITS, FIRST, TARGETS, NORMALIZERS, ENTROPIES, GLOGPROBS, GENTROPIES, start, vocab, inverse_temperature,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """In place: ds = sum over the row's tokens of g (1[target] - p), and - h p (log p + H) for the entropy H.

    g and h are the gradients of logprob and entropy, p = exp(s - log sum exp(s)).
    """
    row = tl.program_id(0)
    logits = LOGITS + row.to(tl.int64) * vocab
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + columns, columns < vocab, float("-inf")).to(tl.float32) * inverse_temperature
    logprob = score - tl.load(NORMALIZERS + start + row)
    prob = tl.exp(logprob)
    first, end = tl.load(FIRST + start + row), tl.load(FIRST + start + row + 1)
    slope = 0.0
    for token in range(first, end):
        slope -= tl.load(GLOGPROBS + token)
    grad = prob * slope
    if GENTROPIES is not None:
        surprise = tl.where(prob > 0.0, logprob + tl.load(ENTROPIES + start + row), 0.0)
        grad -= tl.load(GENTROPIES + start + row) * prob * surprise
    for token in range(first, end):
        grad += tl.where(columns == tl.load(TARGETS + token), tl.load(GLOGPROBS + token), 0.0)
    tl.store(logits + columns, (grad * inverse_temperature).to(LOGITS.dtype.element_ty), columns < vocab)
