"""pass@k, majority vote and the answers that are voted on."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from skylite.config.rollout import RewardParameters
from skylite.rewards.built_in import DEFAULTS
from skylite.rewards.gsm8k import final_number
from skylite.rewards.text_rewards import ExactMatch

_BOXED = re.compile(r"\\f?boxed\s*\{")


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
    if reward == "exact_match":
        settings = parameters.answer_pattern, parameters.compare, parameters.ignore_case
        return ExactMatch(*settings).vote(completion)
    if reward == "gsm8k":
        number = final_number(completion)
        return None if number is None else str(number)
    return boxed(completion) if reward == "math" else None


def can_vote(reward: str) -> bool:
    """Whether `answer_of` finds the answers of this reward."""
    return reward in ("gsm8k", "math", "exact_match")


def boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} without whitespace; None without a closed one."""
    for match in reversed(list(_BOXED.finditer(text))):
        depth = 1
        for end in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return "".join(text[match.end() : end].split())
    return None
