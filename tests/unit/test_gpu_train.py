"""The rows of the training parts of `make gpu-check`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from skylite.trainer import step as step_module

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu_train(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu_train")


@pytest.fixture
def rows_until(gpu_train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rows of a part whose sdpa without checkpointing runs out of memory in the given step."""
    right, calls = step_module.train_step, list[int]()

    def limited(policy: Any, optimizer: Any, groups: Any, step: int, config: Any, dist: Any) -> Any:
        if config.trainer.checkpointing == "none" and step == calls[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return right(policy, optimizer, groups, step, config, dist)

    def rows(last: int) -> list[dict[str, Any]]:
        calls[:] = [last]
        report = importlib.import_module("gpu_check").Report(tmp_path / "found.json", True)
        gpu_train.train(report, "tiny")
        found: list[dict[str, Any]] = report.found["rows"]
        return found

    monkeypatch.setattr(step_module, "train_step", limited)
    monkeypatch.setattr(gpu_train, "use_trainer_environment", lambda: None)
    monkeypatch.setattr(gpu_train, "device_rate", lambda dry_run: 1e12)
    monkeypatch.setitem(gpu_train.MODES, "tiny", [gpu_train.NONE, gpu_train.DEFAULT])
    return rows


@pytest.mark.parametrize("last", [1, 2, 3])
def test_an_out_of_memory_keeps_the_steps_before_it(gpu_train: Any, rows_until: Any, last: int) -> None:
    failed, done = rows_until(last)
    assert failed["failed"].startswith("OutOfMemoryError: CUDA out of memory.")
    assert failed["packing"] == "tree"
    assert failed["budget"] == done["budget"] == 256
    assert len(failed.get("grad_norms", [])) == last - 1
    assert len(failed.get("seconds", [])) == max(0, last - 2)
    assert ("mfu" in failed) == (last == 3)
    assert "failed" not in done
    assert (len(done["grad_norms"]), len(done["seconds"])) == (3, 2)
    table = importlib.import_module("gpu_table").train_rows(
        {"train x": {"found": {"shape": "tiny", "rows": [failed, done]}}}
    )
    reason = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2..."
    assert table[0][4].endswith(f", then {reason}" if last == 3 else reason)
    assert table[0][6] == failed["peak_gib"]
    assert all(table[1][4:])


def test_the_largest_shape_has_micro_batches_that_fit(gpu_train: Any) -> None:
    sizes = {shape: gpu_train.sizes_of(shape, False)[1].budget for shape in gpu_train.MODES}
    assert sizes == {"qwen2.5-7b": 8192, "qwen2.5-0.5b": 16384, "qwen2.5-1.5b": 16384}
    assert gpu_train.sizes_of("qwen2.5-7b", True)[0] == "tiny"


def row(attention: str, norms: list[float], **fields: Any) -> dict[str, Any]:
    mode = {"attention": attention, "checkpointing": "selective", "packing_wanted": "tree"}
    return {**mode, "packing": "tree", "grad_norms": norms, **fields}


def test_flex_must_have_the_gradient_of_sdpa(gpu_train: Any) -> None:
    sdpa = row("sdpa", [2.0, 7.0])
    same = gpu_train.flex_gradient([sdpa, row("flex", [2.039, 9.0])])
    assert same == {"sdpa": 2.0, "flex": 2.039, "difference": 0.0195}
    other = gpu_train.flex_gradient([sdpa, row("sdpa", [9.0], checkpointing="full"), row("flex", [1.9])])
    assert other["failed"] == "flex's gradient norm differs from sdpa's by 5.0%"
    assert gpu_train.flex_gradient([sdpa, row("flex", [float("nan")])])["failed"]
    missing = {"failed": "no gradient of a prefix tree with flex"}
    assert gpu_train.flex_gradient([sdpa]) == missing
    assert gpu_train.flex_gradient([sdpa, {**row("flex", [2.0]), "packing": "padded"}]) == missing
    part = {"status": "done", "seconds": 9.0, "found": {"flex_gradient": other}}
    outcome = importlib.import_module("gpu_table").outcome(part)
    assert outcome == "done, 9.0 s: flex's gradient norm differs from sdpa's by 5.0%"


def test_a_row_has_the_memory_inside_and_outside_of_torch(
    gpu_train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU is used here: torch's own counts are replaced."""
    counts = {"max_memory_allocated": 3 << 30, "max_memory_reserved": 5 << 30, "memory_reserved": 4 << 30}
    for name, count in counts.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, count=count: count)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 << 30, 15 << 30))
    assert gpu_train.memory_of(torch.device("cuda", 0)) == {
        "peak_gib": 3.0,
        "peak_reserved_bytes": 5 << 30,
        "reserved_bytes": 4 << 30,
        "outside_torch_bytes": 1 << 30,
    }
    assert list(gpu_train.memory_of(torch.device("cpu"))) == ["peak_gib"]
