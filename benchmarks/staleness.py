"""What does sampling ahead give? Train the CPU recipe with several values of rollout.max_staleness, in turn.

    python benchmarks/staleness.py --data data/gsm8k-synthetic --runs runs/staleness --out staleness.json
    python benchmarks/staleness.py --data data/gsm8k-synthetic --runs runs/staleness --out staleness.json \\
        --steps 8 --set eval.limit=0        # seconds alone

Ratios are to the run with the same seed that takes turns (0). A side is idle in a sample of its processes'
CPU time, every half second from the first to the last step, in which it used less than a tenth of a core.
Finished runs stay: call it again to go on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
from learning import accuracy
from shared import SKYLITE, argument_parser, machine_info, set_flags

from skylite.run.files import write_json
from skylite.run.metrics_file import read_metrics
from skylite.run.run_dir import RunDir

PERIOD_S = 0.5
BUSY_CORES = 0.1
SIDES = ("engine-0", "trainer")
"""Names of child processes in status.json."""
IDLE = "idle.json"
"""Written into the folder of a run when it has ended."""


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 2, 4])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--set", nargs="*", default=[], help="more settings, as for skylite train --set")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = [
        row(train(args, seed, staleness), seed, staleness)
        for seed in args.seeds
        for staleness in args.staleness
    ]
    first = {r["seed"]: r["step_s"] for r in rows if r["staleness"] == 0}
    for r in rows:
        r["step_ratio"] = round(r["step_s"] / first[r["seed"]], 3) if r["seed"] in first else None
        print(json.dumps(r))
    write_json(args.out, {**machine_info(), "rows": rows})


def train(args: argparse.Namespace, seed: int, staleness: int) -> RunDir:
    """Train one run, and record the idle shares beside it. A finished one stays, others start again."""
    run = RunDir((args.runs / f"staleness{staleness}-seed{seed}").resolve())
    if (run.root / IDLE).exists():
        return run
    shutil.rmtree(run.root, ignore_errors=True)
    settings = dict(setting.split("=", 1) for setting in args.set)
    words = ["train", "--recipe", "gsm8k_cpu", "--data", str(args.data), "--run", str(run.root)]
    words += ["--seed", str(seed), "--steps", str(args.steps)]
    words += set_flags({"rollout.max_staleness": staleness, **settings})
    with subprocess.Popen([*SKYLITE, *words]) as process:
        shares = idle_shares(process, run, args.steps)
    if process.returncode:
        raise SystemExit(f"the run ended with exit code {process.returncode}")
    write_json(run.root / IDLE, shares)
    return run


def idle_shares(process: subprocess.Popen[bytes], run: RunDir, num_steps: int) -> dict[str, float]:
    """Share of the samples in which each side was idle, from the end of step 1 to that of the last step."""
    idle: dict[str, list[bool]] = {side: [] for side in SIDES}
    before: dict[str, float] = {}
    while process.poll() is None:
        time.sleep(PERIOD_S)
        steps = len(read_metrics(run.metrics_path)) if run.metrics_path.exists() else 0
        if not 1 <= steps < num_steps:
            before = {}
            continue
        pids = json.loads(run.status_path.read_text(encoding="utf-8"))["pids"]
        used = {side: cpu_seconds(pids[side]) for side in SIDES if side in pids}
        for side, seconds in used.items():
            if side in before:
                idle[side].append(seconds - before[side] < BUSY_CORES * PERIOD_S)
        before = used
    return {side: round(statistics.mean(samples), 3) for side, samples in idle.items() if samples}


def cpu_seconds(pid: int) -> float:
    """CPU seconds that a process and those below it have used so far."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):  # the run ends, and its processes with it
        parent = psutil.Process(pid)
        for process in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
    return total


def row(run: RunDir, seed: int, staleness: int) -> dict[str, Any]:
    """The numbers of a finished run. Step 1 is left out of medians and means: nothing ran ahead of it."""
    later = read_metrics(run.metrics_path)[1:]
    tokens = [m["completion/tokens_mean"] for m in later]
    return {
        "staleness": staleness,
        "seed": seed,
        "steps": len(later) + 1,
        "step_s": round(statistics.median(m["time/step_s"] for m in later), 2),
        "minutes": round(sum(m["time/step_s"] for m in later) / 60, 2),
        "idle": json.loads((run.root / IDLE).read_text(encoding="utf-8")),
        "mismatch_kl": float(f"{statistics.mean(m['mismatch/kl'] for m in later):.2g}"),
        "versions_behind": round(statistics.mean(m["staleness/mean"] for m in later), 2),
        "completion_tokens": round(statistics.mean(tokens), 1),
        "reward_last_5": round(statistics.mean(m["reward/mean"] for m in later[-5:]), 3),
        "accuracy_before": accuracy(run, "before"),
        "accuracy_after": accuracy(run, "after"),
    }


if __name__ == "__main__":
    main()
