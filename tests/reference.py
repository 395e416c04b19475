"""Plain reference of every algorithm: one process, one trajectory at a time, no packing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch

from skylite.config.algorithm import AlgorithmConfig, ImportanceConfig
from skylite.config.rollout import GREEDY
from skylite.config.train import TrainConfig
from tests.rows import Row


@dataclass(frozen=True)
class Before:
    """Numbers of one trajectory before the first update, each [C] over its completion tokens."""

    old: torch.Tensor
    entropies: torch.Tensor
    ref: torch.Tensor | None = None
    teacher: torch.Tensor | None = None
    values: torch.Tensor | None = None
    squares: torch.Tensor | None = None


def reference_advantages(
    samples: Sequence[Row], config: TrainConfig, before: Sequence[Before]
) -> list[list[float]]:
    """An advantage per completion token of each row, computed with the standard library only."""
    a, rows = config.algorithm, _of_rewards(samples, config, before)
    if not a.uses_teacher:
        return rows
    return [
        [
            a.reward_weight * x - a.distill_coef * (own - taught)
            for x, own, taught in zip(row, b.old.tolist(), _known(b.teacher), strict=True)
        ]
        for row, b in zip(rows, before, strict=True)
    ]


def _known(values: torch.Tensor | None) -> list[float]:
    assert values is not None
    return values.tolist()


def _of_rewards(samples: Sequence[Row], config: TrainConfig, before: Sequence[Before]) -> list[list[float]]:
    a = config.algorithm
    penalties = [_kl_penalty(b, a) for b in before]
    if a.advantage in ("gae", "reinforce++"):
        rows = [_token_advantages(s, p, b, a) for s, p, b in zip(samples, penalties, before, strict=True)]
        return _whitened(rows, [_is_counted(s, samples, config) for s in samples])
    if a.advantage == "gdpo":
        return _decoupled(samples, config)
    if a.advantage == "otb":
        return [_less_token_baseline(i, samples, penalties, before) for i in range(len(samples))]
    rewards = [s.reward - sum(p) for s, p in zip(samples, penalties, strict=True)]
    numbers = [_group_advantage(i, samples, rewards, a.advantage) for i in range(len(samples))]
    rows = [[x] * len(s.completion_token_ids) for x, s in zip(numbers, samples, strict=True)]
    return _whitened(rows, [True] * len(rows)) if a.advantage == "reinforce++-baseline" else rows


def _group_advantage(index: int, samples: Sequence[Row], rewards: list[float], kind: str) -> float:
    group = [i for i, s in enumerate(samples) if s.group == samples[index].group]
    mine, others = rewards[index], [rewards[i] for i in group if i != index]
    if kind == "remax":
        return mine - samples[index].components[GREEDY]
    mean = sum(rewards[i] for i in group) / len(group)
    if all(rewards[i] == mine for i in group):
        return 0.0
    if kind == "rloo":
        return mine - sum(others) / len(others)
    if kind == "opo":
        lengths = [len(samples[i].completion_token_ids) for i in group]
        return mine - sum(n * rewards[i] for n, i in zip(lengths, group, strict=True)) / sum(lengths)
    if kind == "pass_at_k":
        best = {pair: max(rewards[i] for i in pair) for pair in combinations(group, 2)}
        average = sum(best.values()) / len(best)
        std = math.sqrt(sum((x - average) ** 2 for x in best.values()) / len(best))
        own = [x for pair, x in best.items() if index in pair]
        return (sum(own) / len(own) - average) / (std + 1e-6)
    if kind == "maxrl":
        return (mine - mean) / (mean + 1e-6)
    if kind == "grpo":
        return (mine - mean) / (
            math.sqrt(sum((rewards[i] - mean) ** 2 for i in group) / (len(group) - 1)) + 1e-6
        )
    return mine - mean


def _less_token_baseline(
    index: int, samples: Sequence[Row], penalties: Sequence[list[float]], before: Sequence[Before]
) -> list[float]:
    """OTB: at each place, the return less the mean of the group's, weighted by the norms up to there."""
    group = [i for i, s in enumerate(samples) if s.group == samples[index].group]
    returns, norms = dict[int, list[float]](), dict[int, list[float]]()
    for i in group:
        last = len(penalties[i])
        returns[i] = [samples[i].reward - sum(penalties[i][t:]) for t in range(last)]
        each = [
            1 - 2 * math.exp(p) + q for p, q in zip(before[i].old, _known(before[i].squares), strict=True)
        ]
        norms[i] = [sum(each[: t + 1]) for t in range(last)]
    if len({x for of in returns.values() for x in of}) == 1:
        return [0.0] * len(returns[index])
    found = []
    for t, own in enumerate(returns[index]):
        present = [i for i in group if len(returns[i]) > t]
        total = sum(norms[i][t] for i in present)
        baseline = sum(norms[i][t] * returns[i][t] for i in present) / total if len(present) > 1 else 0.0
        found.append(own - baseline)
    return found


def _decoupled(samples: Sequence[Row], config: TrainConfig) -> list[list[float]]:
    """GDPO: each component on its own, then the sum, then over the step's trajectories."""
    sums = [0.0] * len(samples)
    for name, weight in zip(("right", "long"), config.component_weights(["right", "long"]), strict=True):
        scores = [s.components[name] for s in samples]
        for i in range(len(samples)):
            sums[i] += weight * _group_advantage(i, samples, scores, "grpo")
    mean = sum(sums) / len(sums)
    std = math.sqrt(sum((x - mean) ** 2 for x in sums) / (len(sums) - 1)) + 1e-6
    return [[x / std] * len(s.completion_token_ids) for x, s in zip(sums, samples, strict=True)]


def _token_advantages(sample: Row, penalty: list[float], before: Before, a: AlgorithmConfig) -> list[float]:
    rewards = [-p for p in penalty]
    rewards[-1] += sample.reward
    values = [0.0] * len(rewards) if before.values is None else before.values.tolist()
    lam, found, following, after = (a.gae_lambda if a.uses_critic else 1.0), [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        found.append(reward + a.gamma * following - value + a.gamma * lam * after)
        following, after = value, found[-1]
    return found[::-1]


def _whitened(rows: list[list[float]], counted: list[bool]) -> list[list[float]]:
    flat = [x for row, c in zip(rows, counted, strict=True) if c for x in row]
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((x - mean) ** 2 for x in flat) / (len(flat) - 1) + 1e-8)
    return [[(x - mean) / std for x in row] for row in rows]


def _kl_penalty(before: Before, a: AlgorithmConfig) -> list[float]:
    if before.ref is None or a.kl_in != "reward":
        return [0.0] * len(before.old)
    return [
        a.kl_coef * _kl(float(p), float(r), a.kl_estimator)
        for p, r in zip(before.old, before.ref, strict=True)
    ]


def _kl(policy: Any, ref: Any, estimator: str) -> Any:
    x = ref - policy
    exp = torch.exp if isinstance(x, torch.Tensor) else math.exp
    return {"k1": lambda: -x, "k2": lambda: x * x / 2, "k3": lambda: exp(x) - x - 1}[estimator]()


def _is_counted(sample: Row, samples: Sequence[Row], config: TrainConfig) -> bool:
    same = len({s.reward for s in samples if s.group == sample.group}) == 1
    return not (same and config.algorithm.zero_std_groups != "keep") and not (
        sample.truncated and config.algorithm.mask_truncated
    )


def reference_logprobs(model: Any, sample: Row, temperature: float) -> torch.Tensor:
    """[C] logprobs from the full log softmax of one forward pass per call."""
    return reference_scores(model, sample, temperature)[0]


def reference_scores(model: Any, sample: Row, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs [C] and entropies [C]."""
    found = [_call_scores(model, prompt, completion, temperature) for prompt, completion in sample.all_calls]
    return torch.cat([logprobs for logprobs, _ in found]), torch.cat([entropies for _, entropies in found])


def reference_squares(model: Any, sample: Row, temperature: float) -> torch.Tensor:
    """[C] the sum of the squared probabilities of the vocabulary."""
    tables = [_call_table(model, *call, temperature) for call in sample.all_calls]
    return torch.cat([table.exp().square().sum(dim=1) for table in tables])


def _call_scores(
    model: Any, prompt: list[int], completion: list[int], temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    table = _call_table(model, prompt, completion, temperature)
    return table[torch.arange(len(completion)), torch.tensor(completion)], -(table.exp() * table).sum(dim=1)


def _call_table(model: Any, prompt: list[int], completion: list[int], temperature: float) -> torch.Tensor:
    """[C, V] logprobs of each token of the vocabulary in place of each one of the completion."""
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0].float() / temperature
    return torch.log_softmax(logits[len(prompt) - 1 : -1], dim=1)


def reference_loss(
    model: Any,
    samples: Sequence[Row],
    part: range,
    config: TrainConfig,
    before: Sequence[Before] | None = None,
    teacher: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Loss of the mini-batch samples[part]. `before`: all samples before the first update, or None.

    `teacher`: its logprobs. None: of the base.
    """
    a, temperature = config.algorithm, config.rollout.temperature
    scores = {i: reference_scores(model, samples[i], temperature) for i in part}
    if before is None:
        before = reference_before(model, samples, config)
    if teacher is not None:
        before = [replace(b, teacher=taught) for b, taught in zip(before, teacher, strict=True)]
    advantages = reference_advantages(samples, config, before)
    counted = [i for i in part if _is_counted(samples[i], samples, config)]
    lengths = {i: len(samples[i].completion_token_ids) for i in part}
    chosen = _chosen_tokens(scores, before, advantages, counted, config)
    threshold = torch.quantile(
        torch.cat([scores[i][1].detach() for i in counted]).double(), 1 - a.top_entropy_quantile
    )
    total: Any = 0.0
    for i in counted:
        policy, entropy = scores[i]
        weight = {
            "token-mean": 1 / sum(lengths[j] for j in counted),
            "seq-mean-token-sum": 1 / len(counted),
            "seq-mean-token-mean": 1 / len(counted) / lengths[i],
            "fixed-length": 1 / len(counted) / config.rollout.max_completion_tokens,
        }[a.aggregation]
        sampler, adv = torch.tensor(samples[i].sampling_logprobs), torch.tensor(advantages[i])
        if a.is_unweighted:
            losses = _losses_by_the_sampler(policy, sampler, adv, a)
        else:
            losses = _token_losses(policy, before[i].old, adv, chosen.get(i), a)
            losses = losses * _importance(before[i].old, sampler, config.importance)
        losses = losses * (entropy.detach().double() >= threshold)
        if a.uses_ref and a.kl_in == "loss":
            losses = losses + a.kl_coef * _kl(policy, before[i].ref, a.kl_estimator)
        total = (
            total + weight * losses.sum() - a.entropy_coef * entropy.sum() / sum(lengths[j] for j in counted)
        )
    return total


@torch.no_grad()
def reference_before(
    model: Any,
    samples: Sequence[Row],
    config: TrainConfig,
    values: Sequence[torch.Tensor] | None = None,
) -> list[Before]:
    """Numbers of every sample under the current policy, and under the base model if the KL needs them."""
    found = []
    for index, sample in enumerate(samples):
        old, entropies = reference_scores(model, sample, config.rollout.temperature)
        ref = None
        if config.algorithm.uses_ref or config.algorithm.uses_teacher:
            with model.disable_adapter():
                ref = reference_logprobs(model, sample, config.rollout.temperature)
        squares = reference_squares(model, sample, config.rollout.temperature)
        found.append(Before(old, entropies, ref, ref, None if values is None else values[index], squares))
    return found


def _token_losses(
    policy: torch.Tensor,
    old: torch.Tensor,
    adv: torch.Tensor,
    chosen: torch.Tensor | None,
    a: AlgorithmConfig,
) -> torch.Tensor:
    low, high, ratio = 1 - a.clip_eps_low, 1 + a.clip_eps_high, torch.exp(policy - old)
    clipped = -torch.min(ratio * adv, torch.clamp(ratio, low, high) * adv)
    if a.policy_loss == "gspo":
        sequence_ratio = torch.exp((policy - old).mean())
        return -torch.min(sequence_ratio * adv, torch.clamp(sequence_ratio, low, high) * adv)
    if a.policy_loss == "gmpo":
        bounded = torch.clamp(policy - old, -a.clip_eps_low, a.clip_eps_high)
        least = torch.minimum(torch.sign(adv) * (policy - old), torch.sign(adv) * bounded)
        return -torch.exp((torch.sign(adv) * least).mean()) * adv
    if a.policy_loss == "cispo":
        return -torch.clamp(ratio, low, high).detach() * adv * policy
    if a.policy_loss == "sapo":
        tau = torch.tensor([a.sapo_tau_pos if x > 0 else a.sapo_tau_neg for x in adv.tolist()])
        return -4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * adv
    if a.policy_loss == "dual_clip":
        return torch.where(adv < 0, torch.min(clipped, -a.dual_clip * adv), clipped)
    if a.policy_loss == "kl_cov":
        assert chosen is not None
        return -ratio * adv + a.kl_cov_coef * (policy - old).abs() * chosen
    return clipped if chosen is None else clipped * ~chosen


def _losses_by_the_sampler(
    policy: torch.Tensor, sampler: torch.Tensor, adv: torch.Tensor, a: AlgorithmConfig
) -> torch.Tensor:
    gap, positive = policy - sampler, bool(adv[0] >= 0)
    if a.policy_loss == "dro":
        return a.dro_beta / 2 * gap**2 - adv * policy
    if a.policy_loss == "vespo":
        k, decay = (a.vespo_k_pos, a.vespo_lambda_pos) if positive else (a.vespo_k_neg, a.vespo_lambda_neg)
        w = float(gap.detach().double().sum().exp())
        return -(w**k) * math.exp(decay * (1 - w)) * adv * policy
    moved = (policy.exp() - sampler.exp()).detach() * torch.sign(adv)
    return -gap.exp() * adv * (moved <= (a.clip_eps_high if positive else a.clip_eps_low))


def _chosen_tokens(
    scores: dict[int, Any],
    before: Sequence[Before],
    advantages: list[list[float]],
    counted: list[int],
    config: TrainConfig,
) -> dict[int, torch.Tensor]:
    """Tokens chosen by covariance. clip_cov takes all candidates (tests set cov_frac = 1)."""
    a = config.algorithm
    if not a.selects_by_cov:
        return {}
    policy = torch.cat([scores[i][0].detach() for i in counted]).double()
    adv = torch.tensor([x for i in counted for x in advantages[i]]).double()
    cov = (adv - adv.mean()) * (policy - policy.mean())
    if a.policy_loss == "kl_cov":
        chosen = torch.zeros(len(cov), dtype=torch.bool)
        chosen[cov.argsort(descending=True)[: max(1, int(a.cov_frac * len(cov)))]] = True
    else:
        ratio = torch.exp(policy - torch.cat([before[i].old for i in counted]))
        out = torch.clamp(ratio, 1 - a.clip_eps_low, 1 + a.clip_eps_high) * adv < ratio * adv
        chosen = (cov > a.clip_cov_low) & (cov < a.clip_cov_high) & ~out
    return dict(zip(counted, torch.split(chosen, [len(advantages[i]) for i in counted]), strict=True))


def _importance(old: torch.Tensor, rollout: torch.Tensor, config: ImportanceConfig) -> torch.Tensor:
    gap = (old - rollout).sum().expand(len(old)) if config.level == "sequence" else old - rollout
    weight = torch.exp(gap)
    if config.mode == "none":
        weight = torch.ones_like(weight)
    elif config.mode == "truncate":
        weight = weight.clamp(max=config.cap)
    else:
        weight = weight * ((weight <= config.cap) & (weight >= config.floor))
    mismatch = (torch.exp(old - rollout) - (old - rollout) - 1).mean()
    return weight * 0 if config.reject_kl is not None and mismatch > config.reject_kl else weight
