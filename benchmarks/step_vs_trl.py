"""Compare a training step with TRL's GRPOTrainer and PEFT on the same work.

    python benchmarks/step_vs_trl.py --gsm8k FOLDER_WITH_train.jsonl --out benchmarks/results/step_vs_trl.json

A step: 4 GSM8K prompts x 8 completions of at most 128 tokens, LoRA rank 32, temperature 1. Both sides get
the same model, prompts, dtype and threads, and by default the same memory allocator; --trl-allocator plain
gives TRL glibc's. TRL samples with transformers' generate, as it does without a GPU. --trl-checkpointing
turns on TRL's default, activation checkpointing. The sides take turns (--rounds), each in its own process.
The first step of each side is not counted. Ratios are TRL's median over skylite's.

The reward differs within every group: GSM8K's own is almost always 0 for this model, and skylite skips
groups without a gradient, while TRL does not.

mfu: MFU of skylite's train phase, computed as in train_phase.py. The peak is measured between the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared import SKYLITE, argument_parser, machine_info, train_command
from sync import plain_io

from skylite.hub.resolve import resolve_model
from skylite.processes.hardware import cpu_cores
from skylite.processes.torchrun import trainer_env
from skylite.run.files import write_json
from skylite.run.metrics_file import read_metrics
from skylite.run.run_dir import RunDir, published_versions

NUM_QUESTIONS = 64
METRICS = {
    "step_s": "time/step_s",
    "sample_s": "time/rollout_s",
    "train_s": "time/train_s",
    "publish_s": "time/publish_s",
    "load_s": "time/load_s",
    "canary_s": "time/canary_s",
    "overhead_s": "time/overhead_s",
    "completion_tokens": "tokens/completion",
    "tokens_total": "tokens/total",
    "tokens_computed": "tokens/unique",
}
"""Names in the result file, and the metrics they come from."""
REWARD = """def score(completion, answer):
    return 1.0 if completion.strip() == answer else len(completion) % 7 / 8
"""


def main() -> None:
    args = parse_arguments()
    model = resolve_model(args.model).path
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        data = prepare(args.gsm8k, Path(folder))
        peaks = [matrix_peak(args)]
        ours: list[dict[str, float]] = []
        theirs: list[dict[str, float]] = []
        for index in range(args.rounds):
            ours += skylite_steps(args, data, Path(folder, f"run{index}"))
            peaks.append(matrix_peak(args))
            theirs += trl_steps(args, model, data)
            peaks.append(matrix_peak(args))
            print(json.dumps(compared(ours, theirs), indent=1), flush=True)
        io = plain_io(published_versions(RunDir(Path(folder, "run0")).default_adapters)[-1].weights_path)
    mfu = utilisation(model, ours, statistics.median(peaks))
    result = {
        **compared(ours, theirs),
        **mfu,
        **sync_share(ours, io["write_s"] + io["read_s"]),
        **lora_sampling(),
        **machine_info(),
        "dtype": args.dtype,
        "checkpointing": args.checkpointing,
        "trl_allocator": args.trl_allocator,
        "skylite_steps": ours,
        "trl_steps": theirs,
    }
    print(json.dumps({k: v for k, v in result.items() if not isinstance(v, list)}, indent=1))
    if args.out:
        write_json(args.out, result)


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--gsm8k", type=Path, required=True, help="folder with train.jsonl as released")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="per round and side; the first is not counted")
    parser.add_argument("--budget", type=int, default=1200, help="skylite's trainer.tokens_per_micro_batch")
    parser.add_argument(
        "--checkpointing",
        choices=["none", "selective", "full"],
        default="selective",
        help="skylite's trainer.checkpointing",
    )
    parser.add_argument("--trl-micro", type=int, default=8, help="TRL's per_device_train_batch_size")
    parser.add_argument("--trl-checkpointing", action="store_true")
    parser.add_argument("--trl-allocator", choices=["ours", "plain"], default="ours")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def prepare(gsm8k: Path, folder: Path) -> Path:
    """Prepare a data set of the questions. Both sides read their prompts from it."""
    questions, reward, out = folder / "questions.jsonl", folder / "reward.py", folder / "data"
    lines = (gsm8k / "train.jsonl").read_text(encoding="utf-8").splitlines()[:NUM_QUESTIONS]
    questions.write_text("\n".join(lines) + "\n", encoding="utf-8")
    os.environ["XDG_STATE_HOME"] = str(
        folder
    )  # skylite remembers named rewards there; keep the user's list clean
    reward.write_text(REWARD, encoding="utf-8")
    columns = ["--question", "question", "--answer", "answer", "--reward", f"{reward}:score"]
    subprocess.run([*SKYLITE, "prepare", str(questions), *columns, "--out", str(out)], check=True)
    return out


def skylite_steps(args: argparse.Namespace, data: Path, run: Path) -> list[dict[str, float]]:
    """skylite's steps without the first and the last, which waits for a checkpoint and samples nothing."""
    settings = {
        "model.name": args.model,
        "model.dtype": args.dtype,
        "lora.rank": 32,
        "lora.alpha": 32,
        "rollout.prompts_per_step": 4,
        "rollout.group_size": 8,
        "rollout.max_completion_tokens": 128,
        "rollout.max_prompt_tokens": 512,
        "optim.lr": 1e-4,
        "engine.kv_cache_gib": 0.5,
        "trainer.tokens_per_micro_batch": args.budget,
        "trainer.checkpointing": args.checkpointing,
        "num_steps": args.steps + 1,
        "eval.limit": 0,
    }
    subprocess.run(train_command(run, data, settings), check=True)
    return counted_steps(run)


def counted_steps(run: Path) -> list[dict[str, float]]:
    """METRICS of the steps without the first, and without the last, which waits for a checkpoint."""
    return [
        {key: m[name] for key, name in METRICS.items()} | {"peak_gib": m["mem/rss_peak_bytes"] / 2**30}
        for m in read_metrics(RunDir(run).metrics_path)[1:-1]
    ]


def trl_steps(args: argparse.Namespace, model: Path, data: Path) -> list[dict[str, float]]:
    """TRL's steps without the first, from a process of its own."""
    words = ["--data", str(data), "--model", str(model), "--dtype", args.dtype, f"--steps={args.steps}"]
    words += [f"--trl-micro={args.trl_micro}", *(["--trl-checkpointing"] if args.trl_checkpointing else [])]
    ours = trainer_env(cpu_cores())
    plain = {name: ours[name] for name in ("HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS")}
    env = os.environ | (ours if args.trl_allocator == "ours" else plain)
    return run_trl(words, env)[1:]


def run_trl(words: Sequence[str], env: Mapping[str, str]) -> list[dict[str, float]]:
    """What trl_steps.py measures in each step."""
    command = [sys.executable, str(Path(__file__).with_name("trl_steps.py")), *words]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    steps: list[dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return steps


def compared(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, float]:
    """Ratios of medians. Each side samples its own completions, so their token counts are compared too."""

    def median(steps: list[dict[str, float]], key: str) -> float:
        return statistics.median(s[key] for s in steps)

    tokens = median(theirs, "completion_tokens") / median(ours, "completion_tokens")
    return {
        "step_ratio": round(median(theirs, "step_s") / median(ours, "step_s"), 2),
        "train_ratio": round(median(theirs, "train_s") / median(ours, "train_s"), 2),
        "sample_ratio": round(median(theirs, "sample_s") / median(ours, "sample_s"), 2),
        "completion_tokens_ratio": round(tokens, 3),
        "trainer_peak_gib": round(max(s["peak_gib"] for s in ours), 2),
        "trl_peak_gib": round(max(s["peak_gib"] for s in theirs), 2),
        "overhead_share": round(statistics.median(s["overhead_s"] / s["step_s"] for s in ours), 4),
    }


def matrix_peak(args: argparse.Namespace) -> float:
    """FLOP per second of a large matrix product on all threads, as in train_phase.py."""
    import torch
    import train_phase

    torch.set_num_threads(cpu_cores())
    return train_phase.matrix_peak(getattr(torch, args.dtype), torch.device("cpu"))


def utilisation(model: Path, ours: list[dict[str, float]], peak: float) -> dict[str, float]:
    """Median MFU of skylite's train phase; `peak` in FLOP per second."""
    import train_phase
    from accelerate import init_empty_weights
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights():
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model, local_files_only=True))
    linear = [m for n, m in base.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    weights = {
        "body": sum(m.weight.numel() for m in linear),
        "head": base.get_output_embeddings().weight.numel(),
        "lora": sum(32 * (m.in_features + m.out_features) for m in linear),
    }

    def flop(step: dict[str, float]) -> float:
        tokens = {"tokens/unique": step["tokens_computed"], "tokens/completion": step["completion_tokens"]}
        return train_phase.work(weights, tokens, is_tree=True)

    shares = statistics.median(flop(s) / s["train_s"] / peak for s in ours)
    return {"mfu": round(shares, 3), "matrix_gflops": round(peak / 1e9, 1)}


def lora_sampling() -> dict[str, Any]:
    """The stored result of lora_sampling.py; not measured here."""
    path = Path(__file__).parent / "results" / "lora_sampling_cpu.json"
    body = json.loads(path.read_text(encoding="utf-8"))
    return {
        "lora_vs_base": body["servers"]["skylite"]["lora_over_base"],
        "lora_vs_base_from": f"results/{path.name}",
    }


def sync_share(ours: list[dict[str, float]], io: float) -> dict[str, float]:
    """The sync (publish and load) as a share of the step and against `io`, seconds of plain file I/O."""
    seconds = statistics.median(s["publish_s"] + s["load_s"] for s in ours)
    share = statistics.median((s["publish_s"] + s["load_s"]) / s["step_s"] for s in ours)
    return {
        "sync_share": round(share, 4),
        "sync_s": round(seconds, 3),
        "plain_io_s": round(io, 3),
        "sync_vs_plain_io": round(seconds / io, 2),
    }


if __name__ == "__main__":
    main()
