"""A step in numbers: sums over this rank's tokens, added over ranks, made into means once, at the end."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from skylite.config.train import TrainConfig
from skylite.model.distributed import Dist
from skylite.trainer.batching import Batch
from skylite.trainer.micro_batch import MicroBatch, MiniBatch, counts

LOSSES = ("loss/policy", "critic/loss")
"""Sums of weighted losses: a mean over updates, not over tokens."""


@dataclass(slots=True)
class Totals:
    """Sums over the tokens this rank has seen in a step."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    num_tokens: int = 0
    worst: list[float] = field(default_factory=lambda: [-1.0, -1.0, 0.0, 0.0])
    """The token on which trainer and sampler differ most: |difference|, token id, the sampler's logprob, the trainer's."""
    grad_norms: list[float] = field(default_factory=list)
    critic_grad_norms: list[float] = field(default_factory=list)

    def add(self, sums: dict[str, Tensor]) -> None:
        for key, value in sums.items():
            self.sums[key] = (
                self.sums.get(key, torch.zeros((), dtype=torch.float64)) + value.detach().double().cpu()
            )

    def see_worst(self, micro: MicroBatch, logprobs: Tensor) -> None:
        """Count the micro-batch's tokens and remember the worst of them."""
        self.num_tokens += len(logprobs)
        if not len(logprobs):
            return
        gaps = (logprobs - micro.rollout_logprobs).abs()
        at = int(gaps.argmax())
        if float(gaps[at]) > self.worst[0]:
            self.worst = [
                float(x[at]) for x in (gaps, micro.tokens.targets, micro.rollout_logprobs, logprobs)
            ]


def metrics_of_step(
    batch: Batch, minis: list[MiniBatch], totals: Totals, config: TrainConfig, dist: Dist
) -> dict[str, float]:
    """All ranks' totals as metrics. Means are over the tokens that were computed, sums over the whole step."""
    totals.add({"tokens/computed": torch.tensor(totals.num_tokens)})
    names = sorted(totals.sums)
    reduced = dist.all_reduce_sum_(torch.stack([totals.sums[n] for n in names]).to(dist.device)).tolist()
    sums = dict(zip(names, reduced, strict=True))
    num_computed = max(1.0, sums.pop("tokens/computed"))
    samples = [s for g in batch.groups for s in g]
    metrics = {n: total / (len(minis) if n in LOSSES else num_computed) for n, total in sums.items()}
    metrics |= _of_importance(metrics) | _of_critic(metrics, totals) | _worst(totals, dist)
    return metrics | {
        "policy/entropy": _entropy(batch, minis, sums["policy/entropy"]),
        "groups/zero_std_frac": sum(batch.zero_std) / len(batch.groups),
        "groups/left_out_frac": sum(
            not counts(batch, r, s, config) for r, g in enumerate(batch.groups) for s in g
        )
        / len(samples),
        "optim/grad_norm": sum(totals.grad_norms) / len(totals.grad_norms),
        "tokens/completion": float(sum(len(s.completion_token_ids) for s in samples)),
        "tokens/unique": sums["tokens/unique"],
        "tokens/total": float(sum(len(s.prompt_token_ids) + len(s.completion_token_ids) for s in samples)),
    }


def _of_importance(means: dict[str, float]) -> dict[str, float]:
    """Effective sample size as a share of the tokens: (sum w)^2 / (n sum w^2), 1 when sampler and trainer agree (Kong 1992)."""
    weight, square = means.pop("ess/weights"), means.pop("ess/squares")
    return {"mismatch/ess_frac": weight * weight / square if square > 0 else 1.0}


def _of_critic(means: dict[str, float], totals: Totals) -> dict[str, float]:
    if "critic/residual" not in means:
        return {}
    tokens = means.pop("critic/tokens")  # those in the loss, as a share of those computed
    for name in ("value_mean", "return_mean", "return_squares", "residual", "residual_squares"):
        means[f"critic/{name}"] /= tokens or 1.0
    residual, squares = means.pop("critic/residual"), means.pop("critic/residual_squares")
    variance = means.pop("critic/return_squares") - means["critic/return_mean"] ** 2
    explained = 1 - (squares - residual * residual) / variance if variance > 1e-12 else 0.0
    norm = sum(totals.critic_grad_norms) / len(totals.critic_grad_norms)
    return {"critic/explained_variance": explained, "critic/grad_norm": norm}


def _worst(totals: Totals, dist: Dist) -> dict[str, float]:
    seen = (
        dist.all_gather(torch.tensor(totals.worst, dtype=torch.float64, device=dist.device))
        .view(-1, 4)
        .tolist()
    )
    gap, token, rollout, policy = max(seen)
    return {
        "mismatch/logprob_diff_max": max(0.0, gap),
        "mismatch/worst_token_id": token,
        "mismatch/worst_rollout_logprob": rollout,
        "mismatch/worst_policy_logprob": policy,
    }


def _entropy(batch: Batch, minis: list[MiniBatch], entropy_sum: float) -> float:
    """Mean over all sampled tokens. A sample that was not computed counts with -log p of its tokens, whose mean is the entropy."""
    computed = {number for mini in minis for number in mini.computed}
    samples = [s for g in batch.groups for s in g]
    skipped = -sum(
        x for number, s in enumerate(samples) if number not in computed for x in s.rollout_logprobs
    )
    return (entropy_sum + skipped) / sum(len(s.completion_token_ids) for s in samples)
