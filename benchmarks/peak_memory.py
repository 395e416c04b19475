"""Measure the largest memory of a command with all its processes, sampled about once a second.

    python benchmarks/peak_memory.py skylite prepare gsm8k --synthetic
    python benchmarks/peak_memory.py skylite train --steps 3 --set eval.limit=0

Memory is PSS (proportional set size): pages that several processes share count once in the sum.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import psutil
from command_line import argument_parser

PAUSE_S = 1.0
GIB = 2**30


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    command = parser.parse_args().command
    if not command:
        parser.error("name the command to measure, for example: skylite train --dry-run")
    result = measure(command)
    print(json.dumps(result))
    sys.exit(result["exit_code"])


def measure(command: list[str]) -> dict[str, Any]:
    """Run the command to its end, and sample beside it."""
    with subprocess.Popen(command) as child:
        root, sums = psutil.Process(child.pid), [(0, 0)]
        while child.poll() is None:
            sums.append(tree_pss(root))
            try:
                child.wait(PAUSE_S)
            except subprocess.TimeoutExpired:
                continue
    pss, processes = max(sums)
    return {
        "peak_gib": round(pss / GIB, 2),
        "processes_at_peak": processes,
        "samples": len(sums) - 1,
        "exit_code": child.returncode,
    }


def tree_pss(root: psutil.Process) -> tuple[int, int]:
    """Bytes of `root` and its descendants, and their number. A process that ends meanwhile does not count."""
    found = []
    for process in processes_of(root):
        try:
            found.append(process.memory_full_info().pss)
        except psutil.NoSuchProcess:
            continue
    return sum(found), len(found)


def processes_of(root: psutil.Process) -> list[psutil.Process]:
    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


if __name__ == "__main__":
    main()
