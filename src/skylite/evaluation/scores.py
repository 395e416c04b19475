"""pass@k, majority vote and the answers that are voted on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from skylite.config.rollout import RewardParameters
from skylite.rewards.built_in import BUILT_IN, DEFAULTS


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of `k` samples is right (Chen et al. 2021, eq. 1).

    1 - C(n - c, k) / C(n, k). Raises ValueError for k > n, which has no unbiased estimate.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, not {num_samples}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def ks_for(num_samples: int) -> list[int]:
    """The k of the reported pass@k: 1, 2, 4, ... below n, and n."""
    return [*(2**i for i in range(num_samples.bit_length()) if 2**i < num_samples), num_samples]


def majority_score(answers: Sequence[str | None], scores: Sequence[float]) -> float:
    """The score of the most frequent answer; of equally frequent ones the first wins.

    None is a completion without an answer. It has no vote.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    return scores[answers.index(votes.most_common(1)[0][0])]


def answer_of(reward: str, completion: str, parameters: RewardParameters = DEFAULTS) -> str | None:
    """What a completion answers, equal for answers that the reward treats as one; None without an answer."""
    vote = BUILT_IN[reward].vote if reward in BUILT_IN else None
    return None if vote is None else vote(completion, parameters)


def can_vote(reward: str) -> bool:
    """Whether `answer_of` finds the answers of this reward."""
    return reward in BUILT_IN and BUILT_IN[reward].vote is not None
