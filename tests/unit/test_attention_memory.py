"""The bound on copied keys and values, against the pieces of real prefix trees."""

from __future__ import annotations

import random

import pytest

from skylite.config.train import TrainConfig
from skylite.model import prefix_tree
from skylite.model.prefix_tree import build_tree
from skylite.resources import gpu_memory_plan
from skylite.resources.gpu_memory_plan import copies, worst_copies


def tree_of(prompts: list[list[int]], lengths: list[list[int]]) -> tuple[int, int]:
    """(nodes, copied tokens) of a tree with completions that share nothing."""
    sequences, groups = [], []
    for number, (prompt, group) in enumerate(zip(prompts, lengths, strict=True)):
        sequences += [[*prompt, 1000 + i, *[7] * (length - 1)] for i, length in enumerate(group)]
        groups += [number] * len(group)
    tree = build_tree(sequences, groups)
    above = [sum(tree.pieces[i].size for i in piece.ancestors) for piece in tree.pieces if piece.size]
    return len(tree.token_ids), sum(above)


def settings(group: int, groups: int, prompt: int, completion: int) -> TrainConfig:
    rollout = {"group_size": group, "prompts_per_step": groups}
    lengths = {"max_prompt_tokens": prompt, "max_completion_tokens": completion}
    return TrainConfig.model_validate({"rollout": rollout | lengths})


def test_a_call_costs_what_it_costs_the_trainer() -> None:
    assert gpu_memory_plan.SCORES_PER_CALL == prefix_tree.SCORES_PER_CALL


def test_a_group_copies_its_prompt_for_each_completion() -> None:
    """Short completions: 64 of 56 tokens. Long ones copy no more, because fewer fit."""
    assert tree_of([[1] * 1024], [[56] * 64]) == (1024 + 64 * 56, 64 * 1024)
    config = settings(64, 1, 1024, 1024)
    assert worst_copies(1024 + 64 * 56, config) >= 64 * 1024
    assert worst_copies(1024 + 10, config) >= 10 * 1024
    assert copies(1024 + 64 * 1024, config, 1024) == 64 * 1024


@pytest.mark.parametrize("seed", range(60))
def test_no_tree_copies_more_than_the_worst(seed: int) -> None:
    rng = random.Random(seed)
    prompt, group = rng.choice([(300, 8), (128, 4), (64, 16)])
    prompts = rng.choice([1, 2, 6])
    config = settings(group, prompts, prompt, 200)
    shared = [5] * rng.choice([0, prompt // 2, prompt - 1])
    longest = rng.choice([2, 20, 60, 200])
    own = [[*shared, *([10 + i] * (rng.choice([1, prompt - len(shared)])))] for i in range(prompts)]
    lengths = [[rng.randint(1, longest) for _ in range(group)] for _ in own]
    nodes, copied = tree_of(own, lengths)
    # Equal lengths come close to the worst, but not always to the token.
    assert copied <= 1.1 * worst_copies(nodes, config)
