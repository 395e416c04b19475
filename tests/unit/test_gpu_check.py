"""The plan of `make gpu-check` and its records. The parts run in tests/integration/test_benchmarks.py."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from skylite.model import flex_attention
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
    assert sum(limits.values()) <= gpu_check.TOTAL_S == 535
    assert planned(gpu_check, monkeypatch, {}) == limits, "parts that use their time cut no later part"


def test_a_part_may_use_the_time_that_earlier_ones_left(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_check = module("gpu_check")
    limits = {name: part.limit_s for name, part in gpu_check.PARTS.items()}
    taken = {"machine": 5.0, "collectives": 5.0, "loop": 100.0}
    given = planned(gpu_check, monkeypatch, taken)
    spare = sum(limits[name] - seconds for name, seconds in taken.items())
    assert given["train 7b"] == limits["train 7b"] + spare
    assert given["profile 7b"] == limits["profile 7b"], "7B used the spare time"


class Report:
    """What a part reports, without files."""

    dry_run = True
    end = float("inf")

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
def test_the_loop_reports_its_logs_however_it_ends(
    module: Any, monkeypatch: pytest.MonkeyPatch, ends: Callable[[], None]
) -> None:
    gpu_loop, report = module("gpu_loop"), Report()

    def watch(report: Report, command: list[str], env: dict[str, str], run: Path) -> None:
        log = run / "logs" / "vllm-0.log"
        log.parent.mkdir(parents=True)
        log.write_text("old\n" * 9000 + "Using FLASH_ATTN\n 10%\r100%\nGraph capturing took 3 s\n")
        (log.parent / "trainer.log").write_text("older\n" * 9000 + "CUDA error\n")
        (log.parent / "skylite.log").write_text("step 1\n")
        ends()

    monkeypatch.setattr(gpu_loop, "watch", watch)
    monkeypatch.setattr(gpu_loop, "resume", lambda *_: "ok")
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
    assert list(report.found["logs"]) == ["skylite.log", "trainer.log"]
    assert report.found["logs"]["skylite.log"] == ["step 1"]
    assert report.found["logs"]["trainer.log"][-2:] == ["older", "CUDA error"]
    assert 5_980 < len("\n".join(report.found["logs"]["trainer.log"])) <= 6_000


def test_a_process_that_ends_while_the_engine_is_looked_for_is_passed_over(module: Any) -> None:
    with subprocess.Popen(["sleep", "100"]) as child:
        process = psutil.Process(child.pid)
        child.kill()
    assert module("gpu_loop").words_of(process) == ""


def test_a_loop_whose_engine_never_started_has_an_empty_log(module: Any, tmp_path: Path) -> None:
    report = Report()
    module("gpu_loop").report_logs(report, tmp_path / "logs")
    assert report.found == {"engine_log": [], "logs": {}}


def test_a_zombie_does_not_hide_the_engine(module: Any) -> None:
    code = """if True:
        import subprocess, sys, time
        zombie = subprocess.Popen(["true"])
        time.sleep(0.5)
        code = "import time; print(flush=True); time.sleep(20)  # tests.fakes.engine"
        subprocess.Popen([sys.executable, "-c", code]).wait()"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        assert module("gpu_loop").kill_the_engine(parent.pid).endswith("# tests.fakes.engine")


@pytest.mark.parametrize(
    ("seconds", "code", "result"),
    [
        (60, "open('metrics.jsonl', 'a').write('{\"step\": 4}\\n')", "ok"),
        (60, "raise SystemExit(3)", "failed: exit code 3 after N s and step 3"),
        (60, "pass", "done: exit code 0 after N s and step 3"),
        (12.0, "import time; time.sleep(60)", "out of time: exit code -15 after N s and step 3"),
        (
            10.5,
            "raise SystemExit(3)",
            "not tried: 0 s left, and the first start took 1 s until its first step",
        ),
    ],
)
def test_a_resume_is_tried_if_its_start_fits(
    module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: float, code: str, result: str
) -> None:
    gpu_loop, report, run = module("gpu_loop"), Report(), tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3)))
    report.found["steps"] = [{"step": step, "seconds_since_start": step} for step in (1, 2, 3)]
    report.end = time.monotonic() + seconds
    monkeypatch.setattr(gpu_loop, "SKYLITE", [sys.executable, "-c", f"import os; os.chdir('run'); {code}"])
    found = gpu_loop.resume(report, dict(os.environ), run)
    assert re.sub(r"after \d+ s", "after N s", found) == result
    assert [step["step"] for step in report.found["steps"]] == [1, 2, 3, *([4] if result == "ok" else [])]


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


@pytest.mark.parametrize(
    ("name", "function"),
    [
        *(("gpu_train", "train"), ("gpu_train", "profile"), ("gpu_train", "out_of_memory")),
        *(("gpu_train", "collectives"), ("gpu_kernels", "flex")),
    ],
)
def test_a_part_that_trains_sets_its_environment_before_it_imports_torch(name: str, function: str) -> None:
    more = "" if function in ("collectives", "flex") else ", 'qwen2.5-7b'"
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import gpu_check, gpu_train, {name}\n"
        "gpu_train.use_trainer_environment = lambda: sys.exit('torch' in sys.modules)\n"
        f"{name}.{function}(gpu_check.Report(None, True){more})"
    )
    subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, check=True)


def test_flex_that_is_wrong_or_does_not_compile_is_a_row(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, report, right = module("gpu_kernels"), Report(), flex_attention.flex_tree_attention

    def wrong(query: Tensor, *rest: Any) -> Tensor:
        if query.dtype == torch.float32:
            raise RuntimeError("NoValidChoicesError: no choices | to select")
        return right(query, *rest) * 1.5

    monkeypatch.setattr(flex_attention, "flex_tree_attention", wrong)
    monkeypatch.setattr(module("gpu_train"), "use_trainer_environment", lambda: None)
    kernels.flex(report)
    rows = module("gpu_table").kernel_rows({"flex": {"found": report.found}})
    assert [row[0] for row in rows][1:3] == [
        "flex, 32/8 heads, float32",
        "flex, 32/8 heads, bfloat16, softcap",
    ]
    assert all(row[2].startswith("differs from sdpa by ") for row in (rows[0], *rows[2:])), rows
    assert rows[1][1:] == [45, "RuntimeError: NoValidChoicesError: no choices / to select", ""]


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
    table = module("gpu_table").kernel_rows({"attention": {"found": {"rows": rows}}})
    assert table[-1] == [
        "with cuDNN, 65 queries",
        73,
        "RuntimeError: No available kernel / Aborting execution.",
        "",
    ]
