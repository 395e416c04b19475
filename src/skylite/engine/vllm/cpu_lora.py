"""How vLLM computes LoRA on a CPU: the choice behind `engine.cpu_lora=auto`, and what to tell the user."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from skylite.config.engine import CpuLora
from skylite.engine.vllm.server_command import ENGINE_COMMAND
from skylite.notes import Note, notes_of, warning
from skylite.processes.child_env import INTEL_OPENMP, has_library
from skylite.processes.hardware import total_memory

MERGED_MEMORY = 3.0
"""Bytes that merged weights need per byte of a bfloat16 model's files.

They are a copy of the original weights and a float32 copy with the adapter added.
"""
MERGED_MEMORY_SHARE = 0.25
"""Largest share of the machine's memory for merged weights."""


def choose_cpu_lora(
    setting: CpuLora | Literal["auto"], dtype: str, model_path: Path, *, deterministic: bool = False
) -> CpuLora:
    """Resolve `auto`: merged weights if they are exact (float32) and fit MERGED_MEMORY_SHARE, else dense.

    `deterministic` excludes merged weights: which batches use them depends on timing
    (engine/vllm/plugin/merged_weights.py).
    """
    if setting != "auto":
        return setting
    if deterministic:
        return "dense"
    files = sum(file.stat().st_size for file in model_path.glob("*.safetensors"))
    return (
        "merged"
        if dtype == "float32" and files * MERGED_MEMORY <= total_memory() * MERGED_MEMORY_SHARE
        else "dense"
    )


def engine_notes(
    device: str,
    dtype: str,
    setting: CpuLora | Literal["auto"],
    chosen: CpuLora,
    *,
    deterministic: bool = False,
) -> list[Note]:
    """Notes on what makes sampling slower than it could be, and about a replaced engine."""
    notes: list[Note | str] = []
    if command := os.environ.get(ENGINE_COMMAND):
        notes.append(
            warning(f"{ENGINE_COMMAND} is set, so {command} samples instead of vLLM; this is for tests only")
        )
    if device != "cpu":
        return notes_of(*notes)
    if not has_library(INTEL_OPENMP):
        notes.append(
            f"{INTEL_OPENMP} was not found, so vLLM starts without it and may sample slower; "
            "install it with `pip install intel-openmp`."
        )
    if chosen == "dense" and setting == "auto":
        why = (
            "in bfloat16 they would round the adapter away"
            if dtype == "bfloat16"
            else "they would need over a quarter of the memory"
        )
        if deterministic:
            why = "which batches use them depends on timing (trainer.deterministic=true)"
        notes.append(
            "vLLM computes LoRA next to the base (engine.cpu_lora=dense). "
            f"Merged weights would sample faster, but {why}."
        )
    if chosen == "merged" and dtype == "bfloat16":
        notes.append(
            "engine.cpu_lora=merged requires float32; the engine computes in bfloat16, so it uses dense."
        )
    if chosen == "stock":
        notes.append(
            "engine.cpu_lora=stock: LoRA sampling is several times slower, "
            "and base requests in a mixed batch are wrong."
        )
    return notes_of(*notes)
