"""Runs tests/fake_gpu/*cases.py in their own process: the training step on CUDA tensors without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.fake_gpu.compiler import has_compiler, is_cpu_build

ROOT = Path(__file__).parents[2]
CASES = ("tests/fake_gpu/cases.py", "tests/fake_gpu/step_cases.py")


@pytest.mark.skipif(is_cpu_build() and not has_compiler(), reason="a CPU build of torch needs a C++ compiler")
@pytest.mark.skipif(
    not is_cpu_build() and not torch.cuda.is_available(),
    reason="a CUDA build of torch needs a GPU for autograd",
)
def test_the_training_step_runs_on_fake_cuda_tensors() -> None:
    plugins = ["-p", "tests.fake_gpu.preload", "-p", "no:cacheprovider"]
    parts = filter(None, [os.environ.get("PYTHONPATH")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, *CASES],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *parts])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
