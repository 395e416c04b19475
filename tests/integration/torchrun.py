"""Start the trainer, under torchrun or as warm ranks, and read what it published."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from skylite.processes.hosts import TrainerStart
from skylite.processes.torchrun import trainer_command, trainer_env
from skylite.run.run_dir import RunDir, adapter_name

TIMEOUT_S = 180.0
ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def trainer(run: RunDir, num_ranks: int, resume: bool = False) -> Iterator[subprocess.Popen[str]]:
    """torchrun on a run directory, in a new session, which is ended after the block."""
    run.rendezvous.mkdir(exist_ok=True)
    process = subprocess.Popen(
        trainer_command(run.root, run.rendezvous, num_ranks, TrainerStart(uuid.uuid4().hex, resume=resume)),
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


def run_module(name: str, num_ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    """`torchrun -m tests.integration.NAME WORDS`, which must end well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    done = subprocess.run(
        [*command, "-m", f"tests.integration.{name}", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@functools.cache
def warm_ranks() -> subprocess.Popen[str]:
    """The process of warm_ranks.py, for all tests of this process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.warm_ranks"],
        env={**os.environ, **trainer_env(1)},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.kill)
    return process


def finish(run: RunDir, num_ranks: int, resume: bool = False) -> None:
    """Run the trainer's ranks to their end, without torchrun; they must end well."""
    assert (code := ended(run, num_ranks, resume)) == 0, f"{code}\n{run.log_path('trainer').read_text()}"


def ended(run: RunDir, num_ranks: int, resume: bool = False) -> int:
    """The first exit code that is not 0 of the trainer's ranks, run without torchrun."""
    run.rendezvous.mkdir(exist_ok=True)
    server, log = warm_ranks(), run.log_path("trainer")
    assert server.stdin is not None
    assert server.stdout is not None
    words = [str(run.root), *(["--resume"] if resume else [])]
    server.stdin.write(json.dumps({"words": words, "ranks": num_ranks, "log": str(log)}) + "\n")
    server.stdin.flush()
    is_answered, _, _ = select.select([server.stdout], [], [], TIMEOUT_S)
    assert is_answered, log.read_text()
    return next((code for code in json.loads(server.stdout.readline()) if code), 0)


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
