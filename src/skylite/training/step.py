"""One training step: advantages, micro-batches, loss, one or several AdamW updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from skylite.config import TrainConfig
from skylite.errors import TrainingDiverged
from skylite.grpo.batch import PackedTokens, ScoredSample, pack, plan_micro_batches, score_groups
from skylite.grpo.losses import LossInputs, policy_loss
from skylite.run.rollout_file import TrainSample
from skylite.training.dist import Dist
from skylite.training.policy import Policy, lora_dropout, score
from skylite.training.schedule import learning_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward pass of this rank. [C]: its completion tokens."""

    tokens: PackedTokens
    advantages: Tensor
    """[C]"""
    rollout_logprobs: Tensor
    """[C]"""


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """This rank's share of what one optimizer update learns from."""

    micro_batches: list[MicroBatch]
    num_loss_tokens: int
    """Completion tokens on all ranks, in all groups, the uninformative ones included: the denominator of the loss."""


@dataclass(slots=True)
class Totals:
    """Sums over the tokens this rank has seen in a step."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    logprob_diff_max: float = 0.0
    grad_norms: list[float] = field(default_factory=list)

    def add(self, sums: dict[str, Tensor]) -> None:
        for key, value in sums.items():
            self.sums[key] = self.sums.get(key, torch.zeros((), dtype=torch.float64)) + value.detach().double().cpu()


def train_step(
    policy: Policy, optimizer: torch.optim.AdamW, samples: Sequence[TrainSample], step: int, config: TrainConfig, dist: Dist
) -> dict[str, float]:
    """Learn from a step's samples; every rank is given all of them. Returns metrics, the same on every rank.

    The result does not depend on how the batch is cut into micro-batches or ranks, up to rounding. Raises TrainingDiverged, and
    leaves the weights alone, when the gradient is not finite.
    """
    groups = score_groups(samples, config.grpo)
    trained = _worth_training(groups, config)
    mini_batches = [_mini_batch(part, trained, policy, config, dist) for part in _cut(groups, config.grpo.updates_per_step)]
    rate = learning_rate(step, config.num_steps, config.optim)
    for param_group in optimizer.param_groups:
        param_group["lr"] = rate
    torch.manual_seed(int(np.random.SeedSequence([config.seed, step, dist.dp_rank]).generate_state(1)[0]))
    old = [_old_logprobs(policy, b, config) for b in mini_batches] if len(mini_batches) > 1 else [None]
    totals = Totals()
    for mini_batch, old_logprobs in zip(mini_batches, old, strict=True):
        _accumulate(policy, mini_batch, old_logprobs, config, totals)
        totals.grad_norms.append(_update(policy, optimizer, config, dist, step))
    computed = [s for g in groups if g[0].sample.group in trained for s in g]
    return _metrics(groups, computed, mini_batches, totals, config, dist) | {"optim/lr": rate}


def _worth_training(groups: list[list[ScoredSample]], config: TrainConfig) -> set[int]:
    """Group numbers that have a gradient. Equal rewards have none (unless the KL term is on), so no pass is spent on them.

    When there is none at all, one group is computed all the same, so that the metrics have something to speak of.
    """
    numbers = {g[0].sample.group for g in groups if g[0].informative or config.grpo.kl_coef > 0}
    return numbers or {groups[0][0].sample.group}


def _cut(groups: list[list[ScoredSample]], num_parts: int) -> list[list[list[ScoredSample]]]:
    """Mini-batches of whole groups, in file order."""
    bounds = [len(groups) * i // num_parts for i in range(num_parts + 1)]
    return [groups[a:b] for a, b in pairwise(bounds)]


def _mini_batch(groups: list[list[ScoredSample]], trained: set[int], policy: Policy, config: TrainConfig, dist: Dist) -> MiniBatch:
    chosen = [s for g in groups for s in g if s.sample.group in trained]
    plan = plan_micro_batches(chosen, config.trainer.tokens_per_micro_batch, dist.dp_size)
    num_loss_tokens = sum(len(s.sample.completion_token_ids) for g in groups for s in g)
    return MiniBatch([_micro_batch(part, policy) for part in plan[dist.dp_rank]], num_loss_tokens)


def _micro_batch(scored: Sequence[ScoredSample], policy: Policy) -> MicroBatch:
    samples = [s.sample for s in scored]
    prompts, completions = [s.prompt_token_ids for s in samples], [s.completion_token_ids for s in samples]
    advantages = [s.advantage for s in scored for _ in s.sample.completion_token_ids]
    rollout_logprobs = [x for s in samples for x in s.rollout_logprobs]
    return MicroBatch(
        tokens=pack(prompts, completions, [s.group for s in samples], policy.packing, policy.device),
        advantages=torch.tensor(advantages, dtype=torch.float32, device=policy.device),
        rollout_logprobs=torch.tensor(rollout_logprobs, dtype=torch.float32, device=policy.device),
    )


@torch.no_grad()
def _old_logprobs(policy: Policy, mini_batch: MiniBatch, config: TrainConfig) -> list[Tensor]:
    """The policy's logprobs before the first of several updates. With one update they are those of the training pass itself."""
    return [score(policy, micro.tokens, config.rollout.temperature)[0] for micro in mini_batch.micro_batches]


@torch.no_grad()
def _ref_logprobs(policy: Policy, micro: MicroBatch, config: TrainConfig) -> Tensor:
    """The base model's: the same weights with the adapter off."""
    with policy.model.disable_adapter():
        return score(policy, micro.tokens, config.rollout.temperature)[0]


def _accumulate(policy: Policy, mini_batch: MiniBatch, old: list[Tensor] | None, config: TrainConfig, totals: Totals) -> None:
    """Forward and backward of every micro-batch into `policy.grads`."""
    policy.grads.zero_()
    for index, micro in enumerate(mini_batch.micro_batches):
        ref = _ref_logprobs(policy, micro, config) if config.grpo.kl_coef > 0 else None
        with lora_dropout(policy, active=True):
            logprobs, entropy = score(policy, micro.tokens, config.rollout.temperature)
        inputs = LossInputs(
            policy_logprobs=logprobs,
            old_logprobs=logprobs.detach() if old is None else old[index],
            rollout_logprobs=micro.rollout_logprobs,
            advantages=micro.advantages,
            ref_logprobs=ref,
        )
        result = policy_loss(inputs, config.grpo, mini_batch.num_loss_tokens)
        result.loss.backward()  # type: ignore[no-untyped-call]
        totals.add(result.metrics | {"policy/entropy": entropy.sum(), "tokens/unique": torch.tensor(micro.tokens.num_nodes)})
        gaps = (logprobs.detach() - micro.rollout_logprobs).abs().tolist()
        totals.logprob_diff_max = max([totals.logprob_diff_max, *gaps])


def _update(policy: Policy, optimizer: torch.optim.AdamW, config: TrainConfig, dist: Dist, step: int) -> float:
    """Sum the gradients over ranks, clip by the exact global norm, update. Returns the norm before clipping."""
    dist.sum_(policy.grads)
    norm = float(torch.linalg.vector_norm(policy.grads, dtype=torch.float64 if policy.device.type == "cpu" else torch.float32))
    if not np.isfinite(norm):
        raise TrainingDiverged(
            f"The gradient of step {step} is not finite (norm {norm}); the update was not applied.",
            f"Lower optim.lr (now {config.optim.lr:g}), or resume from the last checkpoint with a smaller optim.max_grad_norm.",
        )
    if norm > config.optim.max_grad_norm:
        policy.grads.mul_(config.optim.max_grad_norm / norm)
    optimizer.step()
    return norm


def _metrics(
    groups: list[list[ScoredSample]],
    computed: list[ScoredSample],
    mini_batches: list[MiniBatch],
    totals: Totals,
    config: TrainConfig,
    dist: Dist,
) -> dict[str, float]:
    names = sorted(totals.sums)
    reduced = dist.sum_(torch.stack([totals.sums[n] for n in names]).to(dist.device, torch.float32)).tolist()
    sums = dict(zip(names, reduced, strict=True))
    largest = dist.max_(torch.tensor([totals.logprob_diff_max], device=dist.device)).tolist()[0]
    samples = [s for g in groups for s in g]
    num_tokens = sum(b.num_loss_tokens for b in mini_batches)
    num_computed = sum(len(s.sample.completion_token_ids) for s in computed)
    # Groups that were not computed count with -log p of what they sampled: its mean is the entropy, without a forward pass.
    chosen = {s.sample.group for s in computed}
    skipped_entropy = -sum(x for s in samples if s.sample.group not in chosen for x in s.sample.rollout_logprobs)
    metrics = {n: total / num_computed for n, total in sums.items()}
    metrics |= {n: sums[n] / num_tokens for n in ("loss/policy", "loss/kl") if n in sums}
    return metrics | {
        "policy/entropy": (sums["policy/entropy"] + skipped_entropy) / num_tokens,
        "mismatch/logprob_diff_max": largest,
        "groups/zero_std_frac": sum(not g[0].informative for g in groups) / len(groups),
        "optim/grad_norm": sum(totals.grad_norms) / len(totals.grad_norms),
        "tokens/completion": float(sum(len(s.sample.completion_token_ids) for s in samples)),
        "tokens/unique": sums["tokens/unique"],
        "tokens/total": float(sum(len(s.sample.prompt_token_ids) + len(s.sample.completion_token_ids) for s in samples)),
    }
