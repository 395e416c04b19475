"""Log-probabilities of chosen tokens out of logits, in float32 and a few rows at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROW_CHUNK_ELEMENTS = 1 << 24
"""Logits handled at once: 64 MiB of float32 scratch, whatever the vocabulary."""


def token_logprobs(logits: Tensor, rows: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log softmax(logits[rows] / temperature)[targets] [C], and the entropy [C] in nats of those distributions, both with gradient.

    logits [N, V] in any float type, rows [C] and targets [C] int64; a row may be named several times (siblings in a prefix tree
    share the row that predicts them). The result is float32. Backward overwrites `logits` with its own gradient to save a second
    [N, V] buffer, so nothing else may read `logits` after this call.
    """
    logprobs, entropy = _TokenLogprobs.apply(logits, rows, targets, temperature)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class _TokenLogprobs(torch.autograd.Function):
    """Autograd would keep three [N, V] float32 buffers (cast, scaled, log softmax); this keeps the logits alone."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        normalizers = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        entropies = torch.empty_like(normalizers)
        for part in _row_chunks(logits):
            scaled = logits[part].float() / temperature
            normalizers[part] = torch.logsumexp(scaled, dim=1)
            probs = torch.exp(scaled - normalizers[part, None])
            entropies[part] = normalizers[part] - torch.linalg.vecdot(probs, scaled)
        chosen = logits[rows, targets].float() / temperature - normalizers[rows]
        ctx.save_for_backward(logits, rows, targets, normalizers, entropies)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return chosen, entropies[rows]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_chosen: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor, None, None, None]:
        logits, rows, targets, normalizers, entropies = ctx.saved_tensors
        size, temperature = len(normalizers), ctx.temperature
        grad_chosen = torch.zeros_like(rows, dtype=torch.float32) if grad_chosen is None else grad_chosen
        chosen_rows = _by_row(grad_chosen / temperature, rows, size)
        entropy_rows = None if grad_entropy is None else _by_row(grad_entropy / temperature, rows, size)
        for part in _row_chunks(logits):
            log_probs = logits[part].float() / ctx.temperature - normalizers[part, None]
            slope = -chosen_rows[part, None]
            if entropy_rows is not None:  # dH / dlogit = -p (log p + H)
                slope = slope - entropy_rows[part, None] * (log_probs + entropies[part, None])
            logits[part] = torch.exp(log_probs).mul_(slope).to(logits.dtype)
        logits.index_put_((rows, targets), (grad_chosen / ctx.temperature).to(logits.dtype), accumulate=True)
        return logits, None, None, None


def _by_row(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    return values.new_zeros(num_rows).index_add_(0, rows, values)


def _row_chunks(logits: Tensor) -> list[slice]:
    num_rows, vocab = logits.shape
    size = max(1, ROW_CHUNK_ELEMENTS // vocab)
    return [slice(start, start + size) for start in range(0, num_rows, size)]
