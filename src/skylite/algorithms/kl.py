"""Estimators of KL(policy || ref) from sampled tokens: J. Schulman, "Approximating KL divergence" (2020)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def k1(policy_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log(policy / ref): unbiased, of high variance, often negative."""
    return policy_logprobs - ref_logprobs


def k2(policy_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log(policy / ref)^2 / 2: biased, but with the gradient of the KL."""
    return 0.5 * (policy_logprobs - ref_logprobs).square()


def k3(policy_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """ref / policy - log(ref / policy) - 1: unbiased and never negative.

    DeepSeekMath, arXiv 2402.03300, eq. 4.
    """
    log_ratio = ref_logprobs - policy_logprobs
    return torch.expm1(log_ratio) - log_ratio  # exp(x) - 1 would lose all digits for close policies


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""(policy_logprobs [C], ref_logprobs [C]) -> nats per token [C]."""
