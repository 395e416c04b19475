"""A vLLM plug-in that damages the adapters that vLLM loads, as a faulty engine might.

The file TAMPERED_ENGINE names the kind (a key of DAMAGE) for the next load; empty: the adapter
stays right. `version-before` serves the adapter that was loaded last. `install` writes what makes vLLM find
it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MARKER = "TAMPERED_ENGINE"
ROOT = Path(__file__).parents[2]
BEFORE = "version-before"


def install(folder: Path) -> dict[str, str]:
    """Write the plug-in's entry point into `folder`. Returns the environment of a server that loads it."""
    metadata = folder / "tampered_engine-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tampered-engine\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ntampered_engine = tests.fakes.tampered_engine:register\n"
    )
    marker = folder / "kind"
    marker.touch()
    paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {MARKER: str(marker), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def register() -> None:
    """Damage what LoRAModel is made from. vLLM may call this several times in a process."""
    if MARKER not in os.environ:
        return
    from vllm.lora.lora_model import LoRAModel

    if getattr(LoRAModel, "is_tampered", False):
        return
    make = LoRAModel.from_lora_tensors.__func__
    last: dict[str, Any] = {}

    def tampered(cls: Any, lora_model_id: int, tensors: dict[str, Any], *args: Any, **more: Any) -> Any:
        nonlocal last
        kind, right = Path(os.environ[MARKER]).read_text().strip(), dict(tensors)
        given = last if kind == BEFORE else DAMAGE[kind](right) if kind else right
        last = right
        return make(cls, lora_model_id, {n: t.clone() for n, t in given.items()}, *args, **more)

    LoRAModel.from_lora_tensors = classmethod(tampered)
    LoRAModel.is_tampered = True


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
