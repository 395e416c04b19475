"""How many tokens' keys and values the trainer copies in one micro-batch, at the worst lengths.

Attention over a prefix tree (model/tree_attention.py) copies, for each piece, the keys and values of all
tokens above it. Many short completions of long prompts give many pieces, so a micro-batch of few tokens can
make many copies. model/prefix_tree.py decides what becomes a piece.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from skylite.config.train import TrainConfig

SCORES_PER_CALL = 16384
"""That of model/prefix_tree.py, which the parent does not import."""
STEP = 1.05
"""Ratio of the lengths that are tried."""


Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a micro-batch can hold."""

    group: int
    groups: int
    prompt: int
    """Longest prompt."""
    sequence: int
    """Longest prompt and completion."""


def limits_of(config: TrainConfig) -> Limits:
    rollout = config.rollout
    return Limits(
        rollout.group_size, rollout.prompts_per_step, rollout.max_prompt_tokens, config.max_sequence_tokens
    )


def full_copies(tokens: int, limits: Limits) -> int:
    """Copied tokens if all prompts and completions are as long as they may be, and all groups complete."""
    prompt, completion = (np.array([n]) for n in (limits.prompt, max(1, limits.sequence - limits.prompt)))
    return int(_copies(tokens, limits.groups, limits.group, prompt, completion, 0 * prompt).max())


def worst_copies(tokens: int, limits: Limits) -> int:
    """The most copied tokens over all lengths of prompts and completions, each the same for all.

    Prompts may share all tokens but the last. Completions of a group differ in their first token.
    """
    prompt, completion = np.meshgrid(_lengths(limits.prompt), _lengths(limits.sequence - 1))
    prompt = np.minimum(prompt, limits.sequence - completion)
    return max(
        int(_copies(tokens, limits.groups, group, prompt, completion, prefix).max())
        for group in (1, limits.group)
        for prefix in (0 * prompt, (prompt - 1) // 2, prompt - 1)
    )


def _lengths(most: int) -> Lengths:
    """Lengths from 1 to `most`, each about STEP times as long as the one before."""
    count = 1 + math.ceil(math.log(max(1, most), STEP))
    return np.unique(np.geomspace(1, max(1, most), count).round().astype(np.int64))


def _copies(
    tokens: int, limit: int, group: int, prompt: Lengths, completion: Lengths, prefix: Lengths
) -> Lengths:
    """Copies of as many groups as fit, at most `limit`. All prompts share their first `prefix` tokens."""
    alone = np.clip((tokens - prompt) // completion, 0, group) * (prompt if group > 1 else 0)
    size = prompt - prefix + group * completion
    groups = np.minimum(limit, np.maximum(0, tokens - prefix) // size)
    pieces = (prompt - prefix) * prompt + group * completion * (prompt + completion)
    is_cut = (group > 1) & (size * (prefix + size) - pieces >= SCORES_PER_CALL * group)
    # The tokens that are left go to groups of one token, which copy the shared ones.
    left = np.maximum(0, tokens - prefix - groups * size)
    others = np.minimum(limit - groups, left // (prompt - prefix + 1))
    several = (groups + others) * prefix + groups * np.where(is_cut, group * prompt, 0)
    most: Lengths = np.maximum(alone, np.where(groups + others > 1, several, 0))
    return most
