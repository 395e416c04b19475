"""The plan of `make gpu-check` and its records. The parts run in tests/integration/test_benchmarks.py."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.gpu_cases import Machine

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def gpu_train(module: Any) -> Any:
    return module("gpu_train")


class Clock:
    """Time that passes only in parts."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def strftime(self, _: str) -> str:
        return "2026-01-01"


def planned(gpu_check: Any, monkeypatch: pytest.MonkeyPatch, taken: dict[str, float]) -> dict[str, float]:
    """The limit that each part got. `taken`: seconds of parts that do not use all of theirs."""
    clock, given = Clock(), dict[str, float]()

    def run(name: str, limit: float, dry_run: bool) -> dict[str, Any]:
        given[name] = limit
        seconds = min(limit, taken.get(name, limit))
        clock.now += seconds
        return {"status": "done", "seconds": seconds}

    monkeypatch.setattr(gpu_check, "time", clock)
    monkeypatch.setattr(gpu_check, "in_own_process", run)
    gpu_check.check(list(gpu_check.PARTS), None, False)
    assert clock.now <= sum(part.limit_s for part in gpu_check.PARTS.values())
    return given


def test_the_halves_fit_into_250_and_540_seconds(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_check = module("gpu_check")
    limits = {name: part.limit_s for name, part in gpu_check.PARTS.items()}
    sums = {half: sum(p.limit_s for p in parts.values()) for half, parts in gpu_check.HALVES.items()}
    assert sums["train"] <= 250
    assert sums["serve"] <= 540
    assert planned(gpu_check, monkeypatch, {}) == limits, "parts that use their time cut no later part"


def test_a_part_may_use_the_time_that_earlier_ones_left(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_check = module("gpu_check")
    limits = {name: part.limit_s for name, part in gpu_check.PARTS.items()}
    taken = {"machine": 5.0, "kernels": 5.0}
    given = planned(gpu_check, monkeypatch, taken)
    spare = sum(limits[name] - seconds for name, seconds in taken.items())
    assert given["train 0.5b"] == limits["train 0.5b"] + spare
    assert given["train 7b"] == limits["train 7b"], "0.5B used the spare time"


def test_results_name_no_folder_of_the_machine(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = module("shared")
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.syspath_prepend("/site")
    kept = [
        "INFO 11-25 [core.py:133] vllm/v1/engine/core.py, 3.1 s/it, 25W / 700W, N/A",
        "See https://docs.vllm.ai/en/latest/configuration/ for more",
        7,
    ]
    assert shared.without_paths(kept) == kept
    found = {
        "a": ['File "/site/vllm/v1/core.py", line 7', "model='/home/someone/run/m', uds=/run/x-1/a b"],
        "b": "file:///tmp/vllm_dist_7 (/opt/data/x.py:3)",
    }
    assert shared.without_paths(found) == {
        "a": ['File "PATH/vllm/v1/core.py", line 7', "model='PATH/run/m', uds=PATH b"],
        "b": f"file://{'PATH' if tempfile.gettempdir() == '/tmp' else '/tmp'}/vllm_dist_7 (PATH:3)",
    }


@pytest.mark.parametrize("function", ["train", "profile", "out_of_memory", "collectives"])
def test_a_part_that_trains_sets_its_environment_before_it_imports_torch(function: str) -> None:
    more = "" if function == "collectives" else ", 'qwen2.5-7b'"
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import gpu_check, gpu_train\n"
        "gpu_train.use_trainer_environment = lambda: sys.exit('torch' in sys.modules)\n"
        f"gpu_train.{function}(gpu_check.Report(None, True){more})"
    )
    subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, check=True)


def test_a_folder_of_packages_is_used_without_installing(tmp_path: Path) -> None:
    words = ["make", "-n", "gpu-check", f"PACKAGES={tmp_path / 'site'}", "PYTHON=python9"]
    # The tests themselves run under make, whose flags would make this one print the folder too.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 1, "nothing else runs"
    assert done.stdout.startswith(f'PYTHONPATH="{ROOT}/src:{ROOT}:{tmp_path}/site')
    assert " python9 benchmarks/gpu_check.py --" in done.stdout


def test_results_are_kept_on_a_machine_without_git_and_with_a_broken_driver(
    module: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.lists(text="Failed to initialize NVML: Driver/library version mismatch", code=18)
    monkeypatch.setenv("PATH", str(machine.folder))
    assert shutil.which("git") is None
    found = module("shared").machine_info()
    assert found["commit"] == ""
    assert found["gpus"][0].startswith("nvidia-smi failed: ")


def test_each_shape_has_its_own_micro_batches(gpu_train: Any) -> None:
    sizes = {shape: gpu_train.sizes_of(shape, False)[1].budget for shape in gpu_train.MODES}
    assert sizes == {"qwen2.5-7b": 8192, "qwen2.5-0.5b": 65536}
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
