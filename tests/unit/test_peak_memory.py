"""`benchmarks/peak_memory.py` adds the memory of a command's processes and keeps its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHILD = "import time; held = b'x' * 2**28; time.sleep(2.5)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}]); sys.exit(3)"


def test_the_memory_of_a_child_counts() -> None:
    command = [sys.executable, "benchmarks/peak_memory.py", sys.executable, "-c", PARENT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert done.returncode == found["exit_code"] == 3
    assert found["processes_at_peak"] == 2
    assert 0.25 <= found["peak_gib"] < 0.5
