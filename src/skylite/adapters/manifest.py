"""`manifest.json` of a published adapter: what the folder holds, by hash, and what its policy must answer (the canary)."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from skylite.errors import ModelError
from skylite.run.files import sha256_file


class Canary(BaseModel):
    """Fixed token sequences as the trainer scores them, at temperature 1. Token 0 of each is context only."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    sequences: list[list[int]]
    """[S][L]"""
    policy_logprobs: list[list[float]]
    """[S][L - 1] with this adapter."""
    base_logprobs: list[list[float]]
    """[S][L - 1] with the adapter off."""


class Manifest(BaseModel):
    """Written last into an adapter folder, before the rename that makes the folder visible."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    version: int
    step: int
    """The step whose update made it; equals `version`, 0 is the untrained policy."""
    parent: int | None
    """The version it was trained from; None for version 0."""
    weights_sha256: str
    """Of adapter_model.safetensors."""
    weights_bytes: int
    base_model: str
    base_fingerprint: str
    rank: int
    alpha: float
    dtype: str
    """Of the tensors in the file."""
    target_modules: list[str]
    canary: Canary


def read_manifest(folder: Path, verify_hash: bool = True) -> Manifest:
    """The manifest of an adapter folder. Raises ModelError when it is missing or damaged, or the weights are not the ones it names."""
    path, weights = folder / "manifest.json", folder / "adapter_model.safetensors"
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
        size = weights.stat().st_size
    except FileNotFoundError as error:
        raise ModelError(
            f"{folder} is not a published adapter: {error.filename} is missing.",
            "Give a policy-v... folder of a run.",
        ) from None
    except (OSError, ValidationError) as error:
        raise ModelError(
            f"{path} is not an adapter manifest: {error}.", "The folder is damaged; use another version."
        ) from None
    if size != manifest.weights_bytes:
        raise ModelError(
            f"{weights} has {size} bytes, its manifest says {manifest.weights_bytes}.",
            "The folder is damaged; use another version.",
        )
    if verify_hash and (found := sha256_file(weights)) != manifest.weights_sha256:
        raise ModelError(
            f"{weights} has sha256 {found}, its manifest says {manifest.weights_sha256}.",
            "The weights were changed; use another version.",
        )
    return manifest
