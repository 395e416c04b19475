"""A vLLM plug-in that damages the adapters that vLLM loads, as a faulty engine might.

The file TAMPERED_ENGINE names the kind (tests/damaged_adapters.py) for the next load; empty: the adapter
stays right. `version-before` serves the adapter that was loaded last. `install` writes what makes vLLM find
it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

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
        from tests.damaged_adapters import DAMAGE

        nonlocal last
        kind, right = Path(os.environ[MARKER]).read_text().strip(), dict(tensors)
        given = last if kind == BEFORE else DAMAGE[kind](right) if kind else right
        last = right
        return make(cls, lora_model_id, {n: t.clone() for n, t in given.items()}, *args, **more)

    LoRAModel.from_lora_tensors = classmethod(tampered)
    LoRAModel.is_tampered = True
