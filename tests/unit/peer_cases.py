"""Random tensors for test_peers_*.py, padded [B, T] as the peers take them, and our loss on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skylite.algorithms.losses import AGGREGATIONS, BatchSize, LossInputs, is_clipped
from skylite.algorithms.policy_gradient import (
    clip_cov_selection,
    covariances,
    entropy_threshold,
    kl_cov_selection,
)
from skylite.config.algorithm import AlgorithmConfig
from skylite.config.rollout import GREEDY
from skylite.config.train import TrainConfig
from skylite.model.packing import PackedTokens
from skylite.trainer.micro_batches import MicroBatch
from skylite.trainer.precompute import loss_inputs
from skylite.trainer.trainer import make_algorithm
from tests.rows import Row

TOLERANCE = 1e-6
MAX_TOKENS = 40
GROUP = 4
ALONE: Any = SimpleNamespace(
    dp_rank=0, dp_size=1, device=torch.device("cpu"), all_reduce_sum_=lambda x: x, all_gather=lambda x: x
)
"""A `Dist` of one process."""
SHAPES = [
    (4, 1, 0, torch.float64),
    (4, 7, 1, torch.float64),
    (12, 33, 2, torch.float64),
    (64, 40, 3, torch.float64),
    (4, 7, 4, torch.float32),
    (12, 33, 5, torch.float32),
    (64, 40, 6, torch.float32),
]
"""Number of completions, tokens of the longest, seed, dtype."""


@dataclass(frozen=True)
class Case:
    """Random tensors [B, T], `rewards` and `advantages` [B]. Each group has GROUP completions."""

    mask: Tensor
    policy: Tensor
    old: Tensor
    rollout: Tensor
    ref: Tensor
    entropies: Tensor
    values: Tensor
    rewards: Tensor
    advantages: Tensor

    @property
    def lengths(self) -> Tensor:
        return self.mask.sum(dim=1)

    @property
    def sequences(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(len(self.mask)), self.lengths)

    @property
    def float_mask(self) -> Tensor:
        return self.mask.to(self.policy.dtype)

    @property
    def sum_squares(self) -> Tensor:
        """[B, T] of distributions in which the token has `old` and half of the rest is one other's."""
        p = torch.exp(self.old)
        return p.square() + ((1 - p) / 2).square()

    @property
    def greedy(self) -> Tensor:
        """[B] a reward for each group."""
        return torch.from_numpy(self.groups % 3 / 4).to(self.rewards.dtype)

    @property
    def components(self) -> Tensor:
        """[B, 2], as in `samples_of`."""
        return torch.stack([self.rewards, self.lengths.to(self.rewards.dtype) / 100], dim=1)

    @property
    def groups(self) -> np.ndarray:
        return np.arange(len(self.mask)) // GROUP

    @property
    def token_advantages(self) -> Tensor:
        return self.advantages[:, None].expand_as(self.mask)

    @property
    def token_rewards(self) -> Tensor:
        """[B, T]: a value at every token, as with a KL in the reward, plus the reward at the last token."""
        last = torch.arange(self.mask.shape[1]) == self.lengths[:, None] - 1
        return 0.1 * (self.ref - self.old) * self.mask + last * self.rewards[:, None]


def shape_id(shape: tuple[int, int, int, torch.dtype]) -> str:
    return f"{shape[0]}x{shape[1]}-seed{shape[2]}-{str(shape[3]).removeprefix('torch.')}"


def make_case(batch: int, tokens: int, seed: int, dtype: torch.dtype) -> Case:
    """Ratios on both sides of every bound, completions of all lengths, one group of equal rewards."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, tokens + 1, (batch,), generator=generator)
    lengths[0] = tokens
    old = -2 * normal(batch, tokens).abs() - 0.01
    rewards = torch.randint(0, 9, (batch,), generator=generator).double() / 4
    rewards[:GROUP] = torch.tensor([0.25, 2.0, 0.0, 1.0])
    if batch > GROUP:
        rewards[-GROUP:] = 0.7
    tensors = {
        "policy": old + 0.5 * normal(batch, tokens),
        "old": old,
        "ref": old + 0.5 * normal(batch, tokens),
        "entropies": 2 * normal(batch, tokens).abs().float(),  # TRL computes its quantile in float32 ...
        "rollout": (old + 0.6 * normal(batch, tokens)).float(),  # ... and reads vLLM's logprobs in float32
        "values": normal(batch, tokens),
        "rewards": rewards,
        "advantages": normal(batch),
    }
    mask = torch.arange(tokens) < lengths[:, None]
    return Case(mask=mask, **{name: tensor.to(dtype) for name, tensor in tensors.items()})


def assert_same(mine: Tensor, theirs: Tensor) -> None:
    """Equal within TOLERANCE of their largest entry: small entries are differences of large ones."""
    assert mine.shape == theirs.shape
    assert mine.isfinite().all()
    assert (mine - theirs).abs().max() <= TOLERANCE * theirs.abs().max()


@dataclass(frozen=True)
class Result:
    """A loss and its gradients with respect to policy logprobs and entropies, each [C]."""

    loss: Tensor
    by_policy: Tensor
    by_entropies: Tensor
    sums: dict[str, Tensor]


def result_of(
    loss: Tensor, policy: Tensor, entropies: Tensor, sums: dict[str, Tensor] | None = None
) -> Result:
    grads = torch.autograd.grad(loss, [policy, entropies], allow_unused=True)
    by_policy, by_entropies = (
        torch.zeros_like(x) if g is None else g for g, x in zip(grads, (policy, entropies), strict=True)
    )
    return Result(loss.detach(), by_policy, by_entropies, sums or {})


def assert_same_result(mine: Result, theirs: Result, mask: Tensor) -> None:
    """`theirs` is padded."""
    assert_same(mine.by_policy, theirs.by_policy[mask])
    assert_same(mine.by_entropies, theirs.by_entropies[mask])
    # A loss sums terms of both signs, each as large as its gradient: the tolerance scales with them.
    scale = max(theirs.loss.abs(), theirs.by_policy.abs().sum() if theirs.loss.dtype == torch.float32 else 0)
    assert (mine.loss - theirs.loss).abs() <= TOLERANCE * scale
    assert theirs.loss != 0


def ours(case: Case, importance: dict[str, Any] | None = None, **algorithm: Any) -> Result:
    """Our loss of one micro-batch through the algorithm. Tokens are chosen as in `select_tokens`."""
    is_weighted = not AlgorithmConfig.model_validate(algorithm).is_unweighted
    config = TrainConfig.model_validate(
        {
            "algorithm": algorithm,
            "importance": importance or ({"mode": "none"} if is_weighted else {}),
            "rollout": {"max_completion_tokens": MAX_TOKENS},
        }
    )
    mask, settings = case.mask, config.algorithm
    size = BatchSize(int(mask.sum()), len(mask), MAX_TOKENS)
    weights = torch.tensor(
        [AGGREGATIONS[settings.aggregation](int(n), size) for n in case.lengths], dtype=case.policy.dtype
    )
    policy, entropies = (x[mask].requires_grad_() for x in (case.policy, case.entropies))
    micro = MicroBatch(
        examples=[],
        numbers=[],
        tokens=packed(case),
        keys=torch.arange(size.num_tokens),
        token_weights=weights[case.sequences],
        size=size,
        sampling_logprobs=case.rollout[mask],
        old_logprobs=case.old[mask],
        advantages=case.advantages[case.sequences],
    )
    if settings.top_entropy_quantile < 1:
        threshold = entropy_threshold(entropies.detach(), settings.top_entropy_quantile)
        micro = replace(micro, weights=micro.token_weights * (entropies.detach() >= threshold))
    if settings.selects_by_cov:
        micro = replace(micro, selected=chosen_by_cov(case, policy.detach(), settings))
    ref = case.ref[mask] if settings.uses_ref else None
    loss, sums = make_algorithm(config).loss(loss_inputs(micro, policy, entropies, ref))
    return result_of(loss, policy, entropies, sums)


def packed(case: Case) -> PackedTokens:
    nothing = torch.zeros(int(case.mask.sum()), dtype=torch.int64)
    return PackedTokens(
        inputs={},
        rows=nothing,
        targets=nothing,
        segments=case.sequences,
        num_segments=len(case.mask),
        num_nodes=0,
        tokens_before=np.zeros(1, dtype=np.int64),
    )


def chosen_by_cov(case: Case, policy: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """Tokens chosen by covariance, with torch seeded to 0."""
    advantages = case.advantages[case.sequences]
    cov = covariances(advantages, policy)
    if algorithm.policy_loss == "kl_cov":
        return kl_cov_selection(cov, algorithm.cov_frac)
    x = LossInputs(
        policy_logprobs=policy,
        old_logprobs=case.old[case.mask],
        advantages=advantages,
        segments=case.sequences,
        num_segments=len(case.mask),
    )
    bounds = algorithm.clip_cov_low, algorithm.clip_cov_high
    return clip_cov_selection(
        cov, is_clipped(x, algorithm), algorithm.cov_frac, *bounds, torch.Generator().manual_seed(0)
    )


def samples_of(case: Case) -> list[Row]:
    """Completions of odd length are truncated, as in `trl_step`. No two share a prefix."""
    rows = zip(
        case.groups.tolist(),
        case.lengths.tolist(),
        case.rewards.tolist(),
        case.rollout,
        case.mask,
        strict=True,
    )
    return [
        Row(
            group=group,
            prompt_token_ids=[5],
            completion_token_ids=[1000 + n] * length,
            sampling_logprobs=logprobs[keep].tolist(),
            reward=reward,
            truncated=length % 2 == 1,
            components={"score": reward, "long": length / 100, GREEDY: group % 3 / 4},
        )
        for n, (group, length, reward, logprobs, keep) in enumerate(rows)
    ]
