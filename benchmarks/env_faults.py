"""A thousand episodes that misbehave, in one environment with a scripted engine.

    python benchmarks/env_faults.py --out benchmarks/results/env_faults.json

They hang, raise, die, flood, fork, open sockets, call after their end, use other keys, send malformed JSON,
images, n > 1, huge limits and huge bodies, cancel streams, return what is no reward, and write into every
open file (tests/faults/episodes.py). Checked for each: its calls hold its own conversation only, every reply
that the engine gave is recorded once, every refusal has OpenAI's form, it ended as it should, and nothing
lives on. Then every failing kind alone with env.on_error=stop: the run stops and names the prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from command_line import argument_parser
from machine_info import machine_info

from skylite.run.files import write_json
from tests.faults.episode_run import (
    FAILING,
    Found,
    choose,
    living_processes,
    reasons_of_stops,
    run_faults,
    wrong,
)
from tests.faults.episodes import HOURS_S


def main() -> None:
    args = parse_arguments()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="skylite-") as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        faults = choose(args.faults, args.seed)
        found = asyncio.run(run_faults(folder, faults, patch, timeout_s=args.timeout))
        reasons = asyncio.run(reasons_of_stops(folder, patch))
    time.sleep(2)
    result = summary(found) | {
        "stopped_with_the_prompt": sum("prompt p" in r and FAILING[f] in r for f, r in reasons.items()),
        "stops": len(reasons),
        "processes_left": len(living_processes(f"sleep\0{HOURS_S}")),
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps(result, indent=1))
    if args.out:
        write_json(args.out, machine_info() | {"seed": args.seed, "timeout_s": args.timeout} | result)


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=30.0, help="env.timeout_s")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def summary(found: Found) -> dict[str, Any]:
    """Counts, and every deviation."""
    kinds = Counter(found.faults)
    lines = wrong(found)
    return {
        "episodes": len(found.faults),
        "by_fault": dict(sorted(kinds.items())),
        "trajectories": len(found.trajectories),
        "calls": sum(len(t.samples) for t in found.trajectories.values()),
        "left_out": len(found.faults) - len(found.trajectories),
        "ends": dict(Counter(t.end for t in found.trajectories.values())),
        "answers_by_status": dict(sorted(Counter(str(a["status"]) for a in found.answers).items())),
        "wrong": len(lines),
        "every_wrong": lines[:50],
    }


if __name__ == "__main__":
    main()
