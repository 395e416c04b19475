"""Attention masks: FlexAttention's block mask against all pairs of nodes, and how long masks live.

FlexAttention as torch compiles it, too: on a CPU forward passes only.
"""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from skylite.model import flex_attention as module
from skylite.model import prefix_tree, tree_attention
from skylite.model.flex_attention import BLOCK, block_mask
from skylite.model.policy import score
from skylite.model.prefix_tree import Tree, build_tree
from skylite.model.process_group import Dist
from skylite.model.tree_attention import ScoreSettings, TreeLayout, tree_layout
from skylite.trainer.micro_batches import pack
from skylite.trainer.trainer import make_algorithm
from tests.cases import gradients_after_step, policy_of, table_of
from tests.model_masks import MASKS, sees
from tests.rows import random_samples
from tests.small_run import settings


def random_tree(seed: int) -> Tree:
    """Groups with a shared prompt, whose completions share a random number of tokens: up to 1,300 nodes."""
    rng = random.Random(seed)
    shared, sequences, groups = [7] * rng.choice([0, 1, 60, 300]), list[list[int]](), list[int]()
    for group in range(rng.randrange(1, 4)):
        prompt = [*shared, *(rng.randrange(50) for _ in range(rng.choice([1, 40, 200])))]
        for _ in range(rng.randrange(1, 5)):
            base = sequences[-1] if groups[-1:] == [group] else prompt
            kept = base[: rng.randrange(len(prompt), len(base) + 1)]
            sequences.append(kept + [rng.randrange(50) for _ in range(rng.choice([0, 1, 127, 128, 200]))])
            groups.append(group)
    return build_tree([s or [1] for s in sequences], groups)


def all_pairs(tree: Tree, mask: str) -> np.ndarray:
    """bool [T, T] from the paths of the sequences."""
    visible = np.zeros((len(tree.depths),) * 2, dtype=bool)
    for path in tree.paths:
        places = np.arange(len(path))
        visible[path[:, None], path] = sees(mask, places[:, None], places)
    return visible


def blocks_of(counts: Tensor | None, indices: Tensor | None, num_nodes: int) -> np.ndarray:
    """bool [blocks of queries, blocks of keys] from BlockMask's form."""
    assert counts is not None
    assert indices is not None
    found = np.zeros(indices.shape[2:], dtype=bool)
    for row, (count, order) in enumerate(zip(counts[0, 0].tolist(), indices[0, 0].tolist(), strict=True)):
        found[row, order[:count]] = True
    size = -(-num_nodes // BLOCK)  # a mask has two blocks at least
    return found[:size, :size]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("name", ["none", "window 1", "window 100", "window 300", "chunk 100", "chunk 300"])
def test_the_block_mask_equals_all_pairs(seed: int, name: str):
    tree = random_tree(seed)
    depths, ends, size = torch.from_numpy(tree.depths), torch.from_numpy(tree.ends), len(tree.depths)
    mask, visible = block_mask(depths, ends, MASKS[name]), all_pairs(tree, name)
    nodes = torch.arange(size)
    nothing = torch.zeros((), dtype=torch.int64)
    inner = mask.mask_mod(nothing, nothing, nodes[:, None], nodes)
    assert np.array_equal(inner.numpy(), visible)

    missing = -size % BLOCK
    tiles = np.pad(visible, (0, missing)).reshape(-1, BLOCK, (size + missing) // BLOCK, BLOCK)
    partial = blocks_of(mask.kv_num_blocks, mask.kv_indices, size)
    full = blocks_of(mask.full_kv_num_blocks, mask.full_kv_indices, size)
    assert not (partial & full).any()
    assert np.array_equal(full, tiles.all(axis=(1, 3)))
    visited, needed = partial | full, tiles.any(axis=(1, 3))
    assert visited[needed].all(), "every visible score is computed"
    if name == "none":
        assert np.array_equal(visited, needed), "and no block without one"
        torchs = create_block_mask(mask.mask_mod, None, None, size, size, device="cpu")
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            expected = getattr(torchs, name)
            assert torch.equal(getattr(mask, name)[..., : expected.shape[-1]], expected), name
    assert mask.shape == (1, 1, size, size)


def test_chains_below_equally_many_nodes_share_one_mask():
    prompt = list(range(100))
    tree = build_tree([prompt + [1000 * i + j for j in range(128 - i)] for i in range(1, 9)], groups=[0] * 8)
    layout = tree_layout(tree, torch.from_numpy(tree.depths), torch.from_numpy(tree.ends))
    masks = tree_attention._additive_masks(layout, None, torch.float32)
    assert [tuple(m.shape) for m in masks] == [(100, 100), *((128 - i, 228 - i) for i in range(1, 9))]
    storages = {m.untyped_storage().data_ptr(): m.untyped_storage().nbytes() for m in masks}
    assert len(storages) == 2
    assert sum(storages.values()) == 4 * (100 * 112 + 127 * 240)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[torch.Tensor]]:
    """Every mask that a test makes."""
    masks: list[weakref.ref[torch.Tensor]] = []
    make = tree_attention._make_masks

    def noted(*args: Any) -> list[torch.Tensor]:
        found = make(*args)
        masks.extend(weakref.ref(m) for m in found)
        return found

    monkeypatch.setattr(tree_attention, "_make_masks", noted)
    return masks


def alive(masks: list[weakref.ref[torch.Tensor]]) -> int:
    return sum(mask() is not None for mask in masks)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_a_pass_makes_its_masks_and_its_backward_frees_them(
    checkpointing: str, made: list[weakref.ref[torch.Tensor]], tiny_llama: Path, dist: Dist
):
    config = settings(trainer={"tokens_per_micro_batch": 40, "checkpointing": checkpointing})
    policy = policy_of(tiny_llama, config, dist)
    made.clear()
    table = table_of(random_samples(0), config)
    (micro_batches,) = pack(table, make_algorithm(config), policy, config, dist)
    assert len(micro_batches) > 1
    assert not made, "packing makes no masks"
    tokens = micro_batches[0].tokens
    gc.disable()  # a reference cycle would keep the masks until a collection
    try:
        logprobs, entropies = score(policy, tokens, temperature=1.0)
        assert alive(made) == len(made) == len(tokens.inputs["tree"].pieces), "the layers share them"
        (logprobs.sum() + entropies.sum()).backward()
        assert len(made) == len(tokens.inputs["tree"].pieces), "backward makes none"
        del logprobs, entropies
        assert alive(made) == 0
    finally:
        gc.enable()


def test_a_step_holds_the_masks_of_one_micro_batch(
    made: list[weakref.ref[torch.Tensor]], monkeypatch: pytest.MonkeyPatch, tiny_llama: Path, dist: Dist
):
    config = settings(algorithm={"kl_coef": 0.05}, trainer={"tokens_per_micro_batch": 40})
    policy = policy_of(tiny_llama, config, dist)
    made.clear()
    held = []
    monkeypatch.setattr("skylite.trainer.trainer.release_cached_memory", lambda: held.append(alive(made)))
    gc.disable()
    try:
        gradients_after_step(policy, config, dist)
    finally:
        gc.enable()
    assert len(held) > 2
    assert len(made) > 2
    assert set(held) == {0}


def test_flex_attention_makes_no_dense_mask(
    made: list[weakref.ref[torch.Tensor]], tiny_llama: Path, dist: Dist
):
    config = settings(trainer={"attention": "flex"})
    policy = policy_of(tiny_llama, config, dist)
    assert policy.packing == "tree"
    made.clear()
    ((micro,),) = pack(table_of(random_samples(0), config), make_algorithm(config), policy, config, dist)
    with torch.no_grad():
        score(policy, micro.tokens, temperature=1.0)
    assert not made


def test_a_long_step_is_laid_out_quickly(monkeypatch: pytest.MonkeyPatch):
    """8 completions of 8,192 tokens: the layout holds three integers a node, no pair of nodes."""
    monkeypatch.setattr(prefix_tree, "SCORES_PER_CALL", 16384)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 1000, 512).tolist()
    tree = build_tree([prompt + rng.integers(0, 1000, 8191).tolist() for _ in range(8)], [0] * 8)
    assert sum(x.nbytes for x in (tree.token_ids, tree.depths, tree.ends)) == 24 * len(tree.depths)
    size = len(tree.depths)
    mask = block_mask(torch.from_numpy(tree.depths), torch.from_numpy(tree.ends), None)
    visited = blocks_of(mask.kv_num_blocks, mask.kv_indices, size)
    visited |= blocks_of(mask.full_kv_num_blocks, mask.full_kv_indices, size)
    assert visited.mean() < 0.2


def layout_of(length: int) -> TreeLayout:
    """Two completions of `length` nodes after a prompt of as many."""
    prompt = list(range(length))
    tree = build_tree([[*prompt, *[7] * length], [*prompt, *[9] * length]], [0, 0])
    return tree_layout(tree, torch.from_numpy(tree.depths), torch.from_numpy(tree.ends))


def random_inputs(num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of 8 heads and 2 key-value heads."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, num_nodes, 16) for heads in (8, 2, 2))
    return query, key, value


def test_short_batches_do_not_use_flex_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = list[fx.GraphModule]()

    def record(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(module, "flex_attention", torch.compile(flex_attention, dynamic=True, backend=record))
    with torch.no_grad():
        module.flex_tree_attention(*random_inputs(45), layout_of(15), ScoreSettings(0.25, None, None))
    operation = torch.ops.higher_order.flex_attention
    options = [a for g in graphs for n in g.graph.nodes if n.target is operation for a in n.args]
    assert [a["BACKEND"] for a in options if isinstance(a, dict)] == ["TRITON"]
