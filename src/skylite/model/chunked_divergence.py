"""The divergence of a policy from its teacher, one chunk of tokens at a time.

A teacher beside the policy shares its LM head, so a chunk of both logits comes from two small matrices of
hidden states. One on a server has said which tokens it finds most likely.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from skylite.algorithms.divergences import top_and_rest
from skylite.model.chunked_logprobs import HEAD_CHUNK_ELEMENTS
from skylite.model.packing import PackedTokens

CHUNK_ELEMENTS = {device: elements // 4 for device, elements in HEAD_CHUNK_ELEMENTS.items()}
"""Logits of a chunk: fewer than in `head_logprobs`, because more buffers of its size exist at once."""
Divergence = Callable[[Tensor, Tensor], Tensor]
"""(policy's logprobs [N, V], teacher's) -> [N]."""
OfChunk = Callable[[Tensor, slice], Tensor]
"""(policy's logprobs [N, V] of some tokens, their places) -> [N], differentiable."""


class Head(NamedTuple):
    """The LM head. Without a weight, hidden states are the logits already."""

    weight: Tensor | None = None
    """[V, H], frozen."""
    bias: Tensor | None = None
    softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap)."""

    def to(self, dtype: torch.dtype) -> Head:
        """The same in another dtype, without history."""
        return self._replace(
            weight=None if self.weight is None else self.weight.detach().to(dtype),
            bias=None if self.bias is None else self.bias.detach().to(dtype),
        )


class Teacher(Protocol):
    """What is known of a teacher's distributions at the tokens that it teaches."""

    def compare(
        self, hidden: Tensor, tokens: PackedTokens, head: Head, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Divergences [C] of the policy, with gradient, and the teacher's logprobs [C] of the tokens.

        Divergences are 0, and logprobs NaN, for tokens that it does not teach. `hidden` [N, H]: the policy's.
        """


@dataclass(frozen=True, slots=True)
class TeacherStates(Teacher):
    """What a teacher beside the policy computed for the tokens that it teaches."""

    hidden: Tensor
    """[T, H] the LM head's input that predicts each of them, or the logits [T, V] of a model without one."""
    taught: Tensor | None
    """[T] their indices among the policy's tokens. None: all."""
    divergence: Divergence

    def compare(
        self, hidden: Tensor, tokens: PackedTokens, head: Head, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """See Teacher."""
        targets = tokens.targets if self.taught is None else tokens.targets[self.taught]
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        head = head.to(hidden.dtype)

        def of_chunk(policy: Tensor, chunk: slice) -> Tensor:
            teacher = _log_softmax(_logits(self.hidden[chunk], head), head.softcap, temperature)
            logprobs[chunk] = teacher.gather(1, targets[chunk, None])[:, 0]
            return self.divergence(policy, teacher)

        values = _of_taught(hidden, tokens, self.taught, head, temperature, of_chunk)
        return values, _at_taught(logprobs, self.taught, len(tokens.targets), torch.nan)


@dataclass(frozen=True, slots=True)
class TeacherTop(Teacher):
    """What a server said of the T tokens that it teaches: the K best ones in the place of each."""

    ids: Tensor
    """[T, K]"""
    top_logprobs: Tensor
    """[T, K]"""
    logprobs: Tensor
    """[C] of the policy's tokens; NaN for those that it does not teach."""
    taught: Tensor | None
    """As in TeacherStates."""
    divergence: Divergence

    def compare(
        self, hidden: Tensor, tokens: PackedTokens, head: Head, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """See Teacher. The divergence is over the best tokens, and the rest as one."""

        def of_chunk(policy: Tensor, chunk: slice) -> Tensor:
            return self.divergence(*top_and_rest(policy, self.ids[chunk], self.top_logprobs[chunk]))

        head = head.to(hidden.dtype)
        return _of_taught(hidden, tokens, self.taught, head, temperature, of_chunk), self.logprobs


@dataclass(frozen=True, slots=True)
class SumOfSquares(Teacher):
    """No teacher: in place of a divergence it gives the sum of the policy's squared probabilities."""

    def compare(
        self, hidden: Tensor, tokens: PackedTokens, head: Head, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """See Teacher."""
        squares = head_divergences(
            hidden, head.to(hidden.dtype), temperature, lambda policy, _: (2 * policy).exp().sum(dim=1)
        )[tokens.rows]
        return squares, torch.full_like(squares, torch.nan)


def _of_taught(
    hidden: Tensor,
    tokens: PackedTokens,
    taught: Tensor | None,
    head: Head,
    temperature: float,
    of_chunk: OfChunk,
) -> Tensor:
    """`head_divergences` [C]; 0 for tokens that are not taught."""
    rows = tokens.rows if taught is None else tokens.rows[taught]
    values = head_divergences(hidden[rows], head, temperature, of_chunk)
    return _at_taught(values, taught, len(tokens.targets), 0.0)


def _at_taught(values: Tensor, taught: Tensor | None, count: int, nothing: float) -> Tensor:
    """[T] -> [C]"""
    return values if taught is None else values.new_full((count,), nothing).index_copy(0, taught, values)


def head_divergences(hidden: Tensor, head: Head, temperature: float, of_chunk: OfChunk) -> Tensor:
    """`of_chunk` [T] of softmax(logits / temperature), a chunk at a time.

    Forward makes the gradient, too: of a chunk's logits only its product with the head is kept [T, H].

    Args:
        hidden: [T, H], with gradient.
        head: in the dtype of `hidden`.
        temperature: of the policy.
        of_chunk: called once for each chunk.
    """
    values: Tensor = _HeadDivergences.apply(hidden, head, temperature, of_chunk)  # type: ignore[no-untyped-call]
    return values


class _HeadDivergences(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Head, temperature: float, of_chunk: OfChunk) -> Tensor:
        values = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        direction = torch.empty_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        vocabulary = hidden.shape[1] if head.weight is None else len(head.weight)
        size = max(1, CHUNK_ELEMENTS[hidden.device.type] // vocabulary)
        with torch.autocast(hidden.device.type, enabled=False):  # which would choose the product's dtype
            for start in range(0, len(hidden), size):
                chunk = slice(start, start + size)
                logits = _logits(hidden[chunk], head).requires_grad_(direction is not None)
                with torch.set_grad_enabled(direction is not None):
                    found = of_chunk(_log_softmax(logits, head.softcap, temperature), chunk)
                    total = found.sum()
                values[chunk] = found.detach()
                if direction is not None:
                    (slope,) = torch.autograd.grad(total, logits)
                    direction[chunk] = _through_head(slope, head)
        ctx.save_for_backward(direction)
        ctx.dtype = hidden.dtype
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_values: Tensor) -> tuple[Tensor | None, ...]:
        (direction,) = ctx.saved_tensors
        return (direction * grad_values[:, None]).to(ctx.dtype), None, None, None


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
