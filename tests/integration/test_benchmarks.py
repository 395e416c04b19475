"""The benchmark scripts that need no server run, at a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist
ROOT = Path(__file__).parents[2]


def test_the_gpu_check_measures_a_tiny_shape_without_a_gpu_and_continues_after_a_failure(
    tmp_path: Path,
) -> None:
    out = tmp_path / "gpu.json"
    command = [
        sys.executable,
        "benchmarks/gpu_check.py",
        "--shapes",
        "tiny",
        "--checkpointing",
        "wrong",
        "none",
    ]
    done = subprocess.run(
        [*command, "--skip-loop", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["loop"] == found["sync"] == "not run: --skip-loop"
    assert found["commit"]
    assert found["versions"]["torch"]
    wrong, none, offloaded = found["train_phase"]["tiny"]
    assert wrong["checkpointing"] == "wrong"
    assert wrong["failed"].startswith("error: argument --checkpointing: invalid choice")
    assert [(row["checkpointing"], row["offload"]) for row in (none, offloaded)] == [
        ("none", False),
        ("selective", True),
    ]
    for row in (none, offloaded):
        # 2 groups of a prompt of 8 and 2 completions of 8, whose last tokens are never an input.
        assert row["tokens_total"] == 64
        assert row["tokens_computed"] == 2 * (8 + 2 * 7)
        assert row["seconds"] > 0
        assert row["adapter_mb"] > 0
