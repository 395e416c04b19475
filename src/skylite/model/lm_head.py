"""Replaces the LM head during a pass: chunked_logprobs.py computes logprobs from its hidden states.

Saves memory: logits are the widest activation of a small model, and only a few rows of them exist at a time,
in forward and backward.

Buys memory: with all logits at a time the peak of a train phase is 30 % higher.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from skylite.model.bf16_weights import compute_dtype
from skylite.model.chunked_divergence import Head, Teacher
from skylite.model.chunked_logprobs import chunk_rows, head_logprobs
from skylite.model.packing import PackedTokens


class LogprobHead(nn.Module):
    """Replaces a linear LM head for one pass. `result` then holds (logprobs [C], entropies [C]).

    With a teacher, `compared` holds (divergences [C], the teacher's logprobs [C]).
    """

    def __init__(
        self,
        linear: nn.Linear,
        softcap: float | None,
        tokens: PackedTokens,
        temperature: float,
        kernels: bool,
        teacher: Teacher | None = None,
    ) -> None:
        super().__init__()
        # In a list, because an attribute would register the module a second time.
        self._linear = [linear]
        self._softcap = softcap
        self._tokens = tokens
        self._temperature = temperature
        self._kernels = kernels
        self._teacher = teacher
        self.result: tuple[Tensor, Tensor] | None = None
        self.compared: tuple[Tensor, Tensor] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, K, H] -> logprobs [1, C, 1]. Uses the weights here, where FSDP has gathered them."""
        linear, tokens = self._linear[0], self._tokens
        hidden = tokens.kept(hidden).flatten(0, 1).to(compute_dtype(hidden))
        self.result = head_logprobs(
            hidden,
            linear.weight,
            linear.bias,
            tokens.rows,
            tokens.targets,
            self._temperature,
            self._softcap,
            tokens.tokens_before,
            self._kernels,
        )
        if self._teacher is not None:
            head = Head(linear.weight, linear.bias, self._softcap)
            self.compared = self._teacher.compare(hidden, tokens, head, self._temperature)
        # Not a view, because FSDP puts a hook on the model's output.
        return self.result[0][None, :, None].clone()


class TopTokenHead(nn.Module):
    """Replaces a linear LM head for one pass. `result` then holds the most likely token of each position."""

    def __init__(self, linear: nn.Linear, tokens: PackedTokens) -> None:
        super().__init__()
        self._linear = [linear]
        self._tokens = tokens
        self.result: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, K, H] -> [B, K, 1], for FSDP; nobody reads it."""
        linear, dtype = self._linear[0], compute_dtype(hidden)
        weight, rows = linear.weight.to(dtype), self._tokens.kept(hidden).flatten(0, 1).to(dtype)
        chunks = torch.split(rows, chunk_rows(weight))
        self.result = torch.cat([nn.functional.linear(x, weight, linear.bias).argmax(-1) for x in chunks])
        return hidden[..., :1]


class HiddenHead(nn.Module):
    """Replaces an LM head for one pass. `result` then holds its input [C, H] that predicts each token."""

    def __init__(self, tokens: PackedTokens) -> None:
        super().__init__()
        self._tokens = tokens
        self.result: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, K, H] -> [B, K, 1], for FSDP; nobody reads it."""
        kept = self._tokens.kept(hidden).flatten(0, 1)
        self.result = kept.to(compute_dtype(hidden))[self._tokens.rows]
        return hidden[..., :1]


def linear_head(base: PreTrainedModel) -> nn.Linear | None:
    """The model's LM head if it is a plain linear layer without an adapter, else None."""
    head = base.get_output_embeddings()
    return head if type(head) is nn.Linear else None


def score_in_chunks(
    model: nn.Module,
    base: PreTrainedModel,
    linear: nn.Linear,
    tokens: PackedTokens,
    temperature: float,
    kernels: bool,
    teacher: Teacher | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Logprobs [C] and entropies [C] of the completion tokens, both with gradient. `kernels`: in Triton.

    With a teacher, also what `Teacher.compare` gives.
    """
    softcap = getattr(base.config.get_text_config(), "final_logit_softcapping", None)
    head = LogprobHead(linear, softcap, tokens, temperature, kernels, teacher)
    with replaced_head(base, head):
        outputs: Tensor = model(**tokens.model_inputs(), use_cache=False).logits
    assert head.result is not None, "the model did not use its output embeddings"
    logprobs, entropies = head.result
    return keep_in_graph(logprobs, outputs), entropies, head.compared


def hidden_states(model: nn.Module, base: PreTrainedModel, tokens: PackedTokens) -> Tensor:
    """[C, H] what the LM head reads to predict each token."""
    head = HiddenHead(tokens)
    with replaced_head(base, head):
        model(**tokens.model_inputs(), use_cache=False)
    assert head.result is not None, "the model did not use its output embeddings"
    return head.result


def top_tokens_in_chunks(
    model: nn.Module, base: PreTrainedModel, linear: nn.Linear, tokens: PackedTokens
) -> Tensor:
    """The most likely token of each position."""
    head = TopTokenHead(linear, tokens)
    with replaced_head(base, head):
        model(**tokens.model_inputs(), use_cache=False)
    assert head.result is not None, "the model did not use its output embeddings"
    return head.result


def keep_in_graph(values: Tensor, outputs: Tensor) -> Tensor:
    """`values`, with the model's output in their autograd graph, times 0.

    FSDP attaches its backward hooks to that output.
    """
    return values + 0.0 * outputs.float().sum()


@contextmanager
def replaced_head(base: PreTrainedModel, head: nn.Module) -> Iterator[None]:
    """Replace the model's LM head by `head` inside the block."""
    original = base.get_output_embeddings()
    base.set_output_embeddings(head)
    try:
        yield
    finally:
        base.set_output_embeddings(original)
