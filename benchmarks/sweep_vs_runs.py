"""A sweep's policies together against the same runs in turn: wall seconds, CPU seconds, memory, equality.

    python benchmarks/sweep_vs_runs.py --policies 4 --steps 10 --out benchmarks/results/sweep_vs_runs_cpu.json

Trains ranks 8 and 32 with rates 5e-5 and 1.5e-4 (and more seeds for more policies) with the recipe gsm8k_cpu,
without held-out evaluations. First `skylite sweep` for all, then `skylite train` for each. Memory is the
largest sum over the command's processes of what they own or share (PSS), looked at every 5 seconds. CPU
seconds tell more than wall seconds on a shared machine. --alone N trains only N of the policies alone; the
others then count as much as their mean. 0 leaves the lone runs out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file
from shared import SKYLITE, argument_parser, machine_info, set_flags

from skylite.run.files import write_json
from skylite.run.metrics_file import read_metrics
from skylite.run.run_dir import RunDir, published_versions

GRID = {"lora.rank": "8,32", "optim.lr": "5e-5,1.5e-4"}
PARTS = ("time/rollout_s", "time/train_s", "time/sync_s", "time/overlap_s", "time/step_s")


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        found = [measure(Path(scratch), number, args) for number in args.policies]
    if args.out:
        write_json(args.out, machine_info() | {"steps": args.steps, "rows": found})


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--policies", type=int, nargs="+", default=[4], help="multiples of 2")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--data", type=Path, default=Path("data/gsm8k-synthetic"))
    parser.add_argument("--set", action="append", default=[], help="a setting of all policies, name=value")
    parser.add_argument("--alone", type=int, help="default: all")
    parser.add_argument("--scratch", type=Path, help="folder for the runs (default: the temporary folder)")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def measure(scratch: Path, number: int, args: argparse.Namespace) -> dict[str, Any]:
    folder = scratch / f"sweep-{number}"
    common = ["--recipe", "gsm8k_cpu", "--data", str(args.data), *set_flags(every_policy(args))]
    together = timed([*SKYLITE, "sweep", *common, *grid_flags(number), "--out", str(folder)])
    policies = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))["policies"]
    row: dict[str, Any] = {"policies": len(policies), "together": together | parts(folder, policies)}
    if args.alone != 0:
        some = dict(list(policies.items())[: args.alone])
        row |= in_turn(scratch / f"alone-{number}", folder, some, common, together, len(policies))
    print(json.dumps(row), flush=True)
    return row


def every_policy(args: argparse.Namespace) -> dict[str, object]:
    chosen = dict(word.split("=", 1) for word in args.set)
    return {
        "num_steps": args.steps, "eval.limit": 0, "sync.keep_last": args.steps + 1,
        "trainer.deterministic": "true", **chosen,
    }  # fmt: skip


def grid_flags(number: int) -> list[str]:
    """2 policies: the ranks. More: ranks by rates, by as many seeds as needed."""
    varied = dict(list(GRID.items())[: 1 if number == 2 else 2])
    flags = [word for name, values in varied.items() for word in ("--grid", f"{name}={values}")]
    return flags if number <= 4 else [*flags, "--seeds", ",".join(map(str, range(number // 4)))]


def in_turn(
    root: Path,
    sweep: Path,
    policies: Mapping[str, Any],
    common: Sequence[str],
    together: Mapping[str, float],
    number: int,
) -> dict[str, Any]:
    """The lone runs one after the other, and what `number` of them cost beside the sweep."""
    root.mkdir()
    runs = {
        name: timed([*SKYLITE, "train", *common, *set_flags(values), "--run", str(root / name)])
        for name, values in policies.items()
    }
    factor = number / len(policies)
    total = {
        key: round(factor * sum(run[key] for run in runs.values()), 3)
        for key in ("wall_s", "cpu_s", "peak_pss_gib")
    }
    return {
        "in_turn": {"runs": runs, "sum": total} | parts(root, policies),
        "together_over_in_turn": {key: round(together[key] / total[key], 3) for key in total},
        "adapters": {name: compare(sweep / name, root / name) for name in policies},
    }


def timed(command: Sequence[str]) -> dict[str, float]:
    """Runs the command to its end. CPU seconds are those of all processes below it that were waited for."""
    started, before = time.monotonic(), cpu_seconds()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, pss(process.pid))
        time.sleep(5)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return {
        "wall_s": round(time.monotonic() - started, 1),
        "cpu_s": round(cpu_seconds() - before, 1),
        "peak_pss_gib": round(peak / 2**30, 3),
    }


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def pss(pid: int) -> int:
    """Bytes of a process and all below it. One that ends meanwhile counts as nothing."""
    try:
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(map(own_pss, tree))


def own_pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except (psutil.Error, OSError):
        return 0


def parts(root: Path, policies: Mapping[str, Any]) -> dict[str, Any]:
    """Where the time goes: seconds by part, summed over all steps of all policies."""
    metrics = [m for name in policies for m in read_metrics(RunDir(root / name).metrics_path)]
    return {"parts_s": {part: round(sum(m.get(part, 0.0) for m in metrics), 1) for part in PARTS}}


def compare(ours: Path, alone: Path) -> dict[str, Any]:
    """How many versions are the same files, how far apart the last are, and the mean rewards of each step."""
    pairs = list(zip(versions(ours), versions(alone), strict=True))
    equal = [a.version for a, b in pairs if digest(a.weights_path) == digest(b.weights_path)]
    rewards = [
        [m["reward/mean"] for m in read_metrics(RunDir(folder).metrics_path)] for folder in (ours, alone)
    ]
    found = {"versions": len(pairs), "equal": len(equal), "rewards": rewards}
    return found | {
        "last_relative_difference": distance(pairs[-1][0].weights_path, pairs[-1][1].weights_path)
    }


def versions(run: Path) -> list[Any]:
    return list(published_versions(RunDir(run).default_adapters))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def distance(ours: Path, alone: Path) -> float:
    """Norm of the difference of two adapters over the norm of the second."""
    a, b = load_file(ours), load_file(alone)
    difference = math.sqrt(sum(float((a[name] - b[name]).square().sum()) for name in b))
    return round(difference / math.sqrt(sum(float(t.square().sum()) for t in b.values())), 6)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
