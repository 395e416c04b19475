"""Does every algorithm learn? Train the CPU recipe with each, and collect held-out accuracy.

    python benchmarks/learning.py train --data data/gsm8k-synthetic --runs runs/learning --algorithms dapo ppo
    python benchmarks/learning.py collect runs/learning/* --machine "2 cores ..." --out learning.json

Accuracy: greedy pass@1 on the recipe's held-out problems, measured by the run itself. Minutes: training
steps only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from shared import SKYLITE, argument_parser, commit

from skylite.config.loading import read_run_config
from skylite.run.files import write_json
from skylite.run.metrics_file import read_metrics
from skylite.run.run_dir import RunDir

ALGORITHMS = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce++", "ppo"]


def main() -> None:
    parser = argument_parser(__doc__)
    commands = parser.add_subparsers(required=True)
    train = commands.add_parser("train")
    train.add_argument("--data", type=Path, required=True)
    train.add_argument("--runs", type=Path, required=True)
    train.add_argument("--algorithms", nargs="+", default=ALGORITHMS)
    train.add_argument("--seeds", nargs="+", type=int, default=[0])
    train.add_argument("--steps", type=int, default=20)
    train.add_argument("--set", nargs="*", default=[], help="more settings, as for skylite train --set")
    train.set_defaults(run=train_all)
    collect = commands.add_parser("collect")
    collect.add_argument("runs", nargs="+", type=Path)
    collect.add_argument("--machine", required=True, help="in words")
    collect.add_argument("--out", type=Path, required=True)
    collect.set_defaults(
        run=lambda args: write_json(args.out, [row(RunDir(p.resolve()), args.machine) for p in args.runs])
    )
    args = parser.parse_args()
    args.run(args)


def train_all(args: argparse.Namespace) -> None:
    """Train one run after the other and record its commit. Existing runs stay as they are."""
    for algorithm in args.algorithms:
        for seed in args.seeds:
            run = args.runs / f"{algorithm}-seed{seed}"
            if run.exists():
                continue
            words = (
                f"train --recipe gsm8k_cpu --rank 32 --alpha 32 --seed {seed} --steps {args.steps}".split()
            )
            words += ["--data", str(args.data), "--run", str(run)]
            for setting in (f"algorithm.name={algorithm}", *args.set):
                words += ["--set", setting]
            done = subprocess.run([*SKYLITE, *words], check=False)
            record = {
                "commit": commit(),
                "command": " ".join(["skylite", *words]),
                "exit_code": done.returncode,
            }
            write_json(run / "learning.json", record)


def row(run: RunDir, machine: str) -> dict[str, Any]:
    """The numbers of one finished run."""
    config, metrics = read_run_config(run.config_path).config, read_metrics(run.metrics_path)
    record_path = run.root / "learning.json"
    record = json.loads(record_path.read_text(encoding="utf-8")) if record_path.exists() else {}
    return {
        "algorithm": config.algorithm.name,
        "seed": config.seed,
        "steps": len(metrics),
        "accuracy_before": accuracy(run, "before"),
        "accuracy_after": accuracy(run, "after"),
        "problems": config.eval.limit,
        "minutes": round(sum(m["time/step_s"] for m in metrics) / 60, 2),
        "commit": record.get("commit"),
        "command": record.get("command"),
        "machine": machine,
        "reward_mean": [round(m.get("reward/sampled_mean", m["reward/mean"]), 4) for m in metrics],
        "entropy": [round(m["policy/entropy"], 4) for m in metrics],
        "completion_tokens_mean": [round(m["completion/tokens_mean"], 1) for m in metrics],
    }


def accuracy(run: RunDir, label: str) -> float | None:
    """Share of correct answers, None if the run was not evaluated at that point."""
    files = sorted(run.evals.glob(f"{label}-v*.parquet"))
    if not files:
        return None
    rewards = pq.read_table(files[-1], columns=["reward"])["reward"].to_pylist()
    return round(sum(bool(r == 1.0) for r in rewards) / len(rewards), 4)


if __name__ == "__main__":
    main()
