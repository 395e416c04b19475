"""Does every algorithm learn? Trains the CPU recipe with each, collects held-out accuracy before and after, draws the reward curves.

    python benchmarks/learning.py train --data data/gsm8k-synthetic --runs runs/learning --algorithms dr_grpo dapo ppo --seeds 0
    python benchmarks/learning.py collect runs/learning/* runs/seed0 --machine "2 cores ..." --out benchmarks/results/learning.json
    python benchmarks/learning.py plot benchmarks/results/learning.json benchmarks/results/learning.svg      (needs the bench extra)

Accuracy: greedy pass@1 on the recipe's held-out problems, as the run itself measured it. Minutes: the steps alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from skylite.config.loading import read_run_config
from skylite.run.files import write_json
from skylite.run.metrics import read_metrics
from skylite.run.run_dir import RunDir

ALGORITHMS = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce++", "ppo"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    train = commands.add_parser("train")
    train.add_argument("--data", type=Path, required=True)
    train.add_argument("--runs", type=Path, required=True)
    train.add_argument("--algorithms", nargs="+", default=ALGORITHMS)
    train.add_argument("--seeds", nargs="+", type=int, default=[0])
    train.add_argument("--steps", type=int, default=20)
    train.add_argument("--set", nargs="*", default=[], help="further settings, as with skylite train --set")
    train.set_defaults(run=train_all)
    collect = commands.add_parser("collect")
    collect.add_argument("runs", nargs="+", type=Path)
    collect.add_argument("--machine", required=True, help="in words")
    collect.add_argument("--out", type=Path, required=True)
    collect.set_defaults(
        run=lambda args: write_json(args.out, [row(RunDir(p.resolve()), args.machine) for p in args.runs])
    )
    plot = commands.add_parser("plot")
    plot.add_argument("results", type=Path)
    plot.add_argument("picture", type=Path)
    plot.set_defaults(run=draw)
    args = parser.parse_args()
    args.run(args)


def train_all(args: argparse.Namespace) -> None:
    """One run after the other; each notes the commit it ran at. A run that is there already is left alone."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    for algorithm in args.algorithms:
        for seed in args.seeds:
            run = args.runs / f"{algorithm}-seed{seed}"
            if run.exists():
                continue
            command = [
                "skylite",
                "train",
                "--recipe",
                "gsm8k_cpu",
                "--data",
                str(args.data),
                "--rank",
                "32",
                "--alpha",
                "32",
            ]
            command += [
                "--seed",
                str(seed),
                "--steps",
                str(args.steps),
                "--run",
                str(run),
                "--set",
                f"algorithm.name={algorithm}",
            ]
            command += [word for setting in args.set for word in ("--set", setting)]
            done = subprocess.run([str(Path(sys.executable).with_name("skylite")), *command[1:]], check=False)
            write_json(
                run / "learning.json",
                {"commit": commit, "command": " ".join(command), "exit_code": done.returncode},
            )


def row(run: RunDir, machine: str) -> dict[str, Any]:
    """One finished run."""
    config, metrics = read_run_config(run.config_path).config, read_metrics(run.metrics_path)
    note = run.root / "learning.json"
    made = json.loads(note.read_text(encoding="utf-8")) if note.exists() else {}
    return {
        "algorithm": getattr(config, "algorithm", None) and config.algorithm.name,
        "seed": config.seed,
        "steps": len(metrics),
        "accuracy_before": accuracy(run, "before"),
        "accuracy_after": accuracy(run, "after"),
        "problems": config.eval.limit,
        "minutes": round(sum(m["time/step_s"] for m in metrics) / 60, 2),
        "commit": made.get("commit"),
        "command": made.get("command"),
        "machine": machine,
        "reward_mean": [round(m.get("reward/sampled_mean", m["reward/mean"]), 4) for m in metrics],
        "entropy": [round(m["policy/entropy"], 4) for m in metrics],
        "completion_tokens_mean": [round(m["completion/tokens_mean"], 1) for m in metrics],
    }


def accuracy(run: RunDir, label: str) -> float | None:
    """Share of right answers, None where the run was not evaluated then."""
    files = sorted(run.evals.glob(f"{label}-v*.parquet"))
    if not files:
        return None
    rewards = pq.read_table(files[-1], columns=["reward"])["reward"].to_pylist()
    return round(sum(r == 1.0 for r in rewards) / len(rewards), 4)


def draw(args: argparse.Namespace) -> None:
    """Reward over steps, a line a run; the algorithms' first seeds in front."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    rows = json.loads(args.results.read_text(encoding="utf-8"))
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    names = list(dict.fromkeys(r["algorithm"] for r in rows))
    colours = {name: plt.get_cmap("tab10")(i % 10) for i, name in enumerate(names)}
    labelled: set[str] = set()
    for r in rows:
        name = r["algorithm"]
        steps = range(1, len(r["reward_mean"]) + 1)
        axes.plot(
            steps,
            r["reward_mean"],
            color=colours[name],
            alpha=0.5 if name in labelled else 1,
            label=None if name in labelled else name,
        )
        labelled.add(name)
    axes.set(xlabel="step", ylabel="mean reward of the step's samples (temperature 1)", ylim=(0, 1))
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(args.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
