"""The prefix tree: shared tokens, the attention mask, and how a batch is split."""

import random

import numpy as np
import pytest
import torch

from skylite.model import prefix_tree as tree_module
from skylite.model import tree_attention as tree_attention_module
from skylite.model.flex_attention import flex_tree_attention
from skylite.model.packing import pack_tokens
from skylite.model.prefix_tree import Tree, build_tree, shared_length, tree_size, tree_work
from skylite.model.tree_attention import ScoreSettings, TreeLayout, tree_attention, tree_layout
from skylite.run.rollout_file import examples_of
from skylite.trainer.micro_batches import by_trajectory, plan_micro_batches
from tests.model_masks import MASKS, sees, window_mask
from tests.rows import Row, groups_of, random_call_trees, random_samples


def layout_of(tree: Tree) -> TreeLayout:
    return tree_layout(tree, torch.from_numpy(tree.depths), torch.from_numpy(tree.ends))


def masks_of(tree: Tree, mask: str = "none") -> list[torch.Tensor]:
    return tree_attention_module._additive_masks(layout_of(tree), MASKS[mask], torch.float32)


def visible_nodes(tree: Tree, mask: str) -> np.ndarray:
    """bool [T, T] from the masks of the pieces."""
    nodes = np.split(np.arange(len(tree.token_ids)), np.cumsum([p.size for p in tree.pieces])[:-1])
    sees = np.zeros((len(tree.token_ids),) * 2, dtype=bool)
    for rows, piece, bias in zip(nodes, tree.pieces, masks_of(tree, mask), strict=True):
        sees[rows[:, None], np.concatenate([*(nodes[i] for i in piece.ancestors), rows])] = bias.numpy() == 0
    return sees


def test_shared_tokens_become_one_node():
    tree = build_tree([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 4]], groups=[0, 0, 1])
    # 1 2 | 3 4 5 | 6 4: the shared prefix, group 0's block (3 is shared), group 1's block
    assert [p.size for p in tree.pieces] == [2, 3, 2]
    assert tree.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 4]
    assert tree.depths.tolist() == [0, 1, 2, 3, 3, 2, 3]
    assert [p.tolist() for p in tree.paths] == [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 5, 6]]


@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("call", [tree_module.SCORES_PER_CALL, 0])
def test_a_node_attends_only_to_itself_and_its_ancestors(call, num_groups, monkeypatch):
    monkeypatch.setattr(tree_module, "SCORES_PER_CALL", call)
    rng = random.Random(0)
    sequences = [[rng.randrange(3) for _ in range(rng.randrange(1, 9))] for _ in range(20)]
    groups = [i % num_groups for i in range(20)]
    tree = build_tree(sequences, groups)
    assert tree_size(sequences, groups) == len(tree.token_ids)
    depth = max(len(p.ancestors) for p in tree.pieces)
    if num_groups == 1:
        assert depth > 2 if call == 0 else depth == 1, "cut again only where a call costs nothing"
    for name in MASKS:
        visible = visible_nodes(tree, name)
        for sequence, path in zip(sequences, tree.paths, strict=True):
            assert tree.token_ids[path].tolist() == sequence
            for position, node in enumerate(path):
                seen = [int(other) for k, other in enumerate(path) if sees(name, position, k)]
                assert np.flatnonzero(visible[node]).tolist() == sorted(seen)


@pytest.mark.parametrize("form", [tree_attention, flex_tree_attention])
@pytest.mark.parametrize("call", [tree_module.SCORES_PER_CALL, 0])
@pytest.mark.parametrize("mask", ["none", "window 3", "chunk 3"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])], ids=["", "sinks"])
@pytest.mark.parametrize("value_size", [8, 5, 12])
def test_attention_over_blocks_equals_attention_over_each_path(
    value_size, sinks, softcap, mask, call, form, monkeypatch
):
    monkeypatch.setattr(tree_module, "SCORES_PER_CALL", call)
    torch.manual_seed(0)
    tree = build_tree([[1, 2, 3, 4, 9], [1, 2, 3, 5], [1, 2, 6, 4, 4, 4]], groups=[0, 0, 1])
    num_nodes = len(tree.token_ids)
    query, key, value = (
        torch.randn(1, 4, num_nodes, 8),
        torch.randn(1, 2, num_nodes, 8),
        torch.randn(1, 2, num_nodes, value_size),
    )
    layout = layout_of(tree)
    out = form(query, key, value, layout, ScoreSettings(0.3, MASKS[mask], softcap, sinks))
    for path in map(torch.from_numpy, tree.paths):
        for head in range(4):
            scores = query[0, head, path] @ key[0, head // 2, path].T * 0.3
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            places = range(len(path))
            hidden = torch.tensor([[not sees(mask, q, k) for k in places] for q in places])
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].expand(len(path), 1)], dim=1)
            expected = scores.softmax(1)[:, : len(path)] @ value[0, head // 2, path]
            assert torch.allclose(out[0, path, head], expected, atol=1e-5)


@pytest.mark.parametrize("call", [tree_module.SCORES_PER_CALL, 0])
@pytest.mark.parametrize("prefix", [[1, 2], []])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -2.0])], ids=["", "sinks"])
def test_fused_attention_has_autograds_gradients_and_keeps_less(sinks, window, prefix, call, monkeypatch):
    monkeypatch.setattr(tree_module, "SCORES_PER_CALL", call)
    torch.manual_seed(0)
    branches = [[3, 4, 9, 9], [3, 5], [6, 4, 4, 4], [6, 4, 5], [6, 7]]
    tree = build_tree([prefix + b for b in branches], groups=[0, 0, 1, 1, 1])
    layout, num_nodes = layout_of(tree), len(tree.token_ids)
    # In the model's memory layout: a token's rows are contiguous.
    inputs = [torch.randn(1, num_nodes, heads, 8).transpose(1, 2).requires_grad_() for heads in (6, 2, 2)]
    weights = torch.randn(1, num_nodes, 6, 8)
    query, key, value = inputs
    grads, kept = [], []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        seen[tensor.data_ptr()] = tensor.nbytes
        return tensor

    for softcap in (None, 1e6):  # a cap this high changes only the code path
        seen: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            out = tree_attention(
                query, key, value, layout, ScoreSettings(0.3, window_mask(window), softcap, sinks)
            )
        kept.append(sum(seen.values()))
        grads.append(torch.autograd.grad((out * weights).sum(), inputs))
    for ours, autograds in zip(*grads, strict=True):
        assert torch.allclose(ours, autograds, atol=1e-5, rtol=1e-4)
    assert kept[0] < 0.7 * kept[1]


def test_only_long_branches_are_split_from_their_trunk():
    prompt = list(range(100))
    long = build_tree([prompt + [1000 * i + j for j in range(128)] for i in range(1, 9)], groups=[0] * 8)
    # One group: the tokens that all share are the prefix, so no trunk is left.
    assert [p.size for p in long.pieces] == [100] + [128] * 8
    groups = [i // 8 for i in range(16)]
    stems = [[7, 1000 * group, *prompt] for group in groups]
    two = build_tree([stem + [1000 * i + j for j in range(1, 129)] for i, stem in enumerate(stems)], groups)
    assert [(p.ancestors, tuple(m.shape)) for p, m in zip(two.pieces[:3], masks_of(two), strict=False)] == [
        ((), (1, 1)),
        ((0,), (101, 102)),
        ((0, 1), (128, 102 + 128)),
    ]
    assert sum(m.numel() for m in masks_of(two)) < 0.3 * 2 * (101 + 8 * 128) ** 2
    short = build_tree([[*stem, 1000 * i, 3, 4] for i, stem in enumerate(stems)], groups)
    assert [p.size for p in short.pieces] == [1, 101 + 24, 101 + 24]


def test_a_history_that_branches_every_turn_is_compared_once(monkeypatch):
    """Whatever its depth: the first call with the last one, and each with the one before it."""
    monkeypatch.setattr(tree_module, "SCORES_PER_CALL", 0)
    compared = []

    def count(a, b):
        compared.append(min(len(a), len(b)))
        return shared_length(a, b)

    monkeypatch.setattr(tree_module, "shared_length", count)
    history = list(range(640))
    calls = [[*history[: 20 * turn], -turn, -turn] for turn in range(1, 33)]
    tree = build_tree(calls, groups=[0] * 32)
    assert max(len(p.ancestors) for p in tree.pieces) == 31
    assert len(compared) == 1 + 31
    assert sum(compared) < 2 * sum(map(len, calls))


def with_sub_agents(num_groups: int) -> tuple[list[list[int]], list[int]]:
    """Calls of episodes of two trajectories each: one with the task's system prompt, one of a sub-agent."""
    rng = random.Random(3)
    main, sub = ([kind, *(rng.randrange(50) for _ in range(199))] for kind in (100, 200))
    calls, groups = [], []
    for group in range(num_groups):
        question = [rng.randrange(50) for _ in range(20)]
        for _ in range(2):
            first = [*main, 60 + group, *question, *(rng.randrange(50) for _ in range(30))]
            calls += [first, [*sub, 60 + group, *question, *(rng.randrange(50) for _ in range(10))]]
            groups += [group, group]
    return calls, groups


def test_groups_share_each_system_prompt_though_nothing_is_common_to_all():
    calls, groups = with_sub_agents(4)
    tree = build_tree(calls, groups)
    # Two system prompts of 200; per group and prompt 21 of the question; per trajectory 30 and 10.
    assert len(tree.token_ids) == 2 * 200 + 2 * 4 * 21 + 8 * (30 + 10)
    assert tree_size(calls, groups) == len(tree.token_ids)
    assert [tree.token_ids[path].tolist() for path in tree.paths] == calls
    sees = visible_nodes(tree, "none")
    for path in tree.paths:
        for position, node in enumerate(path):
            assert np.flatnonzero(sees[node]).tolist() == sorted(path[: position + 1].tolist())


def test_groups_do_not_share_the_few_words_with_which_two_prompts_begin():
    tree = build_tree([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 9]], groups=[0, 1, 2])
    assert len(tree.token_ids) == 1 + 4 + 4 + 1


def test_micro_batches_count_what_sub_agents_share():
    """All calls fit the budget as a tree. One after the other, each system prompt counts again."""
    calls, groups = with_sub_agents(4)
    rows = [
        Row(
            group=groups[i],
            prompt_token_ids=[],
            completion_token_ids=[c[-1] for c in calls[i : i + 2]],
            sampling_logprobs=[-1.0, -1.0],
            reward=float(i % 4),
            calls=tuple((call[:-1], call[-1:]) for call in calls[i : i + 2]),
        )
        for i in range(0, len(calls), 2)
    ]
    trajectories, unique = by_trajectory(examples_of(groups_of(rows))), tree_size(calls, groups)
    ((micro,),) = plan_micro_batches(trajectories, unique, 1, "tree", "token")
    assert len(micro) == 16
    (micro_batches,) = plan_micro_batches(trajectories, unique - 1, 1, "tree", "token")
    assert len(micro_batches) == 2
    assert all(size(examples, "tree") < unique for examples in micro_batches)


def test_work_counts_the_pairs_of_each_node_and_its_ancestors():
    sequences, groups = [[1, 2, 3, 4], [1, 2, 5], [1, 7]], [0, 0, 1]
    nodes, pairs = tree_work(sequences, groups)
    assert nodes == 6  # 1; 2, 3, 4; 5; 7
    assert pairs == 1 + (2 + 3 + 4) + 3 + 2


def test_ranks_get_equal_shares_of_the_work_and_not_of_the_tokens():
    """The pairs of a long completion cost more than its tokens."""
    lengths = [100, 100] + [10] * 70
    rows = [
        Row(
            group=group,
            prompt_token_ids=[],
            completion_token_ids=[1000 * group + i for i in range(length)],
            sampling_logprobs=[-1.0] * length,
            reward=0.0,
        )
        for group, length in enumerate(lengths)
    ]
    trajectories = by_trajectory(examples_of(groups_of(rows)))

    def work(plan):
        """Tokens, and the sum over all pairs, of each rank."""
        sizes = [[len(e.token_ids) for micro in rank for e in micro] for rank in plan]
        return [sum(n + 0.2 * n * (n + 1) / 2 for n in rank) for rank in sizes]

    by_work = work(plan_micro_batches(trajectories, 4096, 2, "tree", "trajectory", 0.2))
    assert max(by_work) < 1.02 * min(by_work)
    one_long = work(plan_micro_batches(trajectories[1:], 4096, 2, "tree", "trajectory"))
    assert max(one_long) > 1.3 * min(one_long), "equal tokens are unequal work"


def trajectories_of(seed, num_groups):
    return by_trajectory(examples_of(groups_of(random_samples(seed, num_groups))))


def size(examples, packing):
    """Number of tokens that a micro-batch computes."""
    return pack_tokens(examples, packing, torch.device("cpu")).num_nodes


def places(examples):
    """Which calls these are."""
    return [(e.group, e.trajectory, e.turn) for e in examples]


@pytest.mark.parametrize("packing", ["tree", "padded"])
@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize("budget", [16, 40, 90, 4096])
def test_each_trajectory_is_trained_once_in_budget_and_ranks_run_equally_many_passes(
    dp_size, budget, packing
):
    trajectories = trajectories_of(0, num_groups=5)
    plan = plan_micro_batches(trajectories, budget, dp_size, packing, "trajectory")
    assert len({len(rank) for rank in plan}) == 1
    assert sorted(places([e for rank in plan for micro in rank for e in micro])) == places(
        [e for calls in trajectories for e in calls]
    )
    cut = plan_micro_batches(trajectories, budget, dp_size, packing, "token")
    assert [list(map(places, rank)) for rank in plan] == [list(map(places, rank)) for rank in cut], (
        "one call each"
    )
    for micro in (m for rank in plan for m in rank if len(m) > 1):
        assert size(micro, packing) <= budget


@pytest.mark.parametrize("packing", ["tree", "padded"])
@pytest.mark.parametrize("dp_size", [1, 2])
@pytest.mark.parametrize("budget", [16, 40, 90])
def test_a_trajectory_over_the_budget_is_cut_between_its_calls(dp_size, budget, packing):
    trajectories = by_trajectory(examples_of(groups_of(random_call_trees(3))))
    plan = plan_micro_batches(trajectories, budget, dp_size, packing, "token")
    parts = [part for rank in plan for micro in rank for part in by_trajectory(micro)]
    assert sorted(places([e for part in parts for e in part])) == places(
        [e for calls in trajectories for e in calls]
    )
    assert len(parts) > len(trajectories) or budget > 16, "some are cut"
    for micro in (m for rank in plan for m in rank if len(by_trajectory(m)) == 1):
        (whole,) = (t for t in trajectories if places(t)[0][:2] == places(micro)[0][:2])
        assert size(micro, packing) <= max(budget, *(len(e.token_ids) for e in whole))


@pytest.mark.parametrize("packing", ["tree", "padded"])
@pytest.mark.parametrize("budget", [16, 40, 4096])
def test_the_trajectories_of_a_group_stay_together(budget, packing):
    plan = plan_micro_batches(trajectories_of(0, num_groups=5), budget, 2, packing, "group")
    groups = [{e.group for e in micro} for rank in plan for micro in rank if micro]
    assert sorted(g for of_micro in groups for g in of_micro) == list(range(5))


@pytest.mark.parametrize("packing", ["tree", "padded"])
def test_ranks_get_similar_work_and_the_largest_micro_batch_is_first(packing):
    trajectories = trajectories_of(1, num_groups=8)
    plan = plan_micro_batches(trajectories, 80 if packing == "tree" else 120, 2, packing, "trajectory")
    sizes = [[size(m, packing) for m in rank] for rank in plan]
    assert all(max(rank) - rank[0] <= 12 for rank in sizes)
    assert abs(sum(sizes[0]) - sum(sizes[1])) <= 0.25 * sum(sizes[0])


def test_padded_rows_need_few_passes_and_little_padding():
    trajectories = trajectories_of(2, num_groups=8)
    plan = plan_micro_batches(trajectories, 200, 2, "padded", "trajectory")
    tokens = sum(size(calls, "padded") for calls in trajectories)
    assert sum(len(rank) for rank in plan) <= 2 * -(-tokens // (2 * 160))
    assert sum(size(m, "padded") for rank in plan for m in rank if m) <= 1.15 * tokens


def test_a_conversation_costs_its_unique_tokens():
    """Eight trajectories of six turns: each is one chain below the common prompt, for any number of calls."""
    rng = random.Random(1)
    prompt = [rng.randrange(50) for _ in range(300)]
    sequences, groups = [], []
    for trajectory in range(8):
        history = list(prompt)
        for _ in range(6):
            history = [*history, 100 + trajectory, *(rng.randrange(50) for _ in range(119))]
            sequences.append(history)
            groups.append(0)
    tree = build_tree(sequences, groups)
    assert len(tree.token_ids) == 300 + 8 * 6 * 120
    assert [p.size for p in tree.pieces] == [300] + [720] * 8
    assert all(p.is_chain for p in tree.pieces)


def test_a_branch_inside_a_trajectory_is_cut_again():
    rng = random.Random(2)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(50) for _ in range(count)]

    prompt, first, second = tokens(200), tokens(300), tokens(300)
    sequences = [
        [*prompt, 100, *first, 101, *tokens(399)],
        [*prompt, 100, *first, 102, *tokens(399)],
        [*prompt, 103, *second, 104, *tokens(399)],
        [*prompt, 103, *second, 105, *tokens(399)],
        [106, *tokens(99)],
    ]
    tree = build_tree(sequences, [0, 0, 0, 0, 1])
    deepest = [p for p in tree.pieces if len(p.ancestors) == 3]
    assert [p.size for p in deepest] == [400] * 4
    for piece in deepest:
        assert sum(tree.pieces[i].size for i in piece.ancestors) == 501
