"""Run skylite, wait for steps and for processes to end, and check metrics."""

from __future__ import annotations

import contextlib
import math
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file

from skylite.adapters.manifest import read_manifest
from tests.alive import is_alive
from tests.e2e.project import Project, descendants

DEADLINE_S = 240.0


@contextlib.contextmanager
def running(project: Project, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A skylite process. After the block it and its descendants are gone, even if the test failed."""
    process = project.start(*args)
    below: list[psutil.Process] = []
    try:
        yield process
    finally:
        if process.poll() is None:
            below = descendants(process.pid)
            process.kill()
        process.wait()
        for child in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def wait_for_step(project: Project, process: subprocess.Popen[str], run: str, step: int) -> None:
    """Wait until metrics.jsonl has `step`."""
    deadline = time.monotonic() + DEADLINE_S
    while len(project.metrics(run)) < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"step {step} did not come"
        time.sleep(0.05)


def wait_gone(processes: list[psutil.Process], timeout_s: float = 15.0) -> list[psutil.Process]:
    """The processes that are still alive after `timeout_s`."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return list(filter(is_alive, alive))


def check_metrics(project: Project, run: str) -> None:
    """Check that every step recorded its metrics, with plausible values."""
    for line in project.metrics(run):
        for key in (
            "time/publish_s",
            "time/load_s",
            "adapter/bytes",
            "canary/gap_max",
            "mismatch/logprob_diff_mean",
            "reward/mean",
        ):
            assert math.isfinite(line[key]), key
        assert line["canary/gap_max"] < 0.002
        assert line["canary/projection"] == pytest.approx(1.0, abs=0.05)
        assert line["mismatch/logprob_diff_mean"] < 1e-3
    adapters = sorted((project.root / run / "adapters").glob("policy-v*"))
    assert adapters[0].name == "policy-v000000"
    last = read_manifest(adapters[-1])
    assert last.parent == last.version - 1
    weights = load_file(adapters[-1] / "adapter_model.safetensors")
    assert any(abs(v).max() > 0 for k, v in weights.items() if "lora_B" in k)


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; [] if it has just ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def command_of(processes: list[psutil.Process], mark: str) -> psutil.Process:
    """The process that runs module `mark`, without the reaper and torchrun, which name it too."""
    return next(
        p
        for p in reversed(processes)
        if mark in words_of(p)
        and "torch.distributed.run" not in words_of(p)
        and "reaper.py" not in " ".join(words_of(p)[:6])
    )


def places_with(secret: str, root: Path, processes: list[psutil.Process]) -> list[str]:
    """Files and command lines that contain the secret."""
    files = [str(path) for path in root.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    return files + [" ".join(words_of(p)) for p in processes if secret in " ".join(words_of(p))]
