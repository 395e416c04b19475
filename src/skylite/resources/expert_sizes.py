"""The experts of a layer, from the names and shapes of its tensors and config.json.

transformers computes the experts of a token in one grouped product (integrations/moe.py). Files hold their
matrices apart (`experts.5.gate_proj`, or w1), or those of a layer in one tensor (`experts.gate_up_proj`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skylite.adapters.target_modules import EXPERTS

PER_TOKEN = (
    *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts"),
    *("moe_topk", "moe_top_k", "moe_k"),
)
"""Names in config.json for the number of experts that compute a token."""
INDICES = 4
"""int64 numbers that a token keeps for each of its experts: orders of rows."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of one layer. All 0 in a layer without."""

    count: int = 0
    per_token: int = 0
    """Experts that compute a token: all if config.json does not tell."""
    inner: int = 0
    """Inner size of one."""

    def kept(self, hidden: int) -> int:
        """Elements per token that a forward pass keeps: of each expert gate, up, product, output, weight."""
        return self.per_token * (3 * self.inner + hidden + 1)

    def kept_float32(self) -> int:
        """The router's probabilities, and indices of 8 bytes."""
        return self.count + 2 * INDICES * self.per_token

    def work(self, hidden: int) -> int:
        """Elements per token that its backward pass holds besides: outputs, or gates and products."""
        return self.per_token * max(3 * hidden, 7 * self.inner - hidden)


def experts_of(layer: Mapping[str, Sequence[int]], config: Mapping[str, Any], hidden: int) -> Experts:
    """Of the layer's tensors. `config`: the text model's part of config.json."""
    found = {name: shape for name, shape in layer.items() if EXPERTS in f".{name}"}
    if not found:
        return Experts()
    fused = next((shape for name, shape in found.items() if "gate_up_proj" in name and len(shape) == 3), None)
    if fused is not None:  # [experts, 2 inner, hidden], or the last two exchanged
        count, inner = fused[0], math.prod(fused[1:]) // hidden // 2
    else:
        count = len({f".{name}".partition(EXPERTS)[2].partition(".")[0] for name in found})
        names = (".gate_proj.weight", ".w1.weight")
        inner = next((s[0] for name, s in found.items() if name.endswith(names) and len(s) == 2), 0)
    told = next((n for name in PER_TOKEN if isinstance(n := config.get(name), int) and n), count)
    return Experts(count, min(told, count), inner)


def outside_experts(layer: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """The layer's tensors but those of its routed experts."""
    return {name: shape for name, shape in layer.items() if EXPERTS not in f".{name}"}
