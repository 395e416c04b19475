"""An adapter's file as vLLM's processes read it: the tensors of safetensors, and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from skylite.trainer.weights_file import write_weights
from skylite.vllm_plugin.adapter_file import AdapterFile, mapped, open_adapter


def read(path: Path) -> dict[str, torch.Tensor]:
    with open_adapter(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- as vLLM reads it


def test_the_tensors_of_a_published_file_outlive_it(tmp_path: Path) -> None:
    tensors = {f"layer.{i}.lora_{ab}.weight": torch.randn(3 + i, 5) for i in range(4) for ab in "BA"} | {
        "z": torch.randn(7, 1)
    }
    path = tmp_path / "adapter_model.safetensors"
    write_weights(path, tensors)
    with open_adapter(path, framework="pt") as file:
        assert isinstance(file, AdapterFile)
    found = read(path)
    path.unlink()
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
        for name, tensor in tensors.items()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_file_by_safetensors_itself(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "b": torch.randn(2, 3).to(dtype),
        "a": torch.randn(5).to(dtype),
        "none": torch.empty(0, 4, dtype=dtype),
    }
    path = tmp_path / "w.safetensors"
    save_file(tensors, path)
    found, expected = read(path), load_file(path)
    assert mapped(path) is not None
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_what_a_reader_writes_into_a_tensor_stays_out_of_the_file(tmp_path: Path) -> None:
    # vLLM multiplies lora_b by the adapter's scale in place.
    path = tmp_path / "w.safetensors"
    write_weights(path, {"a": torch.ones(4), "b": torch.ones(2)})
    found = read(path)
    found["a"].mul_(3)
    assert found["b"].tolist() == [1, 1]
    assert read(path)["a"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "tensors",
    [{"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.bfloat16)}, {"a": torch.arange(3)}, {}],
    ids=["two float types", "whole numbers", "no tensor"],
)
def test_other_forms_are_read_by_safetensors(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "w.safetensors"
    save_file(tensors, path)
    assert mapped(path) is None
    found = read(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def whole_file(path: Path) -> bytes:
    write_weights(path, {"a": torch.zeros(6), "b": torch.zeros(2, 2)})
    return path.read_bytes()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-4],
        lambda data: data + b"\0\0\0\0",
        lambda data: data[:5],
        lambda data: data[:40],
        lambda data: (10**15).to_bytes(8, "little") + data[8:],
        lambda data: data.replace(b'"shape":[6]', b'"shape":[7]'),
        lambda data: data.replace(b"[24,40]", b"[20,40]"),
        lambda data: data.replace(b"{", b"?", 1),
    ],
    ids=[
        "end missing",
        "too long",
        "no header",
        "half a header",
        "header past the end",
        "a shape too large",
        "tensors overlap",
        "no JSON",
    ],
)
def test_a_damaged_file_is_refused_in_safetensors_words(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(damage(whole_file(path)))  # type: ignore[operator]
    with pytest.raises(safetensors.SafetensorError):
        read(path)
