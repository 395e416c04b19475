"""Ways to damage the tensors of a PEFT adapter, by name: what a faulty engine might make of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensors = dict[str, torch.Tensor]
"""By PEFT's names."""


def scaled(tensors: Tensors, factor: float, part: str = "") -> Tensors:
    """B times `factor` in all modules whose names contain `part`."""
    return {n: t * factor if "lora_B" in n and part in n else t.clone() for n, t in tensors.items()}


def layer_of(name: str) -> int:
    return int(name.split("layers.")[1].split(".")[0])


def swapped(tensors: Tensors) -> Tensors:
    """Each pair of neighbouring layers exchanges its matrices."""
    last = max(map(layer_of, tensors))
    found = {}
    for name in tensors:
        layer = layer_of(name)
        other = min(layer ^ 1, last)
        found[name] = tensors[name.replace(f"layers.{layer}.", f"layers.{other}.")].clone()
    return found


def rotated(tensors: Tensors) -> Tensors:
    """The query heads exchange their updates in turn, by as many heads as there are key heads."""
    rows = next(len(t) for n, t in tensors.items() if "k_proj.lora_B" in n)
    return {n: t.roll(rows, 0) if "q_proj.lora_B" in n else t.clone() for n, t in tensors.items()}


def every_second_layer(tensors: Tensors) -> Tensors:
    """The update of every second layer is missing."""
    return {n: torch.zeros_like(t) if "lora_B" in n and layer_of(n) % 2 else t for n, t in tensors.items()}


def one_layer_missing(tensors: Tensors) -> Tensors:
    """The update of the layer in the middle is missing."""
    layer = max(map(layer_of, tensors)) // 2
    return scaled(tensors, 0.0, f"layers.{layer}.")


def permuted(tensors: Tensors) -> Tensors:
    """The rows of A are shifted by one against the columns of B."""
    return {n: t.roll(1, 0) if "lora_A" in n else t.clone() for n, t in tensors.items()}


def foreign(tensors: Tensors) -> Tensors:
    """Random matrices with the same norms."""
    random = torch.Generator().manual_seed(0)
    found = {n: torch.randn(t.shape, generator=random) for n, t in tensors.items()}
    return {n: (r * (tensors[n].float().norm() / r.norm())).to(tensors[n].dtype) for n, r in found.items()}


DAMAGE: dict[str, Callable[[Tensors], Tensors]] = {
    "zero-b": lambda t: scaled(t, 0.0),
    "half": lambda t: scaled(t, 0.5),
    "one-and-a-half": lambda t: scaled(t, 1.5),
    "twice": lambda t: scaled(t, 2.0),
    "swapped-layers": swapped,
    "rotated-heads": rotated,
    "every-second-layer": every_second_layer,
    "one-layer-missing": one_layer_missing,
    "without-mlp": lambda t: scaled(t, 0.0, ".mlp."),
    "without-k": lambda t: scaled(t, 0.0, "k_proj"),
    "negated-k": lambda t: scaled(t, -1.0, "k_proj"),
    "permuted-rank": permuted,
    "foreign": foreign,
}
"""The version before, served again, is the caller's to try: it needs another adapter."""
