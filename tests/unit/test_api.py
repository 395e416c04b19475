"""`skylite.load_run`: read a run folder from Python, and the examples of its page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import skylite
from skylite.errors import ConfigError, DataError, SkyliteError
from skylite.run.metrics_file import append_metrics
from skylite.run.run_dir import RunDir, adapter_name
from skylite.run.status import Status, write_status
from tests.engines import write_random_adapter
from tests.rows import random_samples
from tests.small_run import make_run, settings

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "python-api.md"


@pytest.fixture
def run(tmp_path: Path, tiny_llama: Path) -> RunDir:
    """A finished run of three steps that keeps adapters 0 and 3."""
    rows = {step: random_samples(step) for step in (1, 2, 3)}
    run = make_run(tmp_path / "runs" / "NAME", tiny_llama, settings(), rows)
    for step in (1, 2, 3):
        append_metrics(run.metrics_path, {"step": step, "reward/mean": step / 4, "restarts": 0})
    append_metrics(
        run.metrics_path, {"step": 3, "reward/mean": float("nan"), "anomaly/reason": "loss is nan"}
    )
    write_status(run.status_path, Status(phase="done", step=3, num_steps=3, adapter_version=3))
    for version in (0, 3):
        write_random_adapter(run.default_adapters / adapter_name(version), tiny_llama)
    return run


def test_load_run_reads_a_run(run: RunDir) -> None:
    found = skylite.load_run(run.root)
    assert (found.config, found.status.phase, found.steps) == (settings(), "done", [1, 2, 3])
    assert found.lora_sync_path == run.default_adapters
    assert found.adapter(3) == run.default_adapters / "policy-v000003"
    rewards = [t.reward for g in found.rollouts(2) for t in g.trajectories]
    assert rewards == [s.reward for s in random_samples(2)]


def test_metrics_are_a_table_with_null_for_missing_values(run: RunDir) -> None:
    table = skylite.load_run(str(run.root)).metrics
    assert table.to_pydict() == {
        "step": [1, 2, 3],
        "reward/mean": [0.25, 0.5, None],
        "restarts": [0, 0, None],
        "anomaly/reason": [None, None, "loss is nan"],
    }
    assert [str(column.type) for column in table.columns] == ["int64", "double", "int64", "string"]
    run.metrics_path.unlink()
    assert skylite.load_run(run.root).metrics.column_names == ["step"]
    run.metrics_path.write_text("nonsense\n")
    with pytest.raises(DataError, match="line 1"):
        _ = skylite.load_run(run.root).metrics


def test_a_missing_item_is_reported_with_the_available_ones(run: RunDir, tmp_path: Path) -> None:
    found = skylite.load_run(run.root)
    with pytest.raises(SkyliteError, match=r"no adapter of step 2 \(published and kept: 0, 3\)"):
        found.adapter(2)
    with pytest.raises(SkyliteError, match=r"no rollouts of step 4 \(stored: steps 1 to 3\)"):
        found.rollouts(4)
    with pytest.raises(ConfigError, match="config"):
        skylite.load_run(tmp_path)
    run.status_path.unlink()
    with pytest.raises(ConfigError, match="status"):
        _ = found.status


def test_a_moved_run_finds_its_adapters(run: RunDir, tmp_path: Path) -> None:
    run.root.rename(tmp_path / "moved")
    assert (
        skylite.load_run(tmp_path / "moved").adapter(0) == tmp_path / "moved" / "adapters" / "policy-v000000"
    )


def test_the_examples_of_the_page_run(run: RunDir) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    code = "\n".join([*blocks, "print('LoRA', sum('lora' in n for n, _ in model.named_parameters()) > 0)"])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=run.root.parents[1], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:4] == ["done 3 4", "1 0.25", "2 0.5", "3 None"]
    assert lines[-1] == "LoRA True"


def test_importing_skylite_loads_no_heavy_module() -> None:
    for module, heavy in (
        ("skylite", {"pyarrow", "pydantic"}),
        ("skylite.api", {"torch", "transformers", "vllm"}),
    ):
        code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"
