"""Distillation against GRPO and SFT from equally many sampled tokens: held-out accuracy by step.

    python benchmarks/distillation.py --teacher RUN --data data/gsm8k-synthetic --runs FOLDER --out FILE

RUN: a finished run of `make lora-gsm8k`, whose last adapter teaches. Three students, each with every seed:

- opd: 8 prompts x 4 completions a step, scored by the teacher, no reward.
- grpo: 4 prompts x 8 completions a step, scored by the reward, no teacher.
- sft: 32 completions a step that the teacher sampled in its last steps; the student samples nothing.

Rank 32, lr 1.5e-4, 20 steps, so 640 completions each. Accuracy: greedy pass@1 on 512 held-out problems after
0, 10 and 20 steps. opd and grpo measure it themselves; sft, which starts no engine, by `skylite eval`. Runs
that exist are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from shared import SKYLITE, argument_parser, machine_info, set_flags

from skylite.config.loading import read_run_config
from skylite.run.files import write_json
from skylite.run.metrics_file import held_out_scores, read_metrics
from skylite.run.run_dir import RunDir, published_versions

STEPS, PER_STEP, PROBLEMS = 20, 32, 512
COMMON = {"lora.rank": 32, "lora.alpha": 32, "optim.lr": 1.5e-4, "num_steps": STEPS}
SAMPLED = {"eval.limit": PROBLEMS, "eval.every": STEPS // 2}


def main() -> None:
    args = parse_arguments()
    teacher = RunDir(args.teacher.resolve())
    adapter = published_versions(teacher.default_adapters)[-1].path
    students: dict[str, tuple[str, Path, Mapping[str, object]]] = {
        "opd": (
            "opd_cpu",
            args.data,
            {
                "algorithm.teacher": adapter,
                "rollout.prompts_per_step": 8,
                "rollout.group_size": 4,
                **SAMPLED,
            },
        ),
        "grpo": ("gsm8k_cpu", args.data, {"rollout.prompts_per_step": 4, "rollout.group_size": 8, **SAMPLED}),
        "sft": (
            "sft_cpu",
            teachers_completions(teacher, args.runs),
            {"rollout.prompts_per_step": PER_STEP, "eval.limit": 0, "sync.keep_last": STEPS + 1},
        ),
    }
    for seed in args.seeds:
        for name, (recipe, data, settings) in students.items():
            run = args.runs / f"{name}-{seed}"
            if not run.exists():
                words = ["train", "--recipe", recipe, "--data", str(data), "--run", str(run)]
                skylite(*words, *set_flags({**COMMON, **settings, "seed": seed}))
    found = [
        row(RunDir((args.runs / f"{n}-{seed}").resolve()), args.data) for n in students for seed in args.seeds
    ]
    config = read_run_config(teacher.config_path).config
    write_json(args.out, machine_info() | {"teacher": held_out_scores(teacher, config.eval), "runs": found})


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def skylite(*words: str) -> None:
    subprocess.run([*SKYLITE, *words], check=True)


def teacher_steps(teacher: RunDir) -> int:
    return published_versions(teacher.default_adapters)[-1].version


def teachers_completions(teacher: RunDir, runs: Path) -> Path:
    """Prepared chats: the last completions of the teacher's run that ended by themselves."""
    data, chats = runs / "sft-data", list[dict[str, Any]]()
    for step in range(teacher_steps(teacher), 0, -1):
        rows = pq.read_table(teacher.rollout_path(step)).to_pylist()
        chats += [chat(r) for r in rows if r["finish_reason"] == "stop"]
        if len(chats) >= STEPS * PER_STEP:
            break
    if not data.exists():
        runs.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(c) for c in chats[: STEPS * PER_STEP]]
        (runs / "chats.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        skylite("prepare", str(runs / "chats.jsonl"), "--sft", "--out", str(data))
    return data


def chat(row: Mapping[str, Any]) -> dict[str, Any]:
    turns = [("user", row["question"]), ("assistant", row["completion"])]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def row(run: RunDir, data: Path) -> dict[str, Any]:
    """The curve of one run, with standard errors, and what a step cost."""
    config, metrics = read_run_config(run.config_path).config, read_metrics(run.metrics_path)
    curve = curve_of(run, data)
    return {
        "algorithm": config.algorithm.name,
        "seed": config.seed,
        "accuracy": curve,
        "standard_error": {step: round(math.sqrt(p * (1 - p) / PROBLEMS), 4) for step, p in curve.items()},
        "completion_tokens": sum(m.get("tokens/completion", 0) for m in metrics),
        "step_s": median(metrics, "time/step_s"),
        "train_s": median(metrics, "time/train_s"),
        "teacher_s": median(metrics, "time/teacher_s"),
        "reward_mean": [round(m["reward/mean"], 4) for m in metrics if "reward/mean" in m],
        "teacher_kl": [round(m["teacher/kl"], 4) for m in metrics if "teacher/kl" in m],
    }


def median(metrics: list[dict[str, Any]], name: str) -> float | None:
    values = [m[name] for m in metrics if name in m]
    return round(statistics.median(values), 3) if values else None


def curve_of(run: RunDir, data: Path) -> dict[int, float]:
    """Accuracy after 0, 10 and 20 steps, measured now if the run did not."""
    config, steps = read_run_config(run.config_path).config, (0, STEPS // 2, STEPS)
    own = held_out_scores(run, config.eval) if config.source.name != "offline" else {}
    if not set(steps) <= set(own):
        words = [
            "eval",
            str(run.root),
            "--steps",
            ",".join(map(str, steps)),
            "--limit",
            str(PROBLEMS),
            "--json",
        ]
        words += [
            "--data",
            str(data),
            *set_flags({"data.difficulty": [1], "rollout.max_completion_tokens": 32}),
        ]
        done = subprocess.run([*SKYLITE, *words], check=True, stdout=subprocess.PIPE, text=True)
        own = {e["version"]: e["mean"] for e in json.loads(done.stdout)["results"]}
    return {step: round(own[step], 4) for step in steps}


if __name__ == "__main__":
    main()
