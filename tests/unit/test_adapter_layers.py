"""Norm and effective rank of adapters by layer, against hand-made matrices and numpy's SVD."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from skylite.errors import ModelError
from skylite.report.page_data import effective_rank, layer_updates, singular_values

NAME = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"


def write_adapter(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"lora_alpha": 4.0, **config}))
    return folder


def test_singular_values_are_those_of_the_product() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(4, 30)), rng.normal(size=(20, 4))
    assert singular_values(a, b) == pytest.approx(np.linalg.svd(b @ a, compute_uv=False)[:4], rel=1e-10)


def test_effective_rank_by_hand() -> None:
    assert effective_rank(np.array([3.0, 3.0, 3.0, 0.0])) == pytest.approx(3.0)
    assert effective_rank(np.array([5.0, 0.0])) == pytest.approx(1.0)
    # p = 3/4, 1/4: exp(-(0.75 ln 0.75 + 0.25 ln 0.25)) = 4 / 27 ** (1 / 4)... = 1.7548
    assert effective_rank(np.array([3.0, 1.0])) == pytest.approx(4 / 3**0.75)
    assert math.isnan(effective_rank(np.zeros(3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_update_has_the_scale_and_norm_of_its_module(tmp_path: Path, dtype: torch.dtype) -> None:
    # B A = diag(3, 4, 0), alpha / r = 4 / 2: norm 2 * 5, and the ranks of layers 10 and 2 sort as numbers.
    a = torch.tensor([[1.0, 0, 0], [0, 1, 0]], dtype=dtype)
    b = torch.tensor([[3.0, 0], [0, 4], [0, 0]], dtype=dtype)
    tensors = {NAME.format(n, part): t.clone() for n in (10, 2) for part, t in (("A", a), ("B", b))}
    tensors["base_model.model.lm_head.lora_A.weight"] = a.clone()
    tensors["base_model.model.lm_head.lora_B.weight"] = torch.zeros_like(b)
    found = layer_updates(write_adapter(tmp_path / "a", tensors))
    assert [(u.layer, u.module) for u in found] == [(-1, "lm_head"), (2, "q_proj"), (10, "q_proj")]
    assert found[1].norm == pytest.approx(10.0)
    assert found[1].effective_rank == pytest.approx(effective_rank(np.array([4.0, 3.0])))
    assert found[0].norm == 0
    stabilised = layer_updates(write_adapter(tmp_path / "b", tensors, use_rslora=True))
    assert stabilised[1].norm == pytest.approx(5 * 4 / math.sqrt(2))


def test_a_damaged_adapter_is_an_error_in_words(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", {"x": torch.zeros(2)})
    assert layer_updates(folder) == []
    for name, content in (("adapter_config.json", "[]"), ("adapter_model.safetensors", "x" * 20)):
        (folder / name).write_text(content)
        with pytest.raises(ModelError, match=name):
            layer_updates(folder)
