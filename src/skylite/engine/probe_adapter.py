"""A throwaway adapter that shows whether a server can load those of a run, before there are any."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from skylite.adapters.manifest import Canary, Manifest
from skylite.adapters.target_modules import in_layers, predict_modules
from skylite.config.lora import LoraConfig
from skylite.errors import convert_os_errors
from skylite.hub.text_model import model_shapes
from skylite.processes.file_tree import remove_tree
from skylite.run.files import sha256_file, temporary_sibling
from skylite.run.run_dir import AdapterVersion


@contextmanager
def probe_adapter(adapters: Path, model_path: Path, lora: LoraConfig) -> Iterator[AdapterVersion]:
    """An adapter of the run's highest rank that changes nothing (B = 0), on one of its modules.

    It lies in the folder `adapters`, or where that does not exist yet in the closest folder above it, as
    private as that will be. It is removed at the end, and its name was never used. Raises WriteFailed, or
    ModelError for a damaged model.
    """
    shared = next(folder for folder in (adapters, *adapters.parents) if folder.is_dir())
    folder = temporary_sibling(shared / "probe")
    module, outputs, inputs = _a_module(model_path, lora)
    rank, name = lora.max_rank, f"base_model.model.{module}"
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model_path),
        "r": rank,
        "lora_alpha": lora.alpha,
        "target_modules": [module.rpartition(".")[2]],
    }
    with convert_os_errors(folder):
        folder.mkdir(mode=0o777 if shared == adapters else 0o700)
    try:
        probe = AdapterVersion(0, folder, owner=folder.name.lstrip("."))
        with convert_os_errors(folder):
            matrices = {"A": np.zeros((rank, inputs), np.float32), "B": np.zeros((outputs, rank), np.float32)}
            save_file({f"{name}.lora_{k}.weight": m for k, m in matrices.items()}, probe.weights_path)
            (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
            probe.manifest_path.write_text(_manifest(probe, config).model_dump_json(), encoding="utf-8")
        yield probe
    finally:
        remove_tree(folder)


def _manifest(probe: AdapterVersion, config: dict[str, Any]) -> Manifest:
    return Manifest(
        version=0,
        step=0,
        parent=None,
        weights_sha256=sha256_file(probe.weights_path),
        weights_bytes=probe.weights_path.stat().st_size,
        base_model=config["base_model_name_or_path"],
        base_fingerprint="",
        rank=config["r"],
        alpha=config["lora_alpha"],
        dtype="float32",
        target_modules=config["target_modules"],
        canary=Canary(sequences=[], policy_logprobs=[], base_logprobs=[]),
    )


def _a_module(model_path: Path, lora: LoraConfig) -> tuple[str, int, int]:
    """Path, outputs and inputs of a linear module in a layer: one that gets LoRA, if there is one."""
    shapes = model_shapes(model_path)
    matrices = {
        name.removesuffix(".weight"): shape
        for name, shape in sorted(shapes.items())
        if name.endswith(".weight") and len(shape) == 2 and in_layers(name)
    }
    chosen = predict_modules(model_path, lora)[1]
    module = next((m for m in matrices if m in chosen), next(iter(matrices)))
    outputs, inputs = matrices[module]
    return module, outputs, inputs
