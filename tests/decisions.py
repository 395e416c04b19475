"""What a run in a test decided on its machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skylite.config.resolved import ModelFiles, Placement, Resolved, RunIdentity


def resolved(model: Path, adapters: Path, /, **parts: dict[str, Any]) -> Resolved:
    """In float32 on a CPU, with what `parts` name changed."""
    plain = Resolved(
        model=ModelFiles(path=model, fingerprint="f"),
        placement=Placement(device="cpu", dtype="float32"),
        identity=RunIdentity(lora_sync_path=adapters),
    )
    return changed(plain, **parts)


def changed(old: Resolved, **parts: dict[str, Any]) -> Resolved:
    """`old` with other values, such as `memory={"trainer_bytes": 1}`."""
    tree = old.model_dump()
    return Resolved.model_validate(tree | {name: tree[name] | values for name, values in parts.items()})
