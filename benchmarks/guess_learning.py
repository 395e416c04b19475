"""Does a game of several turns teach the model? Train guess_cpu with several guesses, and with one.

    skylite prepare guess --synthetic
    python benchmarks/guess_learning.py --runs runs/guess --out benchmarks/results/guess_learning_cpu.json

With one guess the run has the same data, steps and episodes. Found: share of held-out games in which a greedy
model finds the number, with its 95 % interval. Reward: mean over a step's games with 1.96 standard errors
over its groups. Existing runs are not trained again.
"""

from __future__ import annotations

import statistics
import subprocess
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from command_line import SKYLITE, argument_parser, set_flags
from machine_info import machine_info

from skylite.evaluation.confidence_interval import mean_score
from skylite.run.files import write_json
from skylite.run.metrics_file import read_metrics
from skylite.run.rollout_file import read_rollouts
from skylite.run.run_dir import RunDir


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, default=Path("data/guess"))
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--turns", nargs="+", type=int, default=[4, 1])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for turns in args.turns:
        for seed in args.seeds:
            run = args.runs / f"turns-{turns}-seed-{seed}"
            if not run.exists():
                train(run, args.data, seed, turns, args.steps)
            rows.append({"turns": turns, "seed": seed, **figures(RunDir(run.resolve()))})
            print({key: value for key, value in rows[-1].items() if key != "reward"}, flush=True)
    if args.out is not None:
        write_json(args.out, machine_info() | {"runs": rows})


def train(run: Path, data: Path, seed: int, turns: int, steps: int) -> None:
    """Raises CalledProcessError if the run fails."""
    words = ["train", "--recipe", "guess_cpu", "--data", str(data), "--run", str(run), "--seed", str(seed)]
    words += ["--steps", str(steps), *set_flags({"env.max_turns": turns, "env.limit_reward": 0.0})]
    subprocess.run([*SKYLITE, *words], check=True)


def figures(run: RunDir) -> dict[str, Any]:
    metrics = read_metrics(run.metrics_path)
    return {
        "found": {label: found(run, label) for label in ("before", "after")},
        "reward": [reward(run, m["step"]) for m in metrics],
        "turns_mean": [round(m["turns/mean"], 2) for m in metrics],
        "minutes": round(sum(m["time/step_s"] for m in metrics) / 60, 1),
    }


def found(run: RunDir, label: str) -> dict[str, float]:
    """Share of the games, and its interval."""
    (file,) = run.evals.glob(f"{label}-v*.parquet")
    rows = pq.read_table(file).to_pylist()
    share = mean_score([[row["reward"]] for row in rows])
    return {"mean": round(share.mean, 4), "low": round(share.low, 4), "high": round(share.high, 4)}


def reward(run: RunDir, step: int) -> dict[str, float]:
    """Mean over the groups and 1.96 standard errors."""
    means = [
        statistics.fmean(t.reward for t in group.trajectories)
        for group in read_rollouts(run.rollout_path(step))
    ]
    error = statistics.stdev(means) / len(means) ** 0.5
    return {"mean": round(statistics.fmean(means), 4), "half_interval": round(1.96 * error, 4)}


if __name__ == "__main__":
    main()
