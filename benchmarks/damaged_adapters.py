"""Ways to damage the tensors of a PEFT adapter, by name. canary_bf16.py serves the results."""

from __future__ import annotations

import torch


def scaled(tensors: dict[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
    return {n: t * factor if "lora_B" in n else t.clone() for n, t in tensors.items()}


def layer_of(name: str) -> int:
    return int(name.split("layers.")[1].split(".")[0])


def swapped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each pair of neighbouring layers exchanges its matrices."""
    last = max(map(layer_of, tensors))
    found = {}
    for name in tensors:
        layer = layer_of(name)
        other = min(layer ^ 1, last)
        found[name] = tensors[name.replace(f"layers.{layer}.", f"layers.{other}.")].clone()
    return found


def halved(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every second layer's update is missing."""
    return {n: torch.zeros_like(t) if "lora_B" in n and layer_of(n) % 2 else t for n, t in tensors.items()}


def permuted(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rows of A are shifted by one against the columns of B."""
    return {n: t.roll(1, 0) if "lora_A" in n else t.clone() for n, t in tensors.items()}


def without_mlp(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        n: torch.zeros_like(t) if "lora_B" in n and ".mlp." in n else t.clone() for n, t in tensors.items()
    }


def foreign(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Random matrices with the same norms."""
    torch.manual_seed(0)
    return {n: (r := torch.randn_like(t)) * (t.norm() / r.norm()) for n, t in tensors.items()}


DAMAGE = {
    "twice": lambda t: scaled(t, 2.0),
    "half": lambda t: scaled(t, 0.5),
    "swapped-layers": swapped,
    "every-second-layer": halved,
    "permuted-rank": permuted,
    "without-mlp": without_mlp,
    "foreign": foreign,
}
