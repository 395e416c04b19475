"""Freed memory returns to the system between passes, even if the allocator caches it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skylite.processes.child_env import TBB_MALLOC, has_library, preload_env
from skylite.processes.torchrun import trainer_env
from skylite.trainer.micro_batch_memory import release_cached_memory

PASSES = """
import torch
from pathlib import Path
from skylite.trainer.micro_batch_memory import release_cached_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

start = resident()
blocks = [torch.ones(1000 + i, 1000) for i in range(60)]
held = resident()
del blocks
kept = resident()
print(held - start, kept - start, release_cached_memory(), resident() - start)
"""


@pytest.mark.skipif(not has_library(*TBB_MALLOC), reason="TBB's allocator is not here")
def test_memory_cached_by_tbb_is_released() -> None:
    env = os.environ | preload_env(TBB_MALLOC, {}, "malloc")
    done = subprocess.run(
        [sys.executable, "-c", PASSES], env=env, capture_output=True, text=True, check=True, timeout=120
    )
    held, kept, released, left = done.stdout.split()
    assert released == "True"
    assert float(held) > 200
    assert float(kept) > 30, "it keeps much of what is freed"
    assert float(left) < float(kept) / 2


def test_without_tbb_releasing_does_nothing() -> None:
    assert release_cached_memory() is False


SHAPES = """
import torch
from pathlib import Path

weight = torch.randn(64, 64, dtype=torch.bfloat16)

def resident_after(lengths):
    for length in lengths:
        torch.nn.functional.linear(torch.randn(length, 64, dtype=torch.bfloat16), weight)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

before = resident_after(range(1, 500))
print(resident_after(range(500, 1000)) - before)
"""


def test_a_trainer_does_not_grow_with_the_shapes_that_it_has_seen() -> None:
    """oneDNN compiles a bfloat16 product for each shape: 0.5 MB, kept twice. A CPU without it passes too."""
    env = os.environ | trainer_env(1)
    done = subprocess.run(
        [sys.executable, "-c", SHAPES], env=env, capture_output=True, text=True, check=True, timeout=120
    )
    assert float(done.stdout) < 30


@pytest.mark.parametrize("name", ["with space", "with:colon"])
def test_a_library_whose_path_cannot_be_named_is_logged(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """LD_PRELOAD is split at both, and ld.so only prints that it ignores the parts."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / name))
    (tmp_path / name / "lib").mkdir(parents=True)
    (tmp_path / name / "lib" / "libx.so").touch()
    with caplog.at_level("WARNING"):
        assert preload_env(["libx.so"], {"LD_PRELOAD": "/lib/own.so"}) == {}
    assert f"{tmp_path}/{name}/lib/libx.so is not preloaded" in caplog.text
