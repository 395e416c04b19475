"""`manifest.json` of a published adapter: its settings, the hash of its weights, and its canary."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from pydantic import Base64Bytes, BaseModel, ConfigDict, ValidationError

from skylite.errors import ModelError
from skylite.run.files import sha256_file
from skylite.types import EncodedPrompt, ImageTokens
from skylite.untrusted_files import read_bytes

SEQUENCES_PER_VERSION = 2
"""Sequences in the canary of each trained version. Which ones: trainer/canary.py."""


class CanaryImage(BaseModel):
    """The picture with which every sequence of a canary begins."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    start: int
    """Its first token."""
    length: int
    data: Base64Bytes
    """The file."""

    @classmethod
    def of(cls, image: ImageTokens) -> CanaryImage:
        """The same with its file as text."""
        return cls(start=image.start, length=image.length, data=base64.b64encode(image.data))

    @property
    def tokens(self) -> ImageTokens:
        return ImageTokens(self.start, self.length, self.data)


class Canary(BaseModel):
    """Fixed token sequences with the trainer's logprobs at temperature 1. Token 0 of each is context only."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    sequences: list[list[int]]
    """[S][L] token ids."""
    policy_logprobs: list[list[float]]
    """[S][L - 1] with the adapter."""
    base_logprobs: list[list[float]]
    """[S][L - 1] without the adapter."""
    effects: dict[str, list[list[float]]] = {}
    """Kind of module (q_proj) -> [S][L - 1] what its LoRA does to the logprobs, in some versions."""
    image: CanaryImage | None = None
    """None: the adapter changes nothing that reads images."""

    def prompt(self, sequence: Sequence[int]) -> EncodedPrompt:
        """A sequence as an engine reads it."""
        return EncodedPrompt(sequence, () if self.image is None else (self.image.tokens,))


class Manifest(BaseModel):
    """Written as the last file of an adapter folder, before the rename to its final name."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    version: int
    step: int
    """The step that produced it; equals `version`. 0 is the untrained policy."""
    parent: int | None
    """The version it was trained from; None for version 0."""
    weights_sha256: str
    """Hash of adapter_model.safetensors."""
    weights_bytes: int
    base_model: str
    base_fingerprint: str
    rank: int
    alpha: float
    dtype: str
    """dtype of the tensors in the file."""
    target_modules: list[str]
    target_parameters: list[str] = []
    """Expert weights, as lora.target_parameters names them."""
    canary: Canary


def read_manifest(folder: Path, verify_hash: bool = True) -> Manifest:
    """Read the manifest and check the weights against it. Raises ModelError if one is missing or damaged."""
    path, weights = folder / "manifest.json", folder / "adapter_model.safetensors"
    try:
        manifest = Manifest.model_validate_json(read_bytes(path))
        size = weights.stat().st_size
    except FileNotFoundError as error:
        raise ModelError(
            f"{folder} is not a published adapter: {error.filename} is missing.",
            "Give a policy-v... folder of a run.",
        ) from None
    except (OSError, ValidationError) as error:
        raise ModelError(
            f"{path} is not a valid adapter manifest: {error}.", "The folder is damaged; use another version."
        ) from None
    if size != manifest.weights_bytes:
        raise ModelError(
            f"{weights} has {size} bytes, but its manifest says {manifest.weights_bytes}.",
            "The folder is damaged; use another version.",
        )
    if verify_hash and (found := sha256_file(weights)) != manifest.weights_sha256:
        raise ModelError(
            f"{weights} has sha256 {found}, but its manifest says {manifest.weights_sha256}.",
            "The weights were changed; use another version.",
        )
    return manifest
