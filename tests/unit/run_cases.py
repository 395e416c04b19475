"""Models, adapters, data and new runs that several tests share."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from skylite.config.loading import read_run_config
from skylite.config.train import TrainConfig
from skylite.data.prompts import PromptFileInfo, write_rows
from skylite.rollout.plan import plan_run, write_run
from skylite.run.run_dir import RunDir
from tests.tiny_models import tiny_tokenizer
from tests.unit.data_cases import prompt

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


def make_model(folder: Path, seed: int = 0) -> Path:
    """The files of a model that the parent reads: one module, and a tokenizer. Nothing loads the model."""
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    )
    for name, content in _tokenizer_files().items():
        (folder / name).write_bytes(content)
    weight = np.random.default_rng(seed).random((6, 8), dtype=np.float32)
    save_file({f"{LAYER.removeprefix('base_model.model.')}.weight": weight}, folder / "model.safetensors")
    return folder


@functools.cache
def _tokenizer_files() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        tiny_tokenizer().save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def make_adapter(folder: Path, base: str, rank: int = 4, **changes: Any) -> Path:
    """A PEFT folder with one adapted module; `changes` go into adapter_config.json."""
    folder.mkdir()
    peft = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "bias": "none",
        "base_model_name_or_path": base,
    } | changes
    (folder / "adapter_config.json").write_text(json.dumps(peft))
    tensors = {
        f"{LAYER}.lora_A.weight": np.ones((rank, 8), np.float32),
        f"{LAYER}.lora_B.weight": np.ones((6, rank), np.float32),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def write_data(folder: Path, count: int) -> None:
    info = PromptFileInfo(
        dataset="t",
        source_kind="generated",
        source="t",
        source_sha256="0",
        count=count,
        seed=0,
        split="train",
        reward="math",
        system="",
        few_shot=[],
    )
    write_rows(folder / "train.parquet", [prompt(id=f"t/train/{i}") for i in range(count)], info)


def begin(root: Path, name: str = "run", **lora: Any) -> RunDir:
    """A run as `skylite train` starts it, with adapter 0 published."""
    if not (root / "model").exists():
        make_model(root / "model")
        write_data(root / "data", 4)
    tree = {
        "num_steps": 2,
        "model": {"name": str(root / "model")},
        "data": {"path": str(root / "data")},
        "lora": lora,
    }
    run = RunDir(root / name)
    write_run(plan_run(TrainConfig.model_validate(tree), run))
    publish_adapter_0(run.adapters(read_run_config(run.config_path)))
    return run


def publish_adapter_0(folder: Path) -> None:
    (folder / "policy-v000000").mkdir(parents=True)
    (folder / "policy-v000000" / "adapter_model.safetensors").write_bytes(b"precious")
