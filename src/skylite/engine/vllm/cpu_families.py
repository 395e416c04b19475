"""What a sweep of model families in vLLM on a CPU found: which it serves with the trainer's logprobs.

cpu_families.json is written by `make serving-sweep` (tests/serving_sweep.py), which serves a tiny random
model of each mixture of experts, and of some other families, in the pinned vLLM with skylite's plugin.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from skylite.processes.hardware import Dtype
from skylite.untrusted_files import read_text
from skylite.untrusted_text import parse_json

TABLE = Path(__file__).with_name("cpu_families.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuFamily:
    """The models of one architecture."""

    name: str
    """The model_type."""
    architecture: str
    """transformers' class."""
    refused: str = ""
    """Why vLLM does not serve it on a CPU, in words that complete `vLLM ...`; empty if it does."""
    experts: str | None = None
    """Why its experts get no LoRA, in words as above; empty if they do, None without experts."""
    dtype: Dtype = "float32"
    """What the engine computed in."""
    base: float = 0.0
    """Largest difference between engine and trainer without an adapter, in nats."""
    lora: float = 0.0
    """The same with an adapter on one kind of module, of all kinds the largest."""
    share: float = 0.0
    """Largest |1 - share|: how much of the move of each adapter the engine shows."""


@functools.cache
def read_cpu_families() -> Mapping[str, CpuFamily]:
    """The table, by architecture."""
    entries = parse_json(read_text(TABLE))["families"]
    return {entry["architecture"]: CpuFamily(**entry) for entry in entries}
