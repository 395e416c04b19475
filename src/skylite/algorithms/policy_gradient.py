"""The policy gradients: GRPO and its relatives, REINFORCE++ and PPO.

Rewards become advantages (advantages.py), which weight a loss of each token (losses.py). `algorithm.name`
chooses both, and either may be the user's own function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from skylite.algorithms.advantages import (
    Components,
    best,
    gae,
    optimal_token_baseline,
    token_returns,
    zero_std_groups,
)
from skylite.algorithms.importance import importance_weights, off_policy
from skylite.algorithms.interface import Algorithm, KeepTogether
from skylite.algorithms.kl import KL_ESTIMATORS
from skylite.algorithms.learned import (
    ENTROPY_COEF,
    Learned,
    add_limits,
    entropy_coef,
    learn,
    limit_metrics,
)
from skylite.algorithms.losses import (
    AGGREGATIONS,
    POLICY_LOSSES,
    SEQUENCE_RATIOS,
    BatchSize,
    LossInputs,
    is_clipped,
    ratio_of,
)
from skylite.algorithms.user_functions import (
    asks_for_components,
    group_advantage,
    load_functions,
    policy_loss,
)
from skylite.config.algorithm import AlgorithmConfig, ImportanceConfig


@dataclass(frozen=True, slots=True)
class PolicyGradient(Algorithm):
    """GRPO, PPO and the rest, by the settings of `config`."""

    means = ("loss/policy", "critic/loss")

    config: AlgorithmConfig
    importance: ImportanceConfig
    learned: Learned = field(default_factory=dict)
    """See learned.py."""

    @property
    def updates_per_step(self) -> int:
        return self.config.updates_per_step

    def load(self, programs: Mapping[str, str]) -> None:
        load_functions(self.config, programs)

    @property
    def needs_old_logprobs(self) -> bool:
        """One update with a plain loss needs none."""
        first = self.config.selects_tokens or self.penalises_kl or self.compares_tokens
        return self.updates_per_step > 1 or first

    @property
    def needs_reference(self) -> bool:
        return self.config.uses_ref and not self.penalises_kl

    @property
    def penalises_kl(self) -> bool:
        return self.config.kl_in_reward

    @property
    def selects_by_entropy(self) -> bool:
        return self.config.top_entropy_quantile < 1

    @property
    def selects_by_cov(self) -> bool:
        return self.config.selects_by_cov

    @property
    def keep_together(self) -> KeepTogether:
        """A trajectory, if a token's loss depends on the model's outputs for its other tokens."""
        loss, importance = self.config.policy_loss, self.importance
        joined_loss = loss in SEQUENCE_RATIOS or loss not in POLICY_LOSSES  # the user's own may do anything
        joined_weights = importance.level == "sequence" or importance.reject_kl is not None
        joined_weights = joined_weights or importance.off_policy_kl is not None
        return "trajectory" if joined_loss or joined_weights or self.credits_tokens else "token"

    @property
    def credits_tokens(self) -> bool:
        return self.config.advantage in ("gae", "reinforce++")

    @property
    def compares_tokens(self) -> bool:
        return self.config.advantage == "otb"

    @property
    def needs_components(self) -> bool:
        return bool(self.config.limits) or asks_for_components(self.config.advantage)

    def keep(self, rewards: Tensor, truncated: Tensor) -> Tensor:
        """Only this drops zero-std groups and truncated trajectories, and for raft all but the best."""
        if self.config.advantage == "best":
            return (best(rewards, rewards) > 0) & ~(truncated & self.config.mask_truncated)
        dropped = zero_std_groups(rewards)[:, None] & (self.config.zero_std_groups != "keep")
        return ~dropped & ~(truncated & self.config.mask_truncated)

    def learned_metrics(self, components: Components | None) -> dict[str, float]:
        has_target = self.config.entropy_target is not None
        metrics = {ENTROPY_COEF: entropy_coef(self.config, self.learned)} if has_target else {}
        return (
            metrics if components is None else metrics | limit_metrics(components, self.config, self.learned)
        )

    def learn(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return learn(self.config, self.learned, metrics)

    def credit(self, rewards: Tensor, lengths: Tensor, components: Components | None) -> Tensor | None:
        if self.credits_tokens or self.compares_tokens:
            return None
        if components is not None:
            rewards, components = add_limits(rewards, components, self.config, self.learned)
        return group_advantage(self.config)(rewards, lengths, components)

    def credit_tokens(self, rewards: Tensor, values: Tensor) -> Tensor:
        if self.config.uses_critic:
            return gae(rewards, values, self.config.gamma, self.config.gae_lambda)
        return token_returns(rewards, self.config.gamma)

    def compare_tokens(self, rewards: Tensor, norms: Tensor, lengths: Tensor) -> Tensor:
        return optimal_token_baseline(rewards, norms, lengths)

    def kl_penalty(self, old_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        return self.config.kl_coef * KL_ESTIMATORS[self.config.kl_estimator](old_logprobs, ref_logprobs)

    def needs_pass(self, kept: Tensor, advantages: Tensor | None) -> Tensor:
        """Trajectories without a gradient need none, unless tokens with an advantage of 0 still matter."""
        if advantages is None:
            return torch.ones_like(kept)
        config = self.config
        if config.uses_ref or config.uses_entropy or config.selects_tokens or config.pulls_to_sampler:
            return kept
        return kept & (advantages != 0).any(dim=1, keepdim=True)

    def entropy_threshold(self, entropies: Tensor) -> float:
        return entropy_threshold(entropies, self.config.top_entropy_quantile)

    def is_clipped(self, x: LossInputs) -> Tensor:
        return is_clipped(x, self.config)

    def select_by_cov(
        self, advantages: Tensor, logprobs: Tensor, clipped: Tensor, generator: torch.Generator
    ) -> Tensor:
        config, cov = self.config, covariances(advantages, logprobs)
        if config.policy_loss == "kl_cov":
            return kl_cov_selection(cov, config.cov_frac)
        bounds = config.clip_cov_low, config.clip_cov_high
        return clip_cov_selection(cov, clipped, config.cov_frac, *bounds, generator)

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
        settings = self.importance
        if config.is_unweighted:
            settings = settings.model_copy(update={"mode": "none"})
        importance, sums = importance_weights(
            x.old_logprobs, x.sampling_logprobs, x.segments, x.num_segments, settings
        )
        if settings.off_policy_kl is not None:
            left = off_policy(x, settings.off_policy_kl)
            importance, sums["mismatch/off_policy_frac"] = importance * ~left, left.sum()
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
            if config.kl_bias_correction:
                kl = kl * ratio_of(x, config)
            loss = loss + config.kl_coef * (kl * x.token_weights).sum()
            sums["policy/kl_ref"] = kl.detach().sum()
        if x.kl_penalty is not None:
            sums["policy/kl_ref"] = x.kl_penalty.sum() / config.kl_coef
        if config.uses_entropy:
            counted, coef = x.token_weights > 0, entropy_coef(config, self.learned)
            loss = loss - coef * (x.entropies * counted).sum() / max(1, x.size.num_tokens)
        return loss, sums


def covariances(advantages: Tensor, logprobs: Tensor) -> Tensor:
    """[C] (A - mean A)(log p - mean log p): how much a token pulls the entropy down (arXiv 2505.22617)."""
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def clip_cov_selection(
    cov: Tensor, clipped: Tensor, frac: float, low: float, high: float, generator: torch.Generator
) -> Tensor:
    """bool [C]: a random `frac` of all tokens (at least one), from unclipped ones with low < covariance <
    high.
    """
    candidates = torch.nonzero((cov > low) & (cov < high) & ~clipped).flatten()
    count = min(len(candidates), max(1, int(frac * len(cov))))
    drawn = candidates[torch.randperm(len(candidates), generator=generator)[:count].to(candidates.device)]
    return torch.zeros_like(cov, dtype=torch.bool).index_fill(0, drawn, value=True)


def kl_cov_selection(cov: Tensor, frac: float) -> Tensor:
    """bool [C]: the `frac` of all tokens (at least one) with the highest covariance.

    Ties go to earlier tokens.
    """
    order = torch.argsort(cov, descending=True, stable=True)[: max(1, int(frac * len(cov)))]
    return torch.zeros_like(cov, dtype=torch.bool).index_fill(0, order, value=True)


def entropy_threshold(entropies: Tensor, quantile: float) -> float:
    """The entropy reached by the `quantile` share of tokens with the highest, interpolated linearly."""
    return float(torch.quantile(entropies.double(), 1 - quantile))
