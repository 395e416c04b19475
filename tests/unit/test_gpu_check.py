"""The plan of `make gpu-check` and its records. The parts run in tests/integration/test_benchmarks.py."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.unit.gpu_cases import Machine

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


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
    assert clock.now <= gpu_check.TOTAL_S
    return given


def test_all_parts_fit_into_nine_minutes(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_check = module("gpu_check")
    limits = {name: part.limit_s for name, part in gpu_check.PARTS.items()}
    assert sum(limits.values()) <= gpu_check.TOTAL_S == 530
    assert planned(gpu_check, monkeypatch, {}) == limits, "parts that use their time cut no later part"


def test_a_part_may_use_the_time_that_earlier_ones_left(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_check = module("gpu_check")
    limits = {name: part.limit_s for name, part in gpu_check.PARTS.items()}
    given = planned(gpu_check, monkeypatch, {"machine": 5.0, "loop": 100.0})
    spare = limits["machine"] + limits["loop"] - 105
    assert given["train 7b"] == limits["train 7b"] + spare
    assert given["profile 7b"] == limits["profile 7b"], "7B used the spare time"


class Report:
    """What a part reports, without files."""

    dry_run = True

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def put(self, name: str, value: Any, *, show: bool = True) -> None:
        self.found[name] = value

    def add(self, name: str, row: Any) -> None:
        self.put(name, [*self.found.get(name, []), row])


def ends_well() -> None:
    pass


def fails() -> None:
    raise RuntimeError("skylite train ended")


def is_terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)


@pytest.mark.parametrize("ends", [ends_well, fails, is_terminated])
def test_the_loop_reports_the_engines_log_however_it_ends(
    module: Any, monkeypatch: pytest.MonkeyPatch, ends: Callable[[], None]
) -> None:
    gpu_loop, report = module("gpu_loop"), Report()

    def watch(report: Report, command: list[str], env: dict[str, str], run: Path) -> None:
        log = run / "logs" / "vllm-0.log"
        log.parent.mkdir(parents=True)
        log.write_text("old\n" * 9000 + "Using FLASH_ATTN\n 10%\r100%\nGraph capturing took 3 s\n")
        ends()

    monkeypatch.setattr(gpu_loop, "watch", watch)
    monkeypatch.setattr(gpu_loop, "loop_command", lambda folder, dry_run: ([], {}))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with contextlib.suppress(RuntimeError, SystemExit):
            gpu_loop.loop(report)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert report.found["engine_log"][-3:] == ["Using FLASH_ATTN", "100%", "Graph capturing took 3 s"]
    assert 19_990 < len("\n".join(report.found["engine_log"])) <= 20_000
    assert set(report.found["engine_log"][:-3]) == {"old"}, "no part of a line"


def test_a_process_that_ends_while_the_engine_is_looked_for_is_passed_over(module: Any) -> None:
    with subprocess.Popen(["sleep", "100"]) as child:
        process = psutil.Process(child.pid)
        child.kill()
    assert module("gpu_loop").words_of(process) == ""


def test_a_loop_whose_engine_never_started_has_an_empty_log(module: Any, tmp_path: Path) -> None:
    assert module("gpu_loop").engine_log(tmp_path / "vllm-0.log") == []


def test_results_name_no_folder_of_the_machine(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_info = module("machine_info")
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.syspath_prepend("/site")
    kept = [
        "INFO 11-25 [core.py:133] vllm/v1/engine/core.py, 3.1 s/it, 25W / 700W, N/A",
        "See https://docs.vllm.ai/en/latest/configuration/ for more",
        7,
    ]
    assert machine_info.without_paths(kept) == kept
    found = {
        "a": ['File "/site/vllm/v1/core.py", line 7', "model='/home/someone/run/m', uds=/run/x-1/a b"],
        "b": "file:///tmp/vllm_dist_7 (/opt/data/x.py:3)",
    }
    assert machine_info.without_paths(found) == {
        "a": ['File "PATH/vllm/v1/core.py", line 7', "model='PATH/run/m', uds=PATH b"],
        "b": f"file://{'PATH' if tempfile.gettempdir() == '/tmp' else '/tmp'}/vllm_dist_7 (PATH:3)",
    }


@pytest.mark.parametrize("target", ["gpu-check", "gpu-results"])
def test_a_folder_of_packages_is_used_without_installing(tmp_path: Path, target: str) -> None:
    words = ["make", "-n", target, f"PACKAGES={tmp_path / 'site'}", "PYTHON=python9"]
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
    found = module("machine_info").machine_info()
    assert found["commit"] == ""
    assert found["gpus"][0].startswith("nvidia-smi failed: ")


def test_attention_that_cudnn_refuses_is_a_row_and_not_the_end(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, report = module("gpu_kernels"), Report()

    def refuse(*_: Any) -> Any:
        raise RuntimeError("No available kernel | Aborting execution.")

    monkeypatch.setattr(kernels, "first_and_median", refuse)
    kernels.attention(report)
    rows = report.found["rows"]
    assert len(rows) == 2 * len(kernels.SHAPES)
    table = module("gpu_table").attention_rows({"attention": {"found": {"rows": rows}}})
    assert table[-1] == [
        "with cuDNN, 65 queries",
        73,
        "RuntimeError: No available kernel / Aborting execution.",
        "",
    ]
