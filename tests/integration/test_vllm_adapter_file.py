"""vLLM's own reading of an adapter folder, by its tensors' views of one mapping: the matrices it had before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from skylite.trainer.weights_file import write_weights

pytestmark = pytest.mark.vllm

NAMES = ("q_proj", "down_proj")


@pytest.fixture
def lora_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module as it comes, put back after the test."""
    from vllm.lora import lora_model

    monkeypatch.setattr(lora_model, "safetensors", lora_model.safetensors)
    return lora_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {
        f"base_model.model.model.layers.{i}.x.{name}.lora_{ab}.weight": torch.randn(shape)
        for i in range(2)
        for name in NAMES
        for ab, shape in (("A", (4, 8)), ("B", (6, 4)))
    }
    write_weights(tmp_path / "adapter_model.safetensors", tensors)
    config = {"r": 4, "lora_alpha": 8, "target_modules": list(NAMES), "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


def loaded(lora_model: Any, folder: Path) -> dict[str, Any]:
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_local_dir(str(folder), None)
    model = lora_model.LoRAModel.from_local_checkpoint(
        str(folder), set(NAMES), helper, lora_model_id=1, device="cpu", dtype=torch.float32
    )
    found: dict[str, Any] = model.loras
    return found


def test_the_same_matrices_by_views_of_one_mapping(lora_model: Any, folder: Path) -> None:
    from skylite.vllm_plugin import adapter_file

    before = loaded(lora_model, folder)
    adapter_file.install()
    after = loaded(lora_model, folder)
    assert after.keys() == before.keys()
    assert len(after) == 2 * len(NAMES)
    for name, lora in after.items():
        assert torch.equal(lora.lora_a, before[name].lora_a)
        assert torch.equal(lora.lora_b, before[name].lora_b)
    assert len(
        {x.untyped_storage().data_ptr() for lora in before.values() for x in (lora.lora_a, lora.lora_b)}
    ) == 4 * len(NAMES)
    assert (
        len({x.untyped_storage().data_ptr() for lora in after.values() for x in (lora.lora_a, lora.lora_b)})
        == 1
    )
