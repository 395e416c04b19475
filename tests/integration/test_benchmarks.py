"""The benchmark scripts that need no server run, at a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist
ROOT = Path(__file__).parents[2]


def test_the_gpu_check_measures_a_tiny_shape_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, "benchmarks/gpu_check.py", "--shapes", "tiny", "--skip-loop", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["loop"] == "not run: --skip-loop"
    none, selective = found["train_phase"]["tiny"]
    assert (none["checkpointing"], selective["checkpointing"]) == ("none", "selective")
    # 2 groups of a prompt of 8 and 2 completions of 8, whose last tokens are never an input.
    assert none["tokens_total"] == 64
    assert none["tokens_computed"] == 2 * (8 + 2 * 7)
    assert none["seconds"] > 0
    assert none["adapter_mb"] > 0
