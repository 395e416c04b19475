"""Summarise finished runs: accuracy before and after, entropy, length, cost of the sync, canary and logprob
gaps.

    python benchmarks/collect_runs.py runs/a runs/b --machine "2 cores ..." --commit HASH --out FILE

Reads metrics.jsonl, config.json and the greedy evaluations in evals/ of each run. Accuracy of sampled
completions is included if both of these ran before: `skylite eval RUN --step 0 --n 4 --limit 512`, `skylite
eval RUN --n 4 --limit 512`.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from command_line import argument_parser

from skylite.config.loading import read_run_config
from skylite.evaluation.confidence_interval import wilson
from skylite.run.metrics_file import read_metrics
from skylite.run.run_dir import RunDir, adapter_name

SPREAD = (
    "canary/gap_max",
    "mismatch/logprob_diff_mean",
    "mismatch/logprob_diff_max",
    "sync/publish_and_load_frac",
)
MEANS = (
    "time/publish_s",
    "time/load_s",
    "time/canary_s",
    "time/rollout_s",
    "time/train_s",
    "time/step_s",
    "adapter/bytes",
)
COURSE = ("reward/mean", "policy/entropy", "completion/tokens_mean")


def main() -> None:
    """Parse the command line and write the result file."""
    parser = argument_parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--machine", required=True, help="in words, e.g. '2 cores AMD EPYC (Zen 3), no GPU'")
    parser.add_argument("--commit", required=True)
    arguments = parser.parse_args()
    rows = [summary(RunDir(path.resolve())) for path in arguments.runs]
    value = {"machine": arguments.machine, "commit": arguments.commit, "runs": rows}
    arguments.out.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(json.dumps({k: row[k] for k in ("seed", "greedy", "sampled", "training_minutes")}))


def summary(run: RunDir) -> dict[str, Any]:
    """The numbers of one run."""
    config = read_run_config(run.config_path).config
    metrics = read_metrics(run.metrics_path)
    last = config.num_steps
    return {
        "run": run.root.name,
        "seed": config.seed,
        "steps": len(metrics),
        "lr": config.optim.lr,
        "greedy": {"before": greedy(run, 0), "after": greedy(run, last)},
        "sampled": {"before": evaluated(run, 0, "mean4"), "after": evaluated(run, last, "mean4")},
        "training_minutes": round(sum(m["time/step_s"] for m in metrics) / 60, 2),
        **{key: [round(m[key], 4) for m in metrics] for key in COURSE},
        **{
            key: {"mean": statistics.fmean(m[key] for m in metrics), "max": max(m[key] for m in metrics)}
            for key in SPREAD
        },
        **{key: statistics.fmean(m[key] for m in metrics) for key in MEANS},
    }


def greedy(run: RunDir, version: int) -> dict[str, float] | None:
    """Greedy pass@1, from the run's own evaluation or from `skylite eval`."""
    files = sorted(run.evals.glob(f"*-v{version:06d}.parquet"))
    if not files:
        return evaluated(run, version, "greedy")
    rewards = pq.read_table(files[0], columns=["reward"])["reward"].to_pylist()
    found = wilson(sum(r == 1.0 for r in rewards), len(rewards))
    return {"accuracy": found.mean, "standard_error": found.standard_error, "problems": found.num_problems}


def evaluated(run: RunDir, version: int, kind: str) -> dict[str, float] | None:
    """Result of `skylite eval`, None if it did not run."""
    path = run.evals / f"{adapter_name(version)}-test-{kind}.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    kept = ("standard_error", "problems", "completion_tokens_mean")
    return {"accuracy": found["mean"]} | {k: found[k] for k in kept}


if __name__ == "__main__":
    main()
