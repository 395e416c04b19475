"""The policy gradients: GRPO and its relatives, REINFORCE++ and PPO.

Rewards become advantages (advantages.py), which weight a loss of each token (losses.py). `algorithm.name`
chooses both, and either may be the user's own function.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skylite.algorithms.advantages import gae, token_returns, zero_std_groups
from skylite.algorithms.importance import importance_weights
from skylite.algorithms.interface import Algorithm, KeepTogether
from skylite.algorithms.kl import KL_ESTIMATORS
from skylite.algorithms.losses import (
    AGGREGATIONS,
    POLICY_LOSSES,
    SEQUENCE_RATIOS,
    BatchSize,
    LossInputs,
    is_clipped,
    ratio_of,
)
from skylite.algorithms.user_functions import group_advantage, policy_loss
from skylite.config.algorithm import AlgorithmConfig, ImportanceConfig


@dataclass(frozen=True, slots=True)
class PolicyGradient(Algorithm):
    """GRPO, PPO and the rest, by the settings of `config`."""

    means = ("loss/policy", "critic/loss")

    config: AlgorithmConfig
    importance: ImportanceConfig

    @property
    def needs_old_logprobs(self) -> bool:
        """One update with a plain loss needs none."""
        return self.config.updates_per_step > 1 or self.config.selects_tokens or self.config.kl_in_reward

    @property
    def needs_reference(self) -> bool:
        return self.config.uses_ref and not self.config.kl_in_reward

    @property
    def keep_together(self) -> KeepTogether:
        """A trajectory, if a token's loss depends on the model's outputs for its other tokens."""
        loss, importance = self.config.policy_loss, self.importance
        joined_loss = loss in SEQUENCE_RATIOS or loss not in POLICY_LOSSES  # the user's own may do anything
        joined_weights = importance.level == "sequence" or importance.reject_kl is not None
        return "trajectory" if joined_loss or joined_weights or self.credits_tokens else "token"

    @property
    def credits_tokens(self) -> bool:
        return group_advantage(self.config.advantage) is None

    def keep(self, rewards: Tensor, truncated: Tensor) -> Tensor:
        """Only this drops zero-std groups and truncated trajectories."""
        dropped = zero_std_groups(rewards)[:, None] & (self.config.zero_std_groups != "keep")
        return ~dropped & ~(truncated & self.config.mask_truncated)

    def credit(self, rewards: Tensor, lengths: Tensor) -> Tensor | None:
        advantage = group_advantage(self.config.advantage)
        return None if advantage is None else advantage(rewards, lengths)

    def credit_tokens(self, rewards: Tensor, values: Tensor) -> Tensor:
        if self.config.uses_critic:
            return gae(rewards, values, self.config.gamma, self.config.gae_lambda)
        return token_returns(rewards, self.config.gamma)

    def needs_pass(self, kept: Tensor, advantages: Tensor | None) -> Tensor:
        """Trajectories without a gradient need none, unless tokens with an advantage of 0 still matter."""
        if advantages is None:
            return torch.ones_like(kept)
        config = self.config
        if config.uses_ref or config.entropy_coef != 0 or config.selects_tokens:
            return kept
        return kept & (advantages != 0).any(dim=1, keepdim=True)

    def weight(self, length: int, size: BatchSize) -> float:
        return AGGREGATIONS[self.config.aggregation](length, size)

    def loss(self, x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """sum of weight * (policy loss * importance weight + kl_coef * KL) - entropy_coef * mean entropy."""
        config = self.config
        assert x.sampling_logprobs is not None
        assert x.weights is not None
        assert x.token_weights is not None
        assert x.entropies is not None
        assert x.size is not None
        importance, sums = importance_weights(
            x.old_logprobs, x.sampling_logprobs, x.segments, x.num_segments, self.importance
        )
        loss = (policy_loss(config.policy_loss)(x, config) * importance * x.weights).sum()
        sums |= {
            "loss/policy": loss.detach(),
            "policy/entropy": x.entropies.detach().sum(),
            "policy/ratio_mean": ratio_of(x, config).detach().sum(),
            "policy/clipped_frac": is_clipped(x, config).sum(),
            "mismatch/logprob_diff_mean": (x.policy_logprobs - x.sampling_logprobs).detach().abs().sum(),
        }
        if x.ref_logprobs is not None:
            kl = KL_ESTIMATORS[config.kl_estimator](x.policy_logprobs, x.ref_logprobs)
            loss = loss + config.kl_coef * (kl * x.token_weights).sum()
            sums["policy/kl_ref"] = kl.detach().sum()
        if x.kl_penalty is not None:
            sums["policy/kl_ref"] = x.kl_penalty.sum() / config.kl_coef
        if config.entropy_coef != 0:
            counted = x.token_weights > 0
            loss = loss - config.entropy_coef * (x.entropies * counted).sum() / max(1, x.size.num_tokens)
        return loss, sums
