"""Compare the default job on a CPU with TRL's GRPOTrainer and PEFT: same model, data, reward and settings.

    python benchmarks/default_job_vs_trl.py --out benchmarks/results/default_job_vs_trl.json

The job is recipes/gsm8k_cpu.toml: 16 prompts x 8 completions of at most 32 tokens, rank 32, float32. All its
prompts begin with the same worked examples, which skylite computes once. `plain` is the same job without
them. TRL samples with transformers' generate, as it does without a GPU, and computes --trl-micro completions
at a time. Both sides use the same memory allocator and threads. skylite's first step is not counted; TRL's
is, because its start is over before the first step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from command_line import SKYLITE, argument_parser
from machine_info import machine_info
from step_vs_trl import compared, counted_steps, run_trl

from skylite.config.loading import load_config
from skylite.config.train import TrainConfig
from skylite.hub.resolve import resolve_model
from skylite.processes.hardware import cpu_cores
from skylite.processes.torchrun import trainer_env
from skylite.run.files import write_json

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "gsm8k_cpu.toml"
EXAMPLES = "*FEW_SHOT, "
"""In data_prep/gsm8k.py: the worked examples of a prompt."""


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=2, help="of each side")
    parser.add_argument("--trl-micro", type=int, default=8, help="TRL's per_device_train_batch_size")
    parser.add_argument("--jobs", nargs="+", choices=["default", "plain"], default=["default", "plain"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        for job in args.jobs:
            data = prepare(job, Path(folder))
            ours = skylite_steps(data, Path(folder) / f"run-{job}", args.steps)
            print(json.dumps(ours), flush=True)
            theirs = trl_steps(data, load_config(RECIPE, {}), args)
            result[job] = {**compared(ours, theirs), "skylite_steps": ours, "trl_steps": theirs}
            print(job, json.dumps(result[job], indent=1), flush=True)
            if args.out is not None:
                write_json(args.out, machine_info() | {"trl_micro": args.trl_micro, "jobs": result})


def prepare(job: str, folder: Path) -> Path:
    """Generate the job's data; `plain` without the worked examples."""
    source, out = ROOT / "data_prep" / "gsm8k.py", folder / f"data-{job}"
    if job == "plain":
        text = source.read_text(encoding="utf-8")
        assert text.count(EXAMPLES) == 1
        source = folder / "plain_gsm8k.py"
        source.write_text(text.replace(EXAMPLES, ""), encoding="utf-8")
    os.environ["XDG_STATE_HOME"] = str(folder)  # skylite remembers named programs there
    subprocess.run([*SKYLITE, "prepare", str(source), "--synthetic", "--out", str(out)], check=True)
    return out


def skylite_steps(data: Path, run: Path, steps: int) -> list[dict[str, float]]:
    words = ["train", "--recipe", str(RECIPE), "--data", str(data), "--run", str(run)]
    words += ["--steps", str(steps + 2), "--set", "eval.limit=0", "--set", "data.difficulty=[1]"]
    subprocess.run([*SKYLITE, *words], check=True)
    return counted_steps(run)


def trl_steps(data: Path, config: TrainConfig, args: argparse.Namespace) -> list[dict[str, float]]:
    """The steps of trl_steps.py with the recipe's settings."""
    rollout = config.rollout
    flags = {
        "data": data,
        "model": resolve_model(config.model.name).path,
        "dtype": "float32",
        "steps": args.steps,
        "trl-micro": args.trl_micro,
        "batch": rollout.prompts_per_step * rollout.group_size,
        "completion-tokens": rollout.max_completion_tokens,
        "lr": config.optim.lr,
        "reward": "gsm8k",
    }
    words = [f"--{name}={value}" for name, value in flags.items()]
    words += ["--difficulty", *map(str, config.data.difficulty)]
    return run_trl(words, os.environ | trainer_env(cpu_cores()))


if __name__ == "__main__":
    main()
