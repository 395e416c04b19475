"""Start the trainer under torchrun, and read what it published."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from skylite.processes.torchrun import trainer_command, trainer_env
from skylite.run.run_dir import RunDir, adapter_name

TIMEOUT_S = 180.0


@contextlib.contextmanager
def trainer(run: RunDir, num_ranks: int, resume: bool = False) -> Iterator[subprocess.Popen[str]]:
    """torchrun on a run directory, in a new session, which is ended after the block."""
    run.rendezvous.mkdir(exist_ok=True)
    process = subprocess.Popen(
        trainer_command(run.root, run.rendezvous, num_ranks, resume=resume),
        env={**os.environ, **trainer_env(1)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def finish(run: RunDir, num_ranks: int, resume: bool = False) -> None:
    """Run the trainer to its end; it must end well."""
    with trainer(run, num_ranks, resume) as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, output


def weights(run: RunDir, version: int) -> dict[str, np.ndarray]:
    """The published tensors of a version."""
    return load_file(run.default_adapters / adapter_name(version) / "adapter_model.safetensors")


def largest_difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """max |a - b| over all tensors, which must have the same names."""
    assert a.keys() == b.keys()
    return max(float(np.abs(a[k] - b[k]).max()) for k in a)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    """Until the file is there."""
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)
