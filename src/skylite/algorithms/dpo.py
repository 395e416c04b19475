"""Direct preference optimization, arXiv 2305.18290: a chosen reply against a rejected one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skylite.algorithms.interface import Algorithm, KeepTogether
from skylite.algorithms.losses import BatchSize, LossInputs, segment_sum


@dataclass(frozen=True, slots=True)
class DirectPreferenceOptimization(Algorithm):
    """A group is a pair: trajectory 0 is the chosen reply, trajectory 1 the rejected one."""

    means = ("loss/policy", "rewards/chosen", "rewards/rejected", "rewards/margin", "rewards/accuracy")
    held_out = {"eval/score": "rewards/accuracy", "eval/loss": "loss/policy", "eval/margin": "rewards/margin"}
    beta: float
    updates_per_step: int = 1

    @property
    def needs_reference(self) -> bool:
        return True

    @property
    def keep_together(self) -> KeepTogether:
        return "group"

    def weight(self, length: int, size: BatchSize) -> float:
        return 2 / max(1, size.num_trajectories)  # 1 / number of pairs

    def loss(self, x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean over pairs of -log sigmoid(beta * (log ratio of chosen - log ratio of rejected)) (eq. 7)."""
        assert x.ref_logprobs is not None
        assert x.entropies is not None
        assert x.size is not None
        log_ratios = segment_sum(x.policy_logprobs - x.ref_logprobs, x.segments, x.num_segments)
        rewards = self.beta * log_ratios
        chosen, rejected = rewards[0::2], rewards[1::2]
        share = self.weight(1, x.size)
        loss = -torch.nn.functional.logsigmoid(chosen - rejected).sum() * share
        means = {
            "loss/policy": loss,
            "rewards/chosen": chosen.sum() * share,
            "rewards/rejected": rejected.sum() * share,
            "rewards/margin": (chosen - rejected).sum() * share,
            "rewards/accuracy": (chosen > rejected).sum() * share,
        }
        sums = {name: value.detach() for name, value in means.items()}
        return loss, {**sums, "policy/entropy": x.entropies.detach().sum()}
