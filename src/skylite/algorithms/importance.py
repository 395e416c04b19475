"""Importance weights: they correct for the engine's probabilities, which differ slightly from the trainer's.

Truncated importance sampling: Ionides (2008); Yao et al., "Your efficient RL framework secretly brings you
off-policy RL training" (2025). Masking instead of capping: IcePop (2025). With top-p or top-k, the engine's
logprobs are those of the truncated distribution, and the same weights correct for the truncation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skylite.algorithms.kl import k3
from skylite.algorithms.losses import LossInputs, segment_mean, segment_sum
from skylite.config.algorithm import ImportanceConfig


def importance_weights(
    old_logprobs: Tensor,
    sampling_logprobs: Tensor,
    segments: Tensor,
    num_segments: int,
    config: ImportanceConfig,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights [C] without gradient, and metrics as sums over tokens.

    The log weight is old - rollout logprob, of the token or summed over its segment (a trajectory).
    """
    log_ratio = (old_logprobs - sampling_logprobs).detach()
    if config.level == "sequence":
        log_ratio = segment_sum(log_ratio, segments, num_segments)[segments]
    ratio = torch.exp(log_ratio)
    weights, changed = _bounded(ratio, config)
    mismatch = k3(sampling_logprobs, old_logprobs.detach())
    metrics = {
        "mismatch/kl": mismatch.sum(),
        "mismatch/importance_changed_frac": changed.sum(),
        "ess/weights": ratio.sum(),
        "ess/squares": ratio.square().sum(),
    }
    if config.reject_kl is not None:
        rejected = (segment_mean(mismatch, segments, num_segments) > config.reject_kl)[segments]
        weights = torch.where(rejected, torch.zeros_like(weights), weights)
        metrics["mismatch/rejected_frac"] = rejected.sum()
    return weights, metrics


def off_policy(x: LossInputs, limit: float) -> Tensor:
    """bool [C]: tokens with A < 0 of trajectories that the policy has left behind.

    Where the mean of log(sampler / policy) over the trajectory is over `limit`: DeepSeek-V3.2, arXiv
    2512.02556, eq. 9.
    """
    assert x.sampling_logprobs is not None
    drift = segment_mean(x.sampling_logprobs - x.policy_logprobs.detach(), x.segments, x.num_segments)
    return (x.advantages < 0) & (drift > limit)[x.segments]


def _bounded(ratio: Tensor, config: ImportanceConfig) -> tuple[Tensor, Tensor]:
    """The weights, and bool [C]: where they differ from the ratio."""
    if config.mode == "none":
        return torch.ones_like(ratio), torch.zeros_like(ratio, dtype=torch.bool)
    if config.mode == "truncate":
        return ratio.clamp(max=config.cap), ratio > config.cap
    outside = (ratio > config.cap) | (ratio < config.floor)
    return torch.where(outside, torch.zeros_like(ratio), ratio), outside
