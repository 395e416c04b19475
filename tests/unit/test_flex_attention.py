"""FlexAttention as torch compiles it. On a CPU it compiles forward passes only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn.attention.flex_attention import flex_attention

from skylite.model import flex_attention as module
from skylite.model.prefix_tree import build_tree
from skylite.model.tree_attention import ScoreSettings, TreeLayout, tree_attention, tree_layout
from tests.fake_gpu.compiler import has_compiler


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


@pytest.mark.skipif(not has_compiler(), reason="Inductor needs a C++ compiler")
def test_a_softcap_compiles_with_dynamic_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "flex_attention", module._compiled())
    settings = ScoreSettings(0.25, None, 5.0)
    for length in (40, 50):
        inputs, layout = random_inputs(3 * length), layout_of(length)
        with torch.no_grad():
            out = module.flex_tree_attention(*inputs, layout, settings)
            expected = tree_attention(*inputs, layout, settings)
        assert torch.allclose(out, expected, atol=1e-5)
    assert not torch._dynamo.config.specialize_float, "it stays as it was for others"
