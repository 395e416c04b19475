"""What does the sandbox cost? Scores of reasoning-gym inside and outside of it.

    python benchmarks/sandbox.py --out benchmarks/results/sandbox_cpu.json

Needs the extra reasoning-gym. The entries are the package's own, so scoring them outside is safe here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import reasoning_gym
from command_line import argument_parser
from machine_info import machine_info

from skylite.rewards.reasoning_gym import to_json
from skylite.run.files import write_json
from skylite.sandbox.sandbox import Sandbox

FACTORY = "skylite.rewards.reasoning_gym_scorer:make_scorer"


def main() -> None:
    args = parse_arguments()
    rows = [measure(task, args.calls) for task in args.tasks]
    for row in rows:
        print(json.dumps(row))
    if args.out:
        write_json(args.out, machine_info() | {"calls": args.calls, "rows": rows})


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--tasks", nargs="+", default=["chain_sum", "countdown", "polynomial_equations"])
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def measure(task: str, calls: int) -> dict[str, Any]:
    """Seconds to start, and median milliseconds to score the reference answer."""
    entry = reasoning_gym.create_dataset(task, seed=1, size=1)[0]
    scorer, stored = reasoning_gym.get_score_answer_fn(task), to_json(entry)
    with Sandbox(FACTORY, task) as sandbox:
        started = time.perf_counter()
        sandbox.start()
        start_s = time.perf_counter() - started
        inside = median_ms(lambda: sandbox.call(stored, entry["answer"]), calls)
    outside = median_ms(lambda: scorer(entry["answer"], entry), calls)
    return {
        "task": task,
        "start_s": round(start_s, 2),
        "inside_ms": round(inside, 2),
        "outside_ms": round(outside, 3),
    }


def median_ms(call: Callable[[], object], calls: int) -> float:
    seconds = []
    for _ in range(calls):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return 1000 * statistics.median(seconds)


if __name__ == "__main__":
    main()
