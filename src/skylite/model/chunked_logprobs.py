"""Logprobs of chosen tokens from logits or hidden states, in float32 and one chunk of rows at a time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skylite.model.float32_arithmetic import row_dot
from skylite.model.packing import upload
from skylite.types import IntArray

ROW_CHUNK_ELEMENTS = 1 << 24
"""Logits that `token_logprobs` handles at once: 64 MiB of float32 scratch for any vocabulary."""
HEAD_CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Logits that `head_logprobs` computes at once, by device. CPU: 16 MiB, near the size of a core's cache.

GPU: larger, because small chunks make the product memory-bound: each chunk reads the head's weight again.
With a vocabulary of 151,936, 1 << 26 gives 441 rows per chunk and about 1 GiB of scratch. What it buys is not
measured: that needs a GPU.
"""
KERNEL_CHUNK_ELEMENTS = 1 << 27
"""Logits of a chunk that Triton's kernels read: 256 MiB in bfloat16, without other scratch."""
KERNEL_CHUNK_ROWS = 128
"""Rows of such a chunk are a multiple of this, which fills the tiles of the product."""
LATER_TOKENS = 4096
"""Tokens for which backward holds rows of W at once."""
BLOCK_ROWS, BLOCK_VOCAB = 512, 2048
"""Rows and vocabulary entries of one block of logits: 4 MiB, large enough for fast products, small enough to
stay in the cache."""


def token_logprobs(
    logits: Tensor, rows: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """log softmax(logits[rows] / temperature)[targets], and the entropies of those distributions in nats.

    Backward overwrites `logits` with its own gradient to save a second [N, V] buffer, so nothing else may
    read `logits` after this call.

    Args:
        logits: [N, V], any float dtype.
        rows: [C] int64. Rows may repeat: siblings in a prefix tree share the row that predicts them.
        targets: [C] int64 token ids.
        temperature: sampling temperature.

    Returns:
        logprobs [C] and entropies [C], float32, both differentiable.
    """
    logprobs, entropies = _TokenLogprobs.apply(logits, rows, targets, temperature)  # type: ignore[no-untyped-call]
    return logprobs, entropies


class _TokenLogprobs(torch.autograd.Function):
    """Saves only the logits. Autograd would keep three [N, V] float32 buffers: cast, scaled, log_softmax.

    Buys memory, for models whose LM head is not run in chunks: without it the peak of a train phase is 5 %
    higher.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        normalizers = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        entropies = torch.empty_like(normalizers)
        for chunk in _row_chunks(logits):
            scaled = logits[chunk].float() / temperature
            normalizers[chunk] = torch.logsumexp(scaled, dim=1)
            probs = torch.exp(scaled - normalizers[chunk, None])
            entropies[chunk] = normalizers[chunk] - row_dot(probs, scaled)
        logprobs = logits[rows, targets].float() / temperature - normalizers[rows]
        ctx.save_for_backward(logits, rows, targets, normalizers, entropies)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs, entropies[rows]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        logits, rows, targets, normalizers, entropies = ctx.saved_tensors
        num_rows, temperature = len(normalizers), ctx.temperature
        grad_logprobs = (
            torch.zeros_like(rows, dtype=torch.float32) if grad_logprobs is None else grad_logprobs
        )
        logprob_grads = _sum_by_row(grad_logprobs / temperature, rows, num_rows)
        entropy_grads = (
            None if grad_entropies is None else _sum_by_row(grad_entropies / temperature, rows, num_rows)
        )
        for chunk in _row_chunks(logits):
            log_probs = logits[chunk].float() / temperature - normalizers[chunk, None]
            slope = -logprob_grads[chunk, None]
            if entropy_grads is not None:  # dH / dlogit = -p (log p + H)
                slope = slope - entropy_grads[chunk, None] * (log_probs + entropies[chunk, None])
            logits[chunk] = torch.exp(log_probs).mul_(slope).to(logits.dtype)
        logits.index_put_((rows, targets), (grad_logprobs / temperature).to(logits.dtype), accumulate=True)
        return logits, None, None, None


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    targets: Tensor,
    temperature: float,
    softcap: float | None = None,
    tokens_before: IntArray | None = None,
    kernels: bool = False,
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` of the LM head's logits, without ever holding all logits [N, V].

    In float32 without softcap, forward computes the gradient's product while it has a block's probabilities:
    of d logprob / d hidden = W[target] - p W it keeps p W [N, H], so backward multiplies no matrices.
    Otherwise backward computes the logits again, one chunk of rows at a time. That is so for a gradient
    through the entropy, for a softcap, and for bfloat16, where W[target] - p W would cancel for tokens that
    are nearly certain.

    Args:
        hidden: [N, H] hidden states; their dtype is the compute dtype.
        weight: [V, H], frozen. A dtype narrower than that of `hidden` is converted one block at a
            time, or at once for a pass over chunks of rows.
        bias: [V] or None, frozen.
        rows: [C] int64, as for `token_logprobs`.
        targets: [C] int64 token ids.
        temperature: sampling temperature.
        softcap: logits become softcap * tanh(logits / softcap), as in Gemma 2.
        tokens_before: [N + 1] number of tokens that earlier rows predict (PackedTokens). None: computed from
            `rows`, which waits for the device.
        kernels: read the logits in Triton's kernels (`_TritonHeadLogprobs`). With a softcap they do not.

    Returns:
        logprobs [C] and entropies [C] in nats, float32, both differentiable.
    """
    if tokens_before is None:
        counts = np.bincount(rows.cpu().numpy(), minlength=len(hidden))
        tokens_before = np.concatenate([[0], np.cumsum(counts)])
    if kernels and softcap is None:
        logprobs, entropies = _TritonHeadLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, rows, targets, temperature, tokens_before
        )
        return logprobs, entropies
    logprobs, entropies = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, rows, targets, temperature, softcap, tokens_before
    )
    return logprobs, entropies


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: Tensor,
        targets: Tensor,
        temperature: float,
        softcap: float | None,
        tokens_before: IntArray,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(rows), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        order = torch.argsort(rows)
        by_blocks = _in_blocks(hidden, softcap)
        expected_weight = torch.zeros_like(hidden) if by_blocks and ctx.needs_input_grad[0] else None
        # The same path with and without a gradient: the ratio of logprobs of equal weights must be exactly 1.
        if by_blocks:
            for chunk, tokens in _chunks_with_tokens(tokens_before, BLOCK_ROWS, order):
                logprobs[tokens], entropies[chunk] = _online_softmax(
                    hidden[chunk],
                    weight,
                    bias,
                    temperature,
                    rows[tokens] - chunk.start,
                    targets[tokens],
                    None if expected_weight is None else expected_weight[chunk],
                )
        else:
            converted = weight.to(hidden.dtype)
            for chunk, tokens in _chunks_with_tokens(tokens_before, chunk_rows(weight), order):
                log_probs = torch.log_softmax(
                    _logits(hidden[chunk], converted, bias, softcap).float().div_(temperature), dim=1
                )
                logprobs[tokens] = log_probs[rows[tokens] - chunk.start, targets[tokens]]
                entropies[chunk] = -row_dot(torch.exp(log_probs), log_probs)
        ctx.save_for_backward(hidden, weight, bias, rows, targets, order, entropies, expected_weight)
        ctx.temperature, ctx.softcap, ctx.tokens_before = temperature, softcap, tokens_before
        ctx.set_materialize_grads(False)
        return logprobs, entropies[rows]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, rows, targets, order, entropies, expected_weight = ctx.saved_tensors
        grad_logprobs = (
            torch.zeros_like(rows, dtype=torch.float32)
            if grad_logprobs is None
            else grad_logprobs / ctx.temperature
        )
        logprob_grads = _sum_by_row(grad_logprobs, rows, len(hidden))
        if expected_weight is not None and grad_entropies is None:
            grad_hidden = expected_weight.mul(-logprob_grads[:, None])
            target_grads = weight[targets].to(hidden.dtype).mul_(grad_logprobs[:, None])
            return grad_hidden.index_add_(0, rows, target_grads), *[None] * 7
        entropy_grads = (
            None
            if grad_entropies is None
            else _sum_by_row(grad_entropies / ctx.temperature, rows, len(hidden))
        )
        grad_hidden, weight = torch.empty_like(hidden), weight.to(hidden.dtype)
        for chunk, tokens in _chunks_with_tokens(ctx.tokens_before, chunk_rows(weight), order):
            logits = _logits(hidden[chunk], weight, bias, ctx.softcap).float()
            log_probs = torch.log_softmax(logits / ctx.temperature, dim=1)
            slope = -logprob_grads[chunk, None]
            if entropy_grads is not None:  # dH / dlogit = -p (log p + H)
                slope = slope - entropy_grads[chunk, None] * (log_probs + entropies[chunk, None])
            grad = log_probs.exp_().mul_(slope)
            grad.index_put_(
                (rows[tokens] - chunk.start, targets[tokens]), grad_logprobs[tokens], accumulate=True
            )
            if ctx.softcap is not None:  # d tanh = 1 - tanh^2
                grad.mul_(1 - (logits / ctx.softcap).square())
            grad_hidden[chunk] = grad.to(weight.dtype) @ weight
        return grad_hidden, *[None] * 7


class _TritonHeadLogprobs(torch.autograd.Function):
    """Reads each chunk of logits once, and overwrites it by what its product with W needs.

    With p = softmax(logits / temperature) and a row's first token t, forward keeps d = (1[t] - p) W /
    temperature [N, H] in float32; this does not cancel where a token is nearly certain. With the gradients g
    of a row's tokens, backward is then sum(g) d + sum(g (W[token] - W[t])) / temperature; the second sum is
    empty for a row with one token. A gradient through the entropy computes the logits again instead.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: Tensor,
        targets: Tensor,
        temperature: float,
        tokens_before: IntArray,
    ) -> tuple[Tensor, Tensor]:
        from skylite.model import triton_kernels  # imports triton, which only GPUs need

        by_row = _by_row(rows, targets, tokens_before)
        logprobs = torch.empty(len(rows), dtype=torch.float32, device=hidden.device)
        normalizers, entropies = logprobs.new_empty((2, len(hidden)))
        direction = torch.empty_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        converted, is_first = weight.to(hidden.dtype), by_row.is_first()
        with torch.autocast(hidden.device.type, enabled=False):  # which would choose the product's dtype
            for chunk in _kernel_chunks(hidden, weight):
                logits = torch.nn.functional.linear(hidden[chunk], converted, bias)
                place = (chunk.start, by_row.first, by_row.targets, temperature)
                triton_kernels.token_logprobs(logits, *place, logprobs, normalizers, entropies)
                if direction is not None:
                    triton_kernels.logits_gradient_(logits, *place, normalizers, entropies, is_first, None)
                    direction[chunk] = _float32_product(logits, converted)
        ctx.save_for_backward(hidden, weight, bias, normalizers, entropies, direction)
        ctx.temperature, ctx.by_row = temperature, by_row
        ctx.later = _later_tokens(tokens_before, hidden.device) if direction is not None else None
        ctx.set_materialize_grads(False)
        return torch.empty_like(logprobs).index_copy_(0, by_row.order, logprobs), entropies[rows]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, normalizers, entropies, direction = ctx.saved_tensors
        by_row: _ByRow = ctx.by_row
        order = by_row.order
        grads = normalizers.new_zeros(len(order)) if grad_logprobs is None else grad_logprobs[order]
        if grad_entropies is None:
            grad = direction * _sum_by_row(grads, by_row.rows, len(hidden))[:, None]
            for later in torch.split(ctx.later, LATER_TOKENS) if len(ctx.later) else ():
                first = by_row.targets[by_row.first[by_row.rows[later]]]
                difference = weight[by_row.targets[later]].float() - weight[first].float()
                difference.mul_((grads[later] / ctx.temperature)[:, None])
                grad.index_add_(0, by_row.rows[later], difference)
            return grad.to(hidden.dtype), *[None] * 6
        from skylite.model import triton_kernels

        entropy_grads = _sum_by_row(grad_entropies[order], by_row.rows, len(hidden))
        grad, weight = torch.empty_like(hidden), weight.to(hidden.dtype)
        for chunk in _kernel_chunks(hidden, weight):
            logits = torch.nn.functional.linear(hidden[chunk], weight, bias)
            place = (chunk.start, by_row.first, by_row.targets, ctx.temperature)
            triton_kernels.logits_gradient_(logits, *place, normalizers, entropies, grads, entropy_grads)
            grad[chunk] = logits @ weight
        return grad, *[None] * 6


@dataclass(frozen=True, slots=True)
class _ByRow:
    """Tokens in the order of the rows that predict them."""

    order: Tensor
    """[C] their indices among all tokens."""
    rows: Tensor
    """[C] int64"""
    targets: Tensor
    """[C] int64"""
    first: Tensor
    """[N + 1] index of each row's first token, and the number of tokens."""

    def is_first(self) -> Tensor:
        """[C] float32: 1 for the first token of a row, else 0."""
        result = torch.ones(len(self.rows), dtype=torch.float32, device=self.rows.device)
        result[1:] = self.rows[1:] != self.rows[:-1]
        return result


def _by_row(rows: Tensor, targets: Tensor, tokens_before: IntArray) -> _ByRow:
    order = torch.argsort(rows)
    rows, targets = rows[order], targets[order]
    first = torch.searchsorted(rows, torch.arange(len(tokens_before), device=rows.device))
    return _ByRow(order, rows, targets, first)


def _later_tokens(tokens_before: IntArray, device: torch.device) -> Tensor:
    """Indices, in the order of the rows, of the tokens that are not the first of their row."""
    # Counted on the host: a count on the device would be waited for.
    is_later = np.ones(tokens_before[-1], dtype=bool)
    is_later[tokens_before[:-1][np.diff(tokens_before) > 0]] = False
    (later,) = upload([np.flatnonzero(is_later)], device)
    return later


def _kernel_chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    tiles = max(1, KERNEL_CHUNK_ELEMENTS // len(weight) // KERNEL_CHUNK_ROWS)
    size = tiles * KERNEL_CHUNK_ROWS
    return [slice(start, start + size) for start in range(0, len(hidden), size)]


def _float32_product(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32. A GPU multiplies bfloat16 matrices without rounding the result."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _online_softmax(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
    rows: Tensor,
    targets: Tensor,
    expected_weight: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Logprobs [C] of `targets` in `rows`, and entropies [N], of p = softmax(logits / temperature).

    Adds p W [N, H] to `expected_weight`. It visits one block of the vocabulary at a time and keeps, for
    scores s with running maximum m, the sums of exp(s - m), exp(s - m) (s - m) and exp(s - m) W. It rescales
    the sums to the new maximum before it adds a block (online softmax, arXiv 1805.02867, alg. 3).
    """
    target_scores = hidden.new_empty(len(rows))
    maximum = hidden.new_full((len(hidden),), torch.finfo(hidden.dtype).min)
    total, weighted = torch.zeros_like(maximum), torch.zeros_like(maximum)
    for start in range(0, len(weight), BLOCK_VOCAB):
        block = weight[start : start + BLOCK_VOCAB].to(hidden.dtype)
        scores = torch.nn.functional.linear(
            hidden, block, None if bias is None else bias[start : start + BLOCK_VOCAB]
        )
        scores = scores if temperature == 1 else scores.div_(temperature)
        column = targets - start
        is_here = (column >= 0) & (column < len(block))  # a mask, because indices would wait for the device
        found = scores[rows, column.clamp(0, len(block) - 1)]
        target_scores = torch.where(is_here, found, target_scores)
        new_maximum = torch.maximum(maximum, scores.amax(dim=1))
        shift = maximum - new_maximum
        rescale = torch.exp(shift)
        weighted = (weighted + total * shift).mul_(rescale)
        total.mul_(rescale)
        scores.sub_(new_maximum[:, None])
        probs = torch.exp(scores)
        total.add_(probs.sum(dim=1))
        weighted.add_(row_dot(probs, scores))
        if expected_weight is not None:
            expected_weight.mul_(rescale[:, None]).addmm_(probs, block)
        maximum = new_maximum
    if expected_weight is not None:
        expected_weight.div_(total[:, None])
    log_total = torch.log(total)
    return target_scores - (maximum + log_total)[rows], log_total - weighted / total


def _in_blocks(hidden: Tensor, softcap: float | None) -> bool:
    """Whether forward makes the gradient's product too. Buys memory: else a train phase peaks 12 % higher."""
    return softcap is None and hidden.dtype == torch.float32


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def chunk_rows(weight: Tensor) -> int:
    """Rows with HEAD_CHUNK_ELEMENTS logits in total."""
    return max(1, HEAD_CHUNK_ELEMENTS[weight.device.type] // len(weight))


def _chunks_with_tokens(tokens_before: IntArray, size: int, order: Tensor) -> list[tuple[slice, Tensor]]:
    """Chunks of `size` rows, each with the indices of the tokens that it predicts. `order` sorts `rows`."""
    starts = [*range(0, len(tokens_before) - 1, size), len(tokens_before) - 1]
    bounds = tokens_before[starts].tolist()
    return [
        (slice(a, b), order[i:j]) for (a, b), (i, j) in zip(pairwise(starts), pairwise(bounds), strict=True)
    ]


def _sum_by_row(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    return values.new_zeros(num_rows).index_add_(0, rows, values)


def _row_chunks(logits: Tensor) -> list[slice]:
    num_rows, vocab = logits.shape
    size = max(1, ROW_CHUNK_ELEMENTS // vocab)
    return [slice(start, start + size) for start in range(0, num_rows, size)]
