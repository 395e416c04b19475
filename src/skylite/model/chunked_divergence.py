"""The divergence of a policy from its teacher over the whole vocabulary, one chunk of tokens at a time.

Both share the LM head, so a chunk of both logits comes from two small matrices of hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skylite.model.chunked_logprobs import HEAD_CHUNK_ELEMENTS
from skylite.model.packing import PackedTokens

CHUNK_ELEMENTS = {device: elements // 4 for device, elements in HEAD_CHUNK_ELEMENTS.items()}
"""Logits of a chunk: fewer than in `head_logprobs`, because more buffers of its size exist at once."""
Divergence = Callable[[Tensor, Tensor], Tensor]
"""(policy's logprobs [N, V], teacher's) -> [N]."""


class Head(NamedTuple):
    """The LM head. Without a weight, hidden states are the logits already."""

    weight: Tensor | None = None
    """[V, H], frozen."""
    bias: Tensor | None = None
    softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap)."""


@dataclass(frozen=True, slots=True)
class TeacherStates:
    """What a teacher computed for the tokens that it teaches."""

    hidden: Tensor
    """[T, H] the LM head's input that predicts each of them, or the logits [T, V] of a model without one."""
    taught: Tensor | None
    """[T] their indices among the policy's tokens. None: all."""
    divergence: Divergence

    def compare(
        self, hidden: Tensor, tokens: PackedTokens, head: Head, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Divergences [C] of the policy, with gradient, and the teacher's logprobs [C] of the tokens.

        Divergences are 0, and logprobs NaN, for tokens that it does not teach. `hidden` [N, H]: the policy's.
        """
        rows, targets = tokens.rows, tokens.targets
        if self.taught is not None:
            rows, targets = rows[self.taught], targets[self.taught]
        values, logprobs = head_divergences(
            hidden[rows], self.hidden, targets, head, temperature, self.divergence
        )
        if self.taught is None:
            return values, logprobs
        count = len(tokens.targets)
        nothing = logprobs.new_full((count,), torch.nan)
        return values.new_zeros(count).index_copy(0, self.taught, values), nothing.index_copy(
            0, self.taught, logprobs
        )


def head_divergences(
    hidden: Tensor, teacher: Tensor, targets: Tensor, head: Head, temperature: float, divergence: Divergence
) -> tuple[Tensor, Tensor]:
    """Divergences [T] between softmax(logits / temperature) of both, and the teacher's logprobs of `targets`.

    Forward makes the gradient, too: of a chunk's logits only its product with the head is kept [T, H].

    Args:
        hidden: [T, H] of the policy; the only one with a gradient.
        teacher: [T, H]
        targets: [T] token ids.
        head: shared by both.
        temperature: of both.
        divergence: differentiable.
    """
    values, logprobs = _HeadDivergences.apply(  # type: ignore[no-untyped-call]
        hidden, teacher, targets, head, temperature, divergence
    )
    return values, logprobs


class _HeadDivergences(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        teacher: Tensor,
        targets: Tensor,
        head: Head,
        temperature: float,
        divergence: Divergence,
    ) -> tuple[Tensor, Tensor]:
        values = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        logprobs = torch.empty_like(values)
        direction = torch.empty_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        weight, bias = (None if x is None else x.to(hidden.dtype) for x in head[:2])
        head = Head(weight, bias, head.softcap)
        vocabulary = hidden.shape[1] if weight is None else len(weight)
        size = max(1, CHUNK_ELEMENTS[hidden.device.type] // vocabulary)
        with torch.autocast(hidden.device.type, enabled=False):  # which would choose the product's dtype
            for start in range(0, len(hidden), size):
                chunk = slice(start, start + size)
                of_teacher = _log_softmax(_logits(teacher[chunk], head), head.softcap, temperature)
                logprobs[chunk] = of_teacher.gather(1, targets[chunk, None])[:, 0]
                logits = _logits(hidden[chunk], head).requires_grad_(direction is not None)
                with torch.set_grad_enabled(direction is not None):
                    found = divergence(_log_softmax(logits, head.softcap, temperature), of_teacher)
                    total = found.sum()
                values[chunk] = found.detach()
                if direction is not None:
                    (slope,) = torch.autograd.grad(total, logits)
                    direction[chunk] = _through_head(slope, head)
        ctx.save_for_backward(direction)
        ctx.dtype = hidden.dtype
        ctx.mark_non_differentiable(logprobs)
        return values, logprobs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_values: Tensor, _grad_logprobs: Tensor) -> tuple[Tensor | None, ...]:
        (direction,) = ctx.saved_tensors
        return (direction * grad_values[:, None]).to(ctx.dtype), *[None] * 5


def _logits(hidden: Tensor, head: Head) -> Tensor:
    """A new tensor without history, in float32."""
    if head.weight is None:
        return hidden.detach().float().clone()
    return torch.nn.functional.linear(hidden.detach(), head.weight, head.bias).float()


def _log_softmax(logits: Tensor, softcap: float | None, temperature: float) -> Tensor:
    capped = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    return torch.log_softmax(capped / temperature, dim=-1)


def _through_head(slope: Tensor, head: Head) -> Tensor:
    """Gradients [N, V] by logits as gradients by hidden states."""
    return slope if head.weight is None else (slope.to(head.weight.dtype) @ head.weight).float()
