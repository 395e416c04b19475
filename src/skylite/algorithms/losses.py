"""Policy losses per token, one function for each value of `algorithm.policy_loss`, and their aggregation.

ratio = exp(policy - old logprob): how much more likely the token is than before the step. Every loss is
minimised and, but for the penalties of kl_cov, dppo and dro, scales linearly with the advantage. The caller
multiplies by importance weight and token weight and sums: there is no mean over a part of the batch, so the
result does not depend on how the batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from skylite.algorithms import token_losses
from skylite.config.algorithm import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The denominators of a mini-batch's loss: over all ranks, trajectories without a gradient included."""

    num_tokens: int
    num_trajectories: int
    max_completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The sampled tokens of one micro-batch, with all tokens of each of its trajectories. All [C]."""

    policy_logprobs: Tensor
    """With a gradient, as entropies and divergences; the others have none."""
    old_logprobs: Tensor
    """Under the trainer's policy before the first update of this step."""
    advantages: Tensor
    segments: Tensor
    """int64: the trajectory of the token, 0 .. num_segments - 1."""
    num_segments: int
    selected: Tensor | None = None
    """bool: tokens that clip_cov or kl_cov selected in the mini-batch (policy_gradient.py)."""
    sampling_logprobs: Tensor | None = None
    """As the engine reported them; None: not sampled."""
    ref_logprobs: Tensor | None = None
    """Under the reference policy, if the loss needs it."""
    teacher_logprobs: Tensor | None = None
    """Under the teacher, if the algorithm has one; NaN for tokens that it does not teach."""
    divergences: Tensor | None = None
    """From the teacher's distributions, if the loss has them; 0 for tokens that it does not teach. With a
    gradient."""
    kl_penalty: Tensor | None = None
    """kl_coef times the KL estimate, if the KL is subtracted from the reward."""
    entropies: Tensor | None = None
    """Of the policy's distributions, in nats. With a gradient."""
    token_weights: Tensor | None = None
    """Factor on the token's loss; 0 if the token is not in the loss."""
    weights: Tensor | None = None
    """The same, and 0 for tokens of low entropy (top_entropy_quantile): for the policy loss."""
    is_top: Tensor | None = None
    """bool: the policy's most likely token; for held-out rows only."""
    size: BatchSize | None = None
    """The update's."""

    @property
    def log_ratio(self) -> Tensor:
        return self.policy_logprobs - self.old_logprobs

    @property
    def ratio(self) -> Tensor:
        return torch.exp(self.log_ratio)


def clip(x: LossInputs, config: AlgorithmConfig) -> Tensor:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A) (PPO, arXiv 1707.06347, eq. 7).

    Two bounds: DAPO, arXiv 2503.14476, eq. 10.
    """
    return -torch.minimum(x.ratio * x.advantages, _clamped(x.ratio, config) * x.advantages)


def dual_clip(x: LossInputs, config: AlgorithmConfig) -> Tensor:
    """`clip`, and at most -c A where A < 0, so that one token with a large ratio cannot dominate.

    arXiv 1912.09729.
    """
    clipped = clip(x, config)
    return torch.where(x.advantages < 0, torch.minimum(clipped, -config.dual_clip * x.advantages), clipped)


def gspo(x: LossInputs, config: AlgorithmConfig) -> Tensor:
    """`clip` with one ratio per trajectory: exp of its mean log ratio.

    GSPO, arXiv 2507.18071, eq. 5 and 7.
    """
    ratio = _sequence_ratio(x)
    return -torch.minimum(ratio * x.advantages, _clamped(ratio, config) * x.advantages)


def cispo(x: LossInputs, config: AlgorithmConfig) -> Tensor:
    """-sg(clip(ratio)) A log policy: REINFORCE with a clipped weight.

    CISPO, arXiv 2506.13585, eq. 4 and 5.
    """
    return -_clamped(x.ratio, config).detach() * x.advantages * x.policy_logprobs


def sapo(x: LossInputs, config: AlgorithmConfig) -> Tensor:
    """-4 / tau * sigmoid(tau (ratio - 1)) A, tau by the sign of A (SAPO, arXiv 2511.20347)."""
    tau = torch.where(x.advantages > 0, config.sapo_tau_pos, config.sapo_tau_neg)
    return -torch.sigmoid(tau * (x.ratio - 1)) * (4 / tau) * x.advantages


def clip_cov(x: LossInputs, config: AlgorithmConfig) -> Tensor:
    """`clip` without the selected tokens of high covariance (Clip-Cov, arXiv 2505.22617)."""
    assert x.selected is not None
    return clip(x, config) * ~x.selected


def kl_cov(x: LossInputs, config: AlgorithmConfig) -> Tensor:
    """-ratio A, plus |policy - old| at the selected tokens of high covariance (KL-Cov, arXiv 2505.22617)."""
    assert x.selected is not None
    return -x.ratio * x.advantages + config.kl_cov_coef * x.log_ratio.abs() * x.selected


def dppo(x: LossInputs, config: AlgorithmConfig) -> Tensor:
    """-ratio A while the token's probability is near the sampler's, plus dppo_penalty * (log ratio)^2.

    The ratio is that to the sampler. Without gradient where the probability has moved farther than the clip
    bounds in the direction of A: DPPO, arXiv 2602.04879, binary total variation. The penalty: prime-rl's
    default loss.
    """
    log_ratio = _sampler_log_ratio(x)
    inside = ~is_clipped(x, config)
    return -torch.exp(log_ratio) * x.advantages * inside + config.dppo_penalty * log_ratio.square()


def cross_entropy(x: LossInputs, config: AlgorithmConfig) -> Tensor:
    """-A log policy."""
    return token_losses.cross_entropy(x.policy_logprobs, {"weights": x.advantages}, {})


def dro(x: LossInputs, config: AlgorithmConfig) -> Tensor:
    """-(A log policy - beta / 2 (log ratio)^2), the ratio to the sampler (DRO; the service's loss `dro`)."""
    assert x.sampling_logprobs is not None
    inputs = {"logprobs": x.sampling_logprobs, "advantages": x.advantages}
    return token_losses.dro(x.policy_logprobs, inputs, {"beta": config.dro_beta})


def gmpo(x: LossInputs, config: AlgorithmConfig) -> Tensor:
    """-A times the geometric mean of a trajectory's ratios, each clipped in the direction of A.

    GMPO, arXiv 2507.20673, eq. 4. The bounds are those of the log ratio.
    """
    clipped = x.log_ratio.clamp(-config.clip_eps_low, config.clip_eps_high)
    worst = torch.where(is_clipped(x, config), clipped, x.log_ratio)
    return -torch.exp(segment_mean(worst, x.segments, x.num_segments))[x.segments] * x.advantages


def vespo(x: LossInputs, config: AlgorithmConfig) -> Tensor:
    """-sg(w^k exp(lambda (1 - w))) A log policy, w the ratio of a trajectory to the sampler.

    VESPO, arXiv 2602.10693, with the k and lambda of the sign of A.
    """
    log_w = segment_sum(_sampler_log_ratio(x), x.segments, x.num_segments)[x.segments].detach()
    k, decay = (
        torch.where(x.advantages >= 0, positive, negative)
        for positive, negative in (
            (config.vespo_k_pos, config.vespo_k_neg),
            (config.vespo_lambda_pos, config.vespo_lambda_neg),
        )
    )
    return -torch.exp(k * log_w - decay * torch.expm1(log_w)) * x.advantages * x.policy_logprobs


POLICY_LOSSES: dict[str, Callable[[LossInputs, AlgorithmConfig], Tensor]] = {
    "clip": clip,
    "dual_clip": dual_clip,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo": dppo,
    "dppo_kl": dppo,
    "dro": dro,
    "cross_entropy": cross_entropy,
    "gmpo": gmpo,
    "vespo": vespo,
}
"""(LossInputs, AlgorithmConfig) -> loss [C]. Its name, presets and coefficients are in config/algorithm.py:
PolicyLoss, PRESETS, AlgorithmConfig."""
SEQUENCE_RATIOS = frozenset({"gspo", "gmpo", "vespo"})
"""The losses with one ratio for all tokens of a trajectory, so that its tokens must be computed together."""


def is_clipped(x: LossInputs, config: AlgorithmConfig) -> Tensor:
    """bool [C]: the tokens whose ratio is out of bounds in the direction of their advantage.

    gmpo bounds the log ratio, dppo the probability's distance from the sampler's, dppo_kl their KL.
    """
    low, high = -config.clip_eps_low, config.clip_eps_high
    if config.policy_loss == "gmpo":
        moved = x.log_ratio
    elif config.policy_loss in ("dppo", "dppo_kl"):
        moved = _moved(x, is_kl=config.policy_loss == "dppo_kl")
    else:
        moved, low, high = ratio_of(x, config), 1 + low, 1 + high
    return moved.clamp(low, high) * x.advantages < moved * x.advantages


def ratio_of(x: LossInputs, config: AlgorithmConfig) -> Tensor:
    """[C] the ratio that the loss clips: the token's, or its trajectory's."""
    return _sequence_ratio(x) if config.policy_loss in SEQUENCE_RATIOS else x.ratio


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float) -> Tensor:
    """[C] max of (v - R)^2 / 2 and the same with v within `clip_range` of the old value: PPO's clipping."""
    near = old_values + (values - old_values).clamp(-clip_range, clip_range)
    return 0.5 * torch.maximum((values - returns).square(), (near - returns).square())


def segment_sum(values: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """[C] -> [S] the sum over each segment. A segment is a trajectory: all tokens its calls sampled."""
    return values.new_zeros(num_segments).index_add(0, segments, values)


def segment_mean(values: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """[C] -> [S] the mean over each segment. Every segment must have a token."""
    counts = segment_sum(values.new_ones(values.shape), segments, num_segments)
    return segment_sum(values, segments, num_segments) / counts


def token_mean(length: int, batch: BatchSize) -> float:
    """Mean over all tokens (DAPO, arXiv 2503.14476, eq. 12)."""
    return 1 / max(1, batch.num_tokens)


def seq_mean_token_sum(length: int, batch: BatchSize) -> float:
    """Mean over trajectories of the sum over tokens: the trajectory is the action."""
    return 1 / max(1, batch.num_trajectories)


def seq_mean_token_mean(length: int, batch: BatchSize) -> float:
    """Mean over trajectories of the mean over tokens (DeepSeekMath, arXiv 2402.03300, eq. 3)."""
    return 1 / (max(1, batch.num_trajectories) * length)


def fixed_length(length: int, batch: BatchSize) -> float:
    """Sum over tokens / (trajectories * max_completion_tokens), whatever the lengths.

    Dr. GRPO, arXiv 2503.20783.
    """
    return 1 / (max(1, batch.num_trajectories) * batch.max_completion_tokens)


AGGREGATIONS: dict[str, Callable[[int, BatchSize], float]] = {
    "token-mean": token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-mean": seq_mean_token_mean,
    "fixed-length": fixed_length,
}
"""(tokens of a trajectory, mini-batch size) -> the weight of each of its tokens in the loss's sum."""


def _sampler_log_ratio(x: LossInputs) -> Tensor:
    """[C] log(policy / sampler)."""
    assert x.sampling_logprobs is not None
    return x.policy_logprobs - x.sampling_logprobs


def _moved(x: LossInputs, *, is_kl: bool) -> Tensor:
    """[C] how far the probability of the token is from the sampler's, above 0 if it is likelier now.

    Either the difference, or the KL between the two distributions over "this token" and "another".
    """
    assert x.sampling_logprobs is not None
    log_p, log_q = x.policy_logprobs.detach(), x.sampling_logprobs
    p, q = log_p.exp(), log_q.exp()
    if not is_kl:
        return p - q
    other_p, other_q = ((1 - x).clamp(min=0) + 1e-8 for x in (p, q))  # a token may have all the probability
    kl = q * (log_q - log_p) + (1 - q) * torch.log(other_q / other_p)
    return torch.where(p > q, kl, -kl)


def _sequence_ratio(x: LossInputs) -> Tensor:
    """[C]"""
    return torch.exp(segment_mean(x.log_ratio, x.segments, x.num_segments))[x.segments]


def _clamped(ratio: Tensor, config: AlgorithmConfig) -> Tensor:
    return ratio.clamp(1 - config.clip_eps_low, 1 + config.clip_eps_high)
