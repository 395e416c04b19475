"""Preference optimization: a chosen reply against a rejected one. DPO, IPO, and online DPO on groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skylite.algorithms.advantages import Components, zero_std_groups
from skylite.algorithms.interface import Algorithm, KeepTogether
from skylite.algorithms.losses import BatchSize, LossInputs, segment_mean, segment_sum


@dataclass(frozen=True, slots=True)
class DirectPreferenceOptimization(Algorithm):
    """A group is a pair: trajectory 0 is the chosen reply, trajectory 1 the rejected one."""

    means = ("loss/policy", "rewards/chosen", "rewards/rejected", "rewards/margin", "rewards/accuracy")
    held_out = {"eval/score": "rewards/accuracy", "eval/loss": "loss/policy", "eval/margin": "rewards/margin"}
    beta: float
    updates_per_step: int = 1
    is_ipo: bool = False

    @property
    def needs_reference(self) -> bool:
        return True

    @property
    def keep_together(self) -> KeepTogether:
        return "group"

    def weight(self, length: int, size: BatchSize) -> float:
        return 2 / max(1, size.num_trajectories)  # 1 / number of pairs

    def pairs(self, x: LossInputs, values: Tensor) -> tuple[Tensor, Tensor]:
        """[S] values of trajectories -> those of the chosen and of the rejected ones."""
        return values[0::2], values[1::2]

    def loss(self, x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean over pairs of -log sigmoid(beta * (log ratio of chosen - of rejected)), arXiv 2305.18290.

        IPO: of (the same difference of means over tokens - 1 / (2 beta))^2, arXiv 2310.12036, eq. 17.
        """
        assert x.ref_logprobs is not None
        assert x.entropies is not None
        assert x.size is not None
        log_ratios = x.policy_logprobs - x.ref_logprobs
        rewards = self.beta * segment_sum(log_ratios, x.segments, x.num_segments)
        chosen, rejected = self.pairs(x, rewards)
        share = self.weight(1, x.size)
        if self.is_ipo:
            better, worse = self.pairs(x, segment_mean(log_ratios, x.segments, x.num_segments))
            loss = (better - worse - 1 / (2 * self.beta)).square().sum() * share
        else:
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


class OnlineDPO(DirectPreferenceOptimization):
    """The best trajectory of each group against the worst, as sampled (arXiv 2402.04792).

    By the reward, not by a judge of pairs. Of equal ones the later is better. Groups whose rewards are all
    equal have no pair.
    """

    held_out = {}

    def keep(self, rewards: Tensor, truncated: Tensor) -> Tensor:
        return _best_and_worst(rewards) != 0

    def credit(self, rewards: Tensor, lengths: Tensor, components: Components | None) -> Tensor:
        return _best_and_worst(rewards)

    def pairs(self, x: LossInputs, values: Tensor) -> tuple[Tensor, Tensor]:
        signs = segment_sum(x.advantages, x.segments, x.num_segments)
        return values[signs > 0], values[signs < 0]


def _best_and_worst(rewards: Tensor) -> Tensor:
    """[N, G] 1 for the best, -1 for the worst, 0 for the others."""
    order = rewards.argsort(dim=1, stable=True)
    signs = torch.zeros_like(rewards).scatter(1, order[:, :1], -1.0).scatter(1, order[:, -1:], 1.0)
    return torch.where(zero_std_groups(rewards)[:, None], torch.zeros_like(signs), signs)
