"""Advantages: one function for each value of `algorithm.advantage`.

Functions in GROUP_ADVANTAGES compare the trajectories of a group by reward and length, those in
COMPONENT_ADVANTAGES by the components of the reward. `reinforce++` and
`gae` work on tokens (`token_returns`, `gae`) and are whitened over the step. `otb` compares the tokens of a
group (`optimal_token_baseline`), `remax` a completion with one outside its group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

EPS = 1e-6
WHITEN_EPS = 1e-8


@dataclass(frozen=True, slots=True)
class Components:
    """The scores that the rewards are weighted sums of: those of several reward functions, for example."""

    names: tuple[str, ...]
    """[K]"""
    scores: Tensor
    """[N, G, K] unweighted."""
    weights: Tensor
    """[K]"""

    def __getitem__(self, name: str) -> Tensor:
        """[N, G] the scores of one component."""
        return self.scores[..., self.names.index(name)]


def grpo(rewards: Tensor, lengths: Tensor) -> Tensor:
    """(r - mean) / std of the group, with the sample standard deviation.

    DeepSeekMath, arXiv 2402.03300, section 4.1.2.
    """
    return _centred(rewards) / (rewards.std(dim=1, keepdim=True) + EPS)


def dr_grpo(rewards: Tensor, lengths: Tensor) -> Tensor:
    """r - mean of the group (Dr. GRPO, arXiv 2503.20783, section 3.2)."""
    return _centred(rewards)


def rloo(rewards: Tensor, lengths: Tensor) -> Tensor:
    """r - mean of the other trajectories in the group (RLOO, arXiv 2402.14740)."""
    size = rewards.shape[1]
    return _centred(rewards) * (size / (size - 1))


def maxrl(rewards: Tensor, lengths: Tensor) -> Tensor:
    """(r - mean) / mean of the group, the gradient of the log pass rate (MaxRL, arXiv 2602.02710).

    Rewards must not be negative.
    """
    return _centred(rewards) / (rewards.mean(dim=1, keepdim=True) + EPS)


def best(rewards: Tensor, lengths: Tensor) -> Tensor:
    """1 for the best of the group, 0 for the others; equal ones share it (RAFT, arXiv 2304.06767)."""
    is_best = (rewards == rewards.amax(dim=1, keepdim=True)) & ~zero_std_groups(rewards)[:, None]
    return is_best / is_best.sum(dim=1, keepdim=True).clamp(min=1)


def opo(rewards: Tensor, lengths: Tensor) -> Tensor:
    """r - length-weighted mean of the group, the baseline of least variance (OPO, arXiv 2505.23585)."""
    baseline = (lengths * rewards).sum(dim=1, keepdim=True) / lengths.sum(dim=1, keepdim=True)
    return torch.where(zero_std_groups(rewards)[:, None], torch.zeros_like(rewards), rewards - baseline)


def reinforce_plus_plus_baseline(rewards: Tensor, lengths: Tensor) -> Tensor:
    """r - mean of the group, whitened over the batch's tokens (REINFORCE++-baseline, arXiv 2501.03262)."""
    centred = _centred(rewards)
    sums = torch.stack(
        [lengths.sum(), (lengths * centred).sum(), (lengths * centred.square()).sum()]
    ).double()
    return whiten(centred, sums)


def pass_at_k(rewards: Tensor, lengths: Tensor, k: int) -> Tensor:
    """(mean of the k-subsets with the completion - mean of all k-subsets) / std; the best of a subset counts.

    For rewards of 0 and 1 the closed form of "Pass@k Training", arXiv 2508.10751; sorting gives
    the same expectations for any rewards, as in arXiv 2505.15201. k = 1: `grpo`, but for the
    population's std.
    """
    size = rewards.shape[1]
    values, order = rewards.double().sort(dim=1)
    places = range(size)  # the best of a subset: the last place in it
    subsets = values.new_tensor([math.comb(j, k - 1) / math.comb(size, k) for j in places])
    mean = (values * subsets).sum(dim=1, keepdim=True)
    std = ((values - mean).square() * subsets).sum(dim=1, keepdim=True).sqrt()
    holding = values.new_tensor(
        [[_share_best(i, j, k) / math.comb(size - 1, k - 1) for j in places] for i in places]
    )
    # Where the best of every subset is equal, rounding must make no gradient.
    in_order = (values @ holding.T - mean) / (std + EPS) * (std > EPS)
    return torch.zeros_like(values).scatter(1, order, in_order).to(rewards.dtype)


def _share_best(place: int, best: int, k: int) -> int:
    """Of the k-subsets that hold `place`: how many have `best` as their last place."""
    if place == best:
        return math.comb(best, k - 1)
    return math.comb(best - 1, k - 2) if place < best and k > 1 else 0


def remax(rewards: Tensor, greedy: Tensor) -> Tensor:
    """r - reward of the greedy completion of the same prompt, all [N, G] (ReMax, arXiv 2310.10505, eq. 7)."""
    return rewards - greedy


def gdpo(components: Components, formulas: Mapping[str, str] = MappingProxyType({})) -> Tensor:
    """The weighted sum of each component's (r - mean) / std of the group, over its std in the step.

    `formulas`: other formulas of GROUP_ADVANTAGES that look at rewards alone, by component.

    Equal sums of different components stay different, and a component on a small scale counts as its weight
    says. A group's sums are centred, so the step's mean is 0 and is not subtracted. A component with a
    weight of 0 is left out. GDPO, arXiv 2601.05242, section 3: normalised per reward, summed, then over the
    batch.
    """
    scores = components.scores.unbind(dim=-1)
    weighted = [
        weight * GROUP_ADVANTAGES[formulas.get(name, "grpo")](r, torch.ones_like(r))
        for name, weight, r in zip(components.names, components.weights.tolist(), scores, strict=True)
        if weight != 0
    ]
    total = torch.stack(weighted).sum(dim=0)
    return total / (total.std() + EPS)


GROUP_ADVANTAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "maxrl": maxrl,
    "opo": opo,
    "best": best,
    "reinforce++-baseline": reinforce_plus_plus_baseline,
}
"""(rewards [N, G], lengths [N, G] in tokens) -> advantages [N, G].

A group with equal rewards is centred to exact zeros.
"""
COMPONENT_ADVANTAGES = {"gdpo": gdpo}
"""(components [N, G, K], algorithm.component_advantages) -> advantages [N, G]."""


def token_returns(token_rewards: Tensor, gamma: float) -> Tensor:
    """[..., L] -> [..., L]: sum over t' >= t of gamma^(t' - t) * r_t' (REINFORCE++, arXiv 2501.03262).

    Each row is a trajectory, with zeros after its last token. Summed in float64.
    """
    returns, factor, reach = token_rewards.double(), gamma, 1
    while reach < returns.shape[-1]:  # now each token has the terms of the next `reach` tokens
        following = torch.nn.functional.pad(returns[..., reach:], (0, reach))
        returns, factor, reach = returns + factor * following, factor * factor, 2 * reach
    return returns.to(token_rewards.dtype)


def gae(token_rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """Advantages [..., L] from rewards and values of the states before each token, as for `token_returns`.

    A_t = delta_t + gamma * lam * A_(t+1), delta_t = r_t + gamma * V_(t+1) - V_t (arXiv 1506.02438, eq. 16). V
    is 0 after the last token. The critic's target, the return, is A + values.
    """
    following = torch.nn.functional.pad(values[..., 1:], (0, 1))
    return token_returns(token_rewards + gamma * following - values, gamma * lam)


def score_norms(logprobs: Tensor, sum_squares: Tensor) -> Tensor:
    """[C] squared norm of the gradient of log p(token) by the logits: 1 - 2 p + the sum of all p squared.

    The Optimal Token Baseline, PMLR 306 ("logit-gradient proxy"). `sum_squares` [C]: over the vocabulary.
    """
    norms = 1 - 2 * torch.exp(logprobs) + sum_squares
    return norms.clamp(min=0)  # rounding makes those of certain tokens negative


def optimal_token_baseline(token_rewards: Tensor, norms: Tensor, lengths: Tensor) -> Tensor:
    """[G, L] R_t - B_t: the return less the baseline of least variance for the t-th token of a group.

    B_t is the mean of the group's returns R_t. A trajectory's weight in it is the sum of its norms
    (`score_norms`) up to t: how much its tokens so far move the policy. The Optimal Token Baseline, PMLR 306.

    - Where only the longest trajectory has tokens left, they have no baseline, as in verl.
    - Where all norms so far are 0, B_t is the plain mean. In verl it is 0.
    - If all returns are equal, advantages are exactly 0, as with other formulas. In verl the tokens of the
      longest trajectory alone keep their return.

    Args:
        token_rewards: [G, L] of one group, 0 after a trajectory's last token, as are `norms`.
        norms: [G, L].
        lengths: [G] tokens of each trajectory.
    """
    returns = token_returns(token_rewards.double(), gamma=1.0)
    place = torch.arange(returns.shape[-1], device=returns.device)
    present = place < lengths[:, None]
    weights = norms.double().cumsum(dim=-1) * present
    weights = torch.where(weights.sum(dim=0) > 0, weights, present.double())
    baseline = (returns * weights).sum(dim=0) / weights.sum(dim=0)
    baseline = torch.where(present.sum(dim=0) > 1, baseline, 0.0)
    differs = ((returns != returns[0, 0]) & present).any()
    return torch.where(present & differs, returns - baseline, 0.0).to(token_rewards.dtype)


def moments(values: Tensor) -> Tensor:
    """[3] float64: count, sum and sum of squares. Add them over ranks, then pass them to `whiten`."""
    values = values.double()
    return torch.stack(
        [
            torch.tensor(float(values.numel()), dtype=torch.float64, device=values.device),
            values.sum(),
            values.square().sum(),
        ]
    )


def whiten(values: Tensor, sums: Tensor) -> Tensor:
    """(values - mean) / std, with mean and unbiased variance from `sums` [3], see `moments`."""
    count, total, squares = (float(x) for x in sums)
    mean = total / count
    variance = max(0.0, squares / count - mean * mean) * count / max(1.0, count - 1)
    return (values - mean) / math.sqrt(variance + WHITEN_EPS)


def zero_std_groups(rewards: Tensor) -> Tensor:
    """rewards [N, G] -> bool [N]: groups without a signal, because every trajectory earned the same."""
    return (rewards == rewards[:, :1]).all(dim=1)


def _centred(rewards: Tensor) -> Tensor:
    """r - mean of the group. Exactly 0 where all are equal, so that rounding makes no gradient."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return torch.where(zero_std_groups(rewards)[:, None], torch.zeros_like(centred), centred)
