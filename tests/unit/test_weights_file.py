"""An adapter's weights as safetensors reads them, and their hash."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from skylite.run.files import sha256_file
from skylite.training.weights_file import weights_sha256, write_weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_holds_the_tensors_and_has_the_hash(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {f"layer.{i}.lora_{ab}.weight": torch.randn(3 + i, 5, dtype=dtype) for i in range(4) for ab in "BA"}
    digest, size = write_weights(tmp_path / "w.safetensors", tensors)
    loaded = load_file(tmp_path / "w.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) and loaded[name].dtype == dtype for name, tensor in tensors.items())
    assert (tmp_path / "w.safetensors").stat().st_size == size == len(save(tensors, metadata={"format": "pt"}))
    assert digest == sha256_file(tmp_path / "w.safetensors") == weights_sha256(tensors)


def test_one_changed_number_changes_the_hash() -> None:
    tensors = {"a": torch.zeros(4), "b": torch.zeros(2)}
    before = weights_sha256(tensors)
    tensors["b"][1] = 1e-8
    assert weights_sha256(tensors) != before
