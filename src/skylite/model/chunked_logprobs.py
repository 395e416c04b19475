"""Log-probabilities of chosen tokens out of logits, in float32 and a few rows at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROW_CHUNK_ELEMENTS = 1 << 24
"""Logits handled at once: 64 MiB of float32 scratch, whatever the vocabulary."""
HEAD_CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""The same where the logits are made here too. CPU: 16 MiB, which stays near a core's cache. A GPU would read the whole head again every 27
rows then (151,936 words): with 441 its product is bound by arithmetic, for about 1 GiB of scratch. By arithmetic; not measured on a GPU."""
BLOCK_ROWS, BLOCK_WORDS = 512, 2048
"""Rows and words of a block of logits, 4 MiB: both products of a block run at the speed of large ones, and its passes in the cache."""


def token_logprobs(
    logits: Tensor, rows: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
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
    def forward(
        ctx: Any, logits: Tensor, rows: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
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
    def backward(
        ctx: Any, grad_chosen: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
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


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    targets: Tensor,
    temperature: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The same out of hidden states [N, H] and the (frozen) head's weight [V, H] and bias [V], without ever holding [N, V].

    In float32 the gradient's product is made forward, while a block's probabilities are there: of d logprob / d hidden = W[target] - p W
    the second term [N, H] is kept, and backward has no product to make. Where that would not do, the logits are computed a few rows at a
    time and once more backward: for a gradient through the entropy, under a softcap, and in bfloat16, where the difference would lose its
    digits for tokens that are nearly certain.
    `softcap`: logits become softcap * tanh(logits / softcap), as Gemma 2 does. `weight` may be of a narrower type than `hidden`, whose type
    is computed in: it is widened a block at a time, and where the logits are computed again as a whole while each pass lasts.
    """
    logprobs, entropy = _HeadLogprobs.apply(hidden, weight, bias, rows, targets, temperature, softcap)  # type: ignore[no-untyped-call]
    return logprobs, entropy


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
    ) -> tuple[Tensor, Tensor]:
        chosen = torch.empty(len(rows), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        order = torch.argsort(rows)
        by_blocks = softcap is None and hidden.dtype == torch.float32
        expected = torch.zeros_like(hidden) if by_blocks and ctx.needs_input_grad[0] else None
        # With a gradient or without: a ratio to logprobs of before must be exactly 1 where nothing was learned between.
        if by_blocks:
            for part, tokens in _parts(len(hidden), BLOCK_ROWS, rows, order):
                places = rows[tokens] - part.start, targets[tokens]
                chosen[tokens], entropies[part] = _online_softmax(
                    hidden[part],
                    weight,
                    bias,
                    temperature,
                    places,
                    None if expected is None else expected[part],
                )
        else:
            wide = weight.to(hidden.dtype)
            for part, tokens in _parts(len(hidden), _chunk_rows(weight), rows, order):
                log_probs = torch.log_softmax(
                    _scores(hidden[part], wide, bias, softcap).float().div_(temperature), dim=1
                )
                chosen[tokens] = log_probs[rows[tokens] - part.start, targets[tokens]]
                entropies[part] = -torch.linalg.vecdot(torch.exp(log_probs), log_probs)
        ctx.save_for_backward(hidden, weight, bias, rows, targets, order, entropies, expected)
        ctx.temperature, ctx.softcap = temperature, softcap
        ctx.set_materialize_grads(False)
        return chosen, entropies[rows]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_chosen: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None, None, None, None]:
        hidden, weight, bias, rows, targets, order, entropies, expected = ctx.saved_tensors
        grad_chosen = (
            torch.zeros_like(rows, dtype=torch.float32)
            if grad_chosen is None
            else grad_chosen / ctx.temperature
        )
        chosen_rows = _by_row(grad_chosen, rows, len(hidden))
        if expected is not None and grad_entropy is None:
            grad_hidden = expected.mul(-chosen_rows[:, None])
            chosen_words = weight[targets].to(hidden.dtype).mul_(grad_chosen[:, None])
            return grad_hidden.index_add_(0, rows, chosen_words), None, None, None, None, None, None
        entropy_rows = (
            None if grad_entropy is None else _by_row(grad_entropy / ctx.temperature, rows, len(hidden))
        )
        grad_hidden, weight = torch.empty_like(hidden), weight.to(hidden.dtype)
        for part, tokens in _parts(len(hidden), _chunk_rows(weight), rows, order):
            scores = _scores(hidden[part], weight, bias, ctx.softcap).float()
            log_probs = torch.log_softmax(scores / ctx.temperature, dim=1)
            slope = -chosen_rows[part, None]
            if entropy_rows is not None:  # dH / dlogit = -p (log p + H)
                slope = slope - entropy_rows[part, None] * (log_probs + entropies[part, None])
            grad = log_probs.exp_().mul_(slope)
            grad.index_put_(
                (rows[tokens] - part.start, targets[tokens]), grad_chosen[tokens], accumulate=True
            )
            if ctx.softcap is not None:  # d tanh = 1 - tanh^2
                grad.mul_(1 - (scores / ctx.softcap).square())
            grad_hidden[part] = grad.to(weight.dtype) @ weight
        return grad_hidden, None, None, None, None, None, None


def _online_softmax(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
    places: tuple[Tensor, Tensor],
    expected: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """log p [C] at `places` (rows [C], words [C]) and the entropy [N] of p = softmax(scores); p W [N, H] is added to `expected`.

    A block of words at a time, with a running maximum m, sum of exp(s - m), sum of exp(s - m) (s - m), and sum of exp(s - m) W, all
    brought to the new maximum before a block is added (online softmax, arXiv 1805.02867, alg. 3).
    """
    rows, targets = places
    chosen = hidden.new_empty(len(rows))
    top = hidden.new_full((len(hidden),), torch.finfo(hidden.dtype).min)
    total, weighted = torch.zeros_like(top), torch.zeros_like(top)
    for start in range(0, len(weight), BLOCK_WORDS):
        words = weight[start : start + BLOCK_WORDS].to(hidden.dtype)
        scores = torch.nn.functional.linear(
            hidden, words, None if bias is None else bias[start : start + BLOCK_WORDS]
        )
        scores = scores if temperature == 1 else scores.div_(temperature)
        here = torch.nonzero((targets >= start) & (targets < start + len(words)))[:, 0]
        chosen[here] = scores[rows[here], targets[here] - start]
        new_top = torch.maximum(top, scores.amax(dim=1))
        shift = top - new_top
        shrink = torch.exp(shift)
        weighted = (weighted + total * shift).mul_(shrink)
        total.mul_(shrink)
        scores.sub_(new_top[:, None])
        probs = torch.exp(scores)
        total.add_(probs.sum(dim=1))
        weighted.add_(torch.linalg.vecdot(probs, scores))
        if expected is not None:
            expected.mul_(shrink[:, None]).addmm_(probs, words)
        top = new_top
    if expected is not None:
        expected.div_(total[:, None])
    log_total = torch.log(total)
    return chosen - (top + log_total)[rows], log_total - weighted / total


def _scores(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    scores = torch.nn.functional.linear(hidden, weight, bias)
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def _chunk_rows(weight: Tensor) -> int:
    """Rows whose whole logits are HEAD_CHUNK_ELEMENTS of the device."""
    return max(1, HEAD_CHUNK_ELEMENTS[weight.device.type] // len(weight))


def _parts(num_rows: int, size: int, rows: Tensor, order: Tensor) -> list[tuple[slice, Tensor]]:
    """Chunks of `size` rows, each with the tokens whose distribution lies in it. `order` sorts `rows`."""
    starts = list(range(0, num_rows, size))
    bounds = torch.searchsorted(rows[order], torch.tensor([*starts, num_rows], device=rows.device)).tolist()
    return [
        (slice(a, min(a + size, num_rows)), order[i:j])
        for a, i, j in zip(starts, bounds[:-1], bounds[1:], strict=True)
    ]


def _by_row(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    return values.new_zeros(num_rows).index_add_(0, rows, values)


def _row_chunks(logits: Tensor) -> list[slice]:
    num_rows, vocab = logits.shape
    size = max(1, ROW_CHUNK_ELEMENTS // vocab)
    return [slice(start, start + size) for start in range(0, num_rows, size)]
