"""FlexAttention as torch traces it, on a CPU: its numbers and gradients, and how often torch would compile.

Inductor has no backward for a CPU; here a backend runs the traced graph as it is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn.attention import flex_attention as torchs

from skylite.errors import ModelError
from skylite.model import flex_attention as module
from skylite.model.attention_backends import IMPLEMENTATIONS
from skylite.model.fast_path_check import enable_shortcuts
from skylite.model.float32_arithmetic import Float32Arithmetic
from skylite.model.policy import load_policy
from skylite.model.prefix_tree import build_tree
from skylite.model.process_group import Dist
from skylite.model.tree_attention import ScoreSettings, TreeLayout, tree_attention, tree_layout
from tests.cases import PROBE
from tests.decisions import resolved
from tests.model_masks import chunk_mask, window_mask
from tests.small_run import settings

SIZE = 16
KINDS = ["plain", "window", "chunk", "softcap and window", "sinks and window", "narrow values"]


def score_settings(kind: str) -> ScoreSettings:
    """A layer's settings. Each pass makes a new mask."""
    mask = None
    if "window" in kind:
        mask = window_mask(9)
    elif kind == "chunk":
        mask = chunk_mask(9)
    sinks = torch.linspace(-1, 2, 4, requires_grad=True) if "sinks" in kind else None
    return ScoreSettings(SIZE**-0.5, mask, 5.0 if "softcap" in kind else None, sinks)


def layout_of(rng: random.Random, longest: int) -> TreeLayout:
    """One to three groups of three completions."""
    sequences, groups = list[list[int]](), list[int]()
    for group in range(rng.randrange(1, 4)):
        prompt = [rng.randrange(99) for _ in range(rng.randrange(1, 20))]
        for _ in range(3):
            sequences.append(prompt + [rng.randrange(99) for _ in range(rng.randrange(1, longest))])
            groups.append(group)
    tree = build_tree(sequences, groups)
    return tree_layout(tree, torch.from_numpy(tree.depths), torch.from_numpy(tree.ends))


def random_inputs(
    layout: TreeLayout, kind: str, dtype: torch.dtype, grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of four heads and two key-value heads, laid out as a model's projections."""
    value = 8 if kind == "narrow values" else SIZE
    query, key, values = (
        torch.randn(1, len(layout.depths), n, size, dtype=dtype).transpose(1, 2).requires_grad_(grad)
        for n, size in ((4, SIZE), (2, SIZE), (2, value))
    )
    return query, key, values


def use_traced(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """Compile FlexAttention as on a GPU, and run its graphs as they are. Returns the list of graphs."""
    seen, compile_function = list[fx.GraphModule](), torch.compile

    def record(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        seen.append(graph)
        return graph.forward

    def compile_here(function: Any, **kwargs: Any) -> Any:
        return compile_function(function, **kwargs, backend=record)

    module._compiled.cache_clear()
    torch._dynamo.reset()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", compile_here)
        patch.setattr(module, "flex_attention", torchs.flex_attention)
        compiled = module._compiled()
    monkeypatch.setattr(module, "flex_attention", compiled)
    monkeypatch.setattr(torchs, "_validate_device", lambda *_: None)  # it refuses gradients on a CPU
    return seen


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[fx.GraphModule]]:
    """What torch compiles."""
    yield use_traced(monkeypatch)
    module._compiled.cache_clear()
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients_equal_those_of_pieces(kind: str, graphs: list[fx.GraphModule]) -> None:
    torch.manual_seed(0)
    layout = layout_of(random.Random(3), 80)
    inputs, settings_ = random_inputs(layout, kind, torch.float32, grad=True), score_settings(kind)
    leaves = [*inputs, *([] if settings_.sinks is None else [settings_.sinks])]
    weights = torch.randn(1, len(layout.depths), 4, inputs[2].shape[-1])

    def with_gradients(attention: Any) -> list[Tensor]:
        out = attention(*inputs, layout, settings_)
        return [out, *torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)]

    ours, pieces = with_gradients(module.flex_tree_attention), with_gradients(tree_attention)
    assert len(graphs) == 1
    for mine, theirs in zip(ours[:4], pieces[:4], strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=1e-5)
    assert ours[0].is_contiguous(), "no copy follows"


@pytest.mark.parametrize("kind", ["plain", "softcap and window", "sinks and window"])
def test_torch_compiles_one_graph_for_each_way_of_a_pass(kind: str, graphs: list[fx.GraphModule]) -> None:
    """The probe and the canary in float32, training, and a pass without gradients: of any length.

    Twice as many for a layer with a mask: where it hides nothing, the layer does without it.
    """
    rng = random.Random(0)
    for number in range(30):
        layout = layout_of(rng, rng.choice([4, 30, 100]))
        canary, training = [(torch.float32, False)], [(torch.bfloat16, True), (torch.bfloat16, False)]
        for dtype, grad in canary if number < 5 else training:
            inputs = random_inputs(layout, kind, dtype, grad)
            with ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(grad))
                if dtype == torch.float32:
                    stack.enter_context(Float32Arithmetic())
                else:
                    stack.enter_context(torch.autocast("cpu", torch.bfloat16))
                module.flex_tree_attention(*inputs, layout.for_one_pass(), score_settings(kind))
    has_mask = score_settings(kind).mask is not None
    assert len(graphs) == (6 if has_mask else 3)


def test_a_softcap_is_a_constant_of_the_graph(graphs: list[fx.GraphModule]) -> None:
    """Dynamic shapes would make a symbol of it, which Inductor cannot lower."""
    layout = layout_of(random.Random(0), 30)
    inputs = random_inputs(layout, "softcap", torch.float32, grad=False)
    module.flex_tree_attention(*inputs, layout, score_settings("softcap"))
    changes: Any = graphs[0].score_mod_0
    captured = [n for n in changes.graph.nodes if n.op == "placeholder"][5:]  # after score and four indices
    assert not captured
    assert not torch._dynamo.config.specialize_float, "it stays as it was for others"


def test_more_graphs_than_allowed_are_an_error(
    graphs: list[fx.GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it torch would compute all pairs of nodes from then on."""
    monkeypatch.setattr(module, "MOST_GRAPHS", 1)
    allowed, layout = use_traced(monkeypatch), layout_of(random.Random(0), 30)

    def run(dtype: torch.dtype) -> None:
        inputs = random_inputs(layout, "plain", dtype, grad=False)
        module.flex_tree_attention(*inputs, layout, score_settings("plain"))

    run(torch.float32)
    with pytest.raises(ModelError, match="could not compile FlexAttention"):
        run(torch.bfloat16)
    assert len(allowed) == 1


@pytest.mark.parametrize("error", [RuntimeError("no room"), ModelError("no room", "Use less.")])
def test_a_model_that_flex_refuses_uses_sdpa_over_the_tree_and_says_why(
    error: Exception, tiny_llama: Path, dist: Dist, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(module, "block_mask", refuse)
    config = settings(trainer={"attention": "flex"})
    policy = load_policy(resolved(tiny_llama, tiny_llama), config, dist)
    policy, choices = enable_shortcuts(policy, PROBE)
    assert (policy.packing, policy.attention) == ("tree", "sdpa")
    assert policy.model.get_base_model().config._attn_implementation == IMPLEMENTATIONS["sdpa"]
    assert choices[-2].startswith("tree attention: not flex; the model does not support it: no room")
    assert choices[-1].startswith("packing: tree; ")
    assert choices[-1].endswith("tree attention: sdpa")
