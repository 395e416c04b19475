"""The policy loss, token by token. Every sum here is divided by the GLOBAL token count by the caller's `num_loss_tokens`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skylite.config import GrpoConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The completion tokens of one micro-batch, flattened over its samples. All [C] float32."""

    policy_logprobs: Tensor
    """The only one with a gradient."""
    old_logprobs: Tensor
    """The trainer's policy before the first update of this step."""
    rollout_logprobs: Tensor
    """What vLLM reported while it sampled."""
    advantages: Tensor
    """The sample's advantage at each of its tokens."""
    ref_logprobs: Tensor | None = None
    """The base model (adapter off); needed when kl_coef > 0."""


@dataclass(frozen=True, slots=True)
class LossSums:
    """Scalars summed over tokens, ready to be added over micro-batches and ranks."""

    loss: Tensor
    """policy + kl_coef * kl, with gradient, already divided by `num_loss_tokens`."""
    metrics: dict[str, Tensor]
    """Plain sums over tokens."""


def policy_loss(inputs: LossInputs, config: GrpoConfig, num_loss_tokens: int) -> LossSums:
    """The clipped token-level objective with truncated importance sampling and, when asked for, a KL penalty.

    ratio = exp(policy - old); loss = -w * min(ratio * A, clip(ratio, 1 - low, 1 + high) * A) (PPO, arXiv 1707.06347, eq. 7, with
    the two bounds of DAPO, arXiv 2503.14476, eq. 10). w = min(exp(old - rollout), cap) corrects for sampling with vLLM's numbers
    instead of the trainer's (truncated importance sampling). One mean over all tokens of the batch, not one a sample.
    """
    ratio = torch.exp(inputs.policy_logprobs - inputs.old_logprobs)
    clipped_ratio = ratio.clamp(1 - config.clip_eps_low, 1 + config.clip_eps_high)
    weight, capped = importance_weights(inputs.old_logprobs, inputs.rollout_logprobs, config.importance_cap)
    plain, clipped = ratio * inputs.advantages, clipped_ratio * inputs.advantages
    policy = -(weight * torch.minimum(plain, clipped)).sum()
    gap = (inputs.policy_logprobs - inputs.rollout_logprobs).detach().abs()
    metrics = {
        "loss/policy": policy.detach(),
        "policy/ratio_mean": ratio.detach().sum(),
        "policy/clipped_frac": (clipped < plain).sum(),
        "mismatch/logprob_diff_mean": gap.sum(),
        "mismatch/importance_capped_frac": capped.sum(),
    }
    loss = policy
    if config.kl_coef > 0:
        assert inputs.ref_logprobs is not None, "kl_coef > 0 needs ref_logprobs"
        kl = k3_kl(inputs.policy_logprobs, inputs.ref_logprobs).sum()
        metrics["loss/kl"] = kl.detach()
        loss = loss + config.kl_coef * kl
    return LossSums(loss / num_loss_tokens, metrics)


def importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
    """Weights [C] min(exp(old - rollout), cap) without gradient, and which were capped [C]; all 1 when `cap` is None."""
    if cap is None:
        return torch.ones_like(rollout_logprobs), torch.zeros_like(rollout_logprobs, dtype=torch.bool)
    weight = torch.exp(old_logprobs.detach() - rollout_logprobs)
    return weight.clamp(max=cap), weight > cap


def k3_kl(policy_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token estimate [C] of KL(policy || ref): exp(ref - policy) - (ref - policy) - 1, unbiased and never negative.

    J. Schulman, "Approximating KL divergence" (2020), estimator k3; DeepSeekMath, arXiv 2402.03300, eq. 4.
    """
    log_ratio = ref_logprobs - policy_logprobs
    return torch.exp(log_ratio) - log_ratio - 1
