"""The LM head: from hidden states to logprobs of the sampled tokens, a few rows at a time.

The logits over the vocabulary are the largest tensor of a small model. Here they exist for a few rows only,
forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from transformers import PreTrainedModel

from skylite.model.bf16_weights import compute_dtype
from skylite.model.chunked_logprobs import head_logprobs
from skylite.model.packing import PackedTokens


class LogprobHead(nn.Module):
    """Replaces a linear LM head for one pass. `found` then holds (logprobs [C], entropies [C])."""

    def __init__(
        self, own: nn.Linear, softcap: float | None, tokens: PackedTokens, temperature: float
    ) -> None:
        super().__init__()
        # In a list, so that the head is not registered as a submodule a second time.
        self._own = [own]
        self._softcap = softcap
        self._tokens = tokens
        self._temperature = temperature
        self.found: tuple[Tensor, Tensor] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, K, H] -> logprobs [1, C, 1].

        The weights must be used here, where FSDP has gathered them.
        """
        own, tokens = self._own[0], self._tokens
        hidden = hidden.flatten(0, 1).to(compute_dtype(hidden))
        self.found = head_logprobs(
            hidden, own.weight, own.bias, tokens.rows, tokens.targets, self._temperature, self._softcap
        )
        return self.found[0][None, :, None].clone()  # not a view: FSDP puts a hook on what the model returns


def linear_head(base: PreTrainedModel) -> nn.Linear | None:
    """The LM head where it is a plain linear layer without an adapter, else None."""
    head = base.get_output_embeddings()
    return head if type(head) is nn.Linear else None


def score_in_chunks(
    model: nn.Module, base: PreTrainedModel, own: nn.Linear, tokens: PackedTokens, temperature: float
) -> tuple[Tensor, Tensor]:
    """Logprobs [C] and entropies [C] of the completion tokens, both with gradient."""
    head = LogprobHead(
        own, getattr(base.config.get_text_config(), "final_logit_softcapping", None), tokens, temperature
    )
    with replaced_head(base, head):
        outputs: Tensor = model(**tokens.inputs, use_cache=False).logits
    assert head.found is not None, "the model did not use its output embeddings"
    logprobs, entropies = head.found
    return keep_in_graph(logprobs, outputs), entropies


def keep_in_graph(values: Tensor, outputs: Tensor) -> Tensor:
    """`values` unchanged, with `outputs` in their graph: FSDP starts its backward at the model's output."""
    return values + 0.0 * outputs.float().sum()


@contextmanager
def replaced_head(base: PreTrainedModel, head: nn.Module) -> Iterator[None]:
    """Let the model end in `head` instead of its LM head."""
    own = base.get_output_embeddings()
    base.set_output_embeddings(head)
    try:
        yield
    finally:
        base.set_output_embeddings(own)
