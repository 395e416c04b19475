"""The bound on copied keys and values, against the pieces of real prefix trees."""

from __future__ import annotations

import random

import pytest

from skylite.model import prefix_tree
from skylite.model.prefix_tree import build_tree
from skylite.resources import attention_memory
from skylite.resources.attention_memory import Limits, full_copies, worst_copies


def tree_of(prompts: list[list[int]], lengths: list[list[int]]) -> tuple[int, int]:
    """(nodes, copied tokens) of a tree with completions that share nothing."""
    sequences, groups = [], []
    for number, (prompt, group) in enumerate(zip(prompts, lengths, strict=True)):
        sequences += [[*prompt, 1000 + i, *[7] * (length - 1)] for i, length in enumerate(group)]
        groups += [number] * len(group)
    tree = build_tree(sequences, groups)
    above = [sum(tree.pieces[i].size for i in piece.ancestors) for piece in tree.pieces if piece.size]
    return len(tree.token_ids), sum(above)


def test_a_call_costs_what_it_costs_the_trainer() -> None:
    assert attention_memory.SCORES_PER_CALL == prefix_tree.SCORES_PER_CALL


def test_a_group_copies_its_prompt_for_each_completion() -> None:
    """Short completions: 64 of 56 tokens. Long ones copy no more, because fewer fit."""
    assert tree_of([[1] * 1024], [[56] * 64]) == (1024 + 64 * 56, 64 * 1024)
    limits = Limits(group=64, groups=1, prompt=1024, sequence=2048)
    assert worst_copies(1024 + 64 * 56, limits) == 64 * 1024
    assert worst_copies(1024 + 10, limits) >= 10 * 1024
    assert full_copies(1024 + 2 * 1024, limits) == 2 * 1024


@pytest.mark.parametrize("seed", range(60))
def test_no_tree_copies_more_than_the_worst(seed: int) -> None:
    rng = random.Random(seed)
    prompt, group = rng.choice([(300, 8), (128, 4), (64, 16)])
    prompts = rng.choice([1, 2, 6])
    limits = Limits(group=group, groups=prompts, prompt=prompt, sequence=prompt + 200)
    shared = [5] * rng.choice([0, prompt // 2, prompt - 1])
    longest = rng.choice([2, 20, 60, 200])
    own = [[*shared, *([10 + i] * (rng.choice([1, prompt - len(shared)])))] for i in range(prompts)]
    lengths = [[rng.randint(1, longest) for _ in range(group)] for _ in own]
    nodes, copied = tree_of(own, lengths)
    # Groups of equal lengths come close to the worst, but not always to the token.
    assert copied <= 1.1 * worst_copies(nodes, limits)
