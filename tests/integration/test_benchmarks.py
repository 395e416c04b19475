"""`make gpu-check` runs every part at tiny sizes without a GPU, and survives parts that fail or hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.dist
ROOT = Path(__file__).parents[2]
CHECK = [sys.executable, "benchmarks/gpu_check.py"]


def dry_run(out: Path, *parts: str) -> dict[str, Any]:
    """The `parts` of the result of a dry run, on a machine without pytest."""
    command = [*CHECK, "--dry-run", "--out", str(out), "--parts", *parts]
    without = out.parent / "without"
    without.mkdir()
    (without / "pytest.py").write_text("raise ImportError('a machine for GPU checks has no pytest')")
    path = os.pathsep.join(filter(None, [str(without), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=570, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["commit"]
    assert result["versions"]["torch"]
    assert list(result["parts"]) == list(parts)
    found: dict[str, Any] = result["parts"]
    return found


def test_every_part_runs_after_parts_that_fail_and_hang(tmp_path: Path) -> None:
    names = ["machine", "kernels", "train 0.5b", "profile 7b", "out of memory", "collectives", "loop"]
    names.append("turns 7b")
    # "hangs" is first: a later part could use the time that earlier ones left.
    parts = dry_run(tmp_path / "gpu.json", "hangs", "fails", *names)
    fails, hangs = parts["fails"], parts["hangs"]
    assert (fails["status"], fails["found"]) == ("failed", {"before": 1})
    assert fails["reason"] == "RuntimeError: this part fails on purpose"
    assert hangs["status"] == "out of time"
    assert not psutil.pid_exists(hangs["found"]["child"])
    assert {parts[name]["status"] for name in names} == {"done"}, parts
    assert {"c_compiler", "python_header"} <= parts["machine"]["found"].keys()
    rows = parts["train 0.5b"]["found"]["rows"]
    assert len(rows) == 5
    for row in rows:
        if row["attention"] == "flex":
            assert "failed" in row, "FlexAttention has no backward on a CPU"
            continue
        assert row["packing"] == row["packing_wanted"]
        assert row["seconds"]
        assert row["mfu"] > 0
        assert any(choice.startswith("packing: tree") for choice in row["choices"])
    assert "no gradient" in parts["train 0.5b"]["found"]["flex_gradient"]["failed"]
    assert parts["collectives"]["found"]["backend"] == "gloo"
    assert parts["profile 7b"]["found"]["operations"]
    assert {"check", "head tiny", "norm tiny"} <= parts["kernels"]["found"].keys()
    first, second = parts["out of memory"]["found"]["steps"]
    assert first["warnings"]
    assert first["tokens_per_micro_batch"] < 256
    assert second["grad_norm"] > 0
    check_loop(parts["loop"]["found"])
    turns = parts["turns 7b"]["found"]["steps"]
    assert [step["step"] for step in turns] == [1, 2]
    assert all(step["time/engine_sleep_s"] > 0 for step in turns)
    assert all(step["time/base_copies_s"] > 0 for step in turns)


def check_loop(found: dict[str, Any]) -> None:
    """It continues after its engine was killed."""
    assert [step["step"] for step in found["steps"]] == [1, 2, 3, 4]
    assert found["resume"] == "ok"
    assert found["engine_killed"]["process"] != "no engine found"
    assert found["restarts"]
    assert any(choice.startswith("packing: ") for choice in found["choices"])
    assert all("canary/gap_max" in step for step in found["steps"])
    assert "engine_log" in found
    assert {"skylite.log", "trainer.log"} <= set(found["logs"])


def test_kernels_save_launches_and_memory_on_fake_tensors(tmp_path: Path) -> None:
    out = tmp_path / "fake.json"
    command = [sys.executable, "benchmarks/fake_step.py", "--shapes", "tiny", "--checkpointing", "none"]
    done = subprocess.run(
        [*command, "--prompt", "50", "--completions", "20", "30", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = {row["form"]: row for row in json.loads(out.read_bytes())["rows"]}
    assert {row["nodes"] for row in rows.values()} == {50 + 20 + 30}
    flex, kernels = (rows[form] for form in ("torch, flex", "kernels, flex"))
    assert "Triton's kernels" not in flex["ms"]
    # Hidden 64, 2 layers: two norms, SwiGLU and rotary embedding each forward and backward, norm and head.
    assert kernels["ms"]["Triton's kernels"] == pytest.approx(1e3 * 2e-6 * (2 * 8 + 2 + 2), abs=0.01)
    assert kernels["launches_per_layer"] < flex["launches_per_layer"]
    assert kernels["peak"] < flex["peak"]
