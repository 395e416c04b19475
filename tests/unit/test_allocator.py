"""Freed memory returns to the system between passes, even if the allocator caches it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from skylite.processes.preload_libraries import TBB_MALLOC, has_library, preload_env
from skylite.trainer.memory import release_cached_memory

PASSES = """
import torch
from pathlib import Path
from skylite.trainer.memory import release_cached_memory

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
    assert float(kept) > 40, "it keeps much of what is freed"
    assert float(left) < float(kept) / 2


def test_without_tbb_releasing_does_nothing() -> None:
    assert release_cached_memory() is False
