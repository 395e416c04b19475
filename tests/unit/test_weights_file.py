"""An adapter's weights as safetensors reads them, and their hash."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from skylite.run.files import sha256_file
from skylite.trainer import weights_file
from skylite.trainer.weights_file import weights_sha256, write_weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_holds_the_tensors_and_has_the_hash(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        f"layer.{i}.lora_{ab}.weight": torch.randn(3 + i, 5, dtype=dtype) for i in range(4) for ab in "BA"
    }
    digest, size = write_weights(tmp_path / "w.safetensors", tensors)
    loaded = load_file(tmp_path / "w.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(
        torch.equal(loaded[name], tensor) and loaded[name].dtype == dtype for name, tensor in tensors.items()
    )
    assert (
        (tmp_path / "w.safetensors").stat().st_size == size == len(save(tensors, metadata={"format": "pt"}))
    )
    assert digest == sha256_file(tmp_path / "w.safetensors") == weights_sha256(tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neighbours_in_memory_are_one_part_of_the_same_file(tmp_path: Path, dtype: torch.dtype) -> None:
    flat = torch.randn(40).to(dtype)
    neighbours = dict(zip("abc", (flat[3:9].view(2, 3), flat[9:10], flat[10:22].view(4, 3)), strict=True))
    others = {
        "d": flat[23:30],
        "e": flat[0:3],
        "f": torch.randn(5).to(dtype),
    }  # a gap, a step back, memory of its own
    tensors = neighbours | others
    assert [len(part) // flat.element_size() for part in weights_file._parts(tensors)[1:]] == [19, 7, 3, 5]
    digest, _ = write_weights(tmp_path / "w.safetensors", tensors)
    loaded = load_file(tmp_path / "w.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert (
        digest
        == sha256_file(tmp_path / "w.safetensors")
        == weights_sha256({n: t.clone() for n, t in tensors.items()})
    )


def test_one_changed_number_changes_the_hash() -> None:
    tensors = {"a": torch.zeros(4), "b": torch.zeros(2)}
    before = weights_sha256(tensors)
    tensors["b"][1] = 1e-8
    assert weights_sha256(tensors) != before
