"""Supervised fine-tuning: the mean negative log-likelihood of the assistant's tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from skylite.algorithms.interface import Algorithm
from skylite.algorithms.losses import BatchSize, LossInputs, token_mean


@dataclass(frozen=True, slots=True)
class SupervisedFineTuning(Algorithm):
    """Every token with a weight counts the same."""

    counts_top_tokens = True
    held_out = {"eval/score": "policy/accuracy", "eval/loss": "loss/policy"}
    updates_per_step: int = 1

    def weight(self, length: int, size: BatchSize) -> float:
        return token_mean(length, size)

    def loss(self, x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """-sum of weight * logprob."""
        assert x.token_weights is not None
        assert x.entropies is not None
        loss = -(x.policy_logprobs * x.token_weights).sum()
        metrics = {"loss/policy": loss.detach(), "policy/entropy": x.entropies.detach().sum()}
        if x.is_top is not None:
            metrics["policy/accuracy"] = (x.is_top * x.token_weights).sum()
        return loss, metrics
