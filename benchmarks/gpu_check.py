"""`make gpu-check`: the loop and the train phase on a GPU. Models are random: it needs no network.

    python benchmarks/gpu_check.py --out benchmarks/results/gpu.json
    python benchmarks/gpu_check.py --shapes tiny --skip-loop         (tests the script itself, on any machine)

1. Versions and devices.
2. The loop: `skylite train`, 3 steps of SmolLM2-135M on generated problems. The canary verifies every sync.
   Then sync.py on-policy and sampling ahead.
3. The train phase (train_phase.py) for shapes of Qwen2.5 0.5B, 1.5B and 7B: bfloat16, rank 32, three counted
   steps each, with and without activation checkpointing, with trainer.offload, and with
   trainer.attention=flex. Reports tokens per second, MFU, memory, and seconds to publish the adapter. Only
   step 2 times how an engine loads one.
4. compiled.py at the 0.5B shape: does torch.compile pay?

A part that fails is recorded with its reason, and the other parts still run. Several GPUs are not covered.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from command_line import SKYLITE, argument_parser
from machine_info import machine_info

from skylite.processes.hardware import choose_device
from skylite.run.files import write_json
from skylite.run.metrics_file import read_metrics

# hidden, intermediate, layers, heads, key-value heads, vocabulary, tied LM head, from each config.json
SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 512, True),
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4, 152064, False),
}
LOOP_KEYS = (
    "reward/mean",
    "canary/gap_max",
    "canary/projection",
    "mismatch/logprob_diff_mean",
    "time/step_s",
    "time/publish_s",
    "time/load_s",
)
COMPILED_SHAPE = "qwen2.5-0.5b"
SIZES = "--prompts 8 --group-size 8 --prompt 256 --completion 512 --budget 16384"
TINY_SIZES = "--prompts 2 --group-size 2 --prompt 8 --completion 8 --budget 512 --vocab 500"
HERE = Path(__file__).parent
REASON = re.compile(r"^.*?\b((?:[\w.]+Error|error): .+)$", re.MULTILINE)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--shapes", nargs="+", choices=list(SHAPES), default=[s for s in SHAPES if s != "tiny"]
    )
    parser.add_argument("--checkpointing", nargs="+", default=["none", "selective"])
    parser.add_argument("--skip-loop", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--make", nargs=2, metavar=("SHAPE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        make_model(args.make[0], Path(args.make[1]))
        return
    skipped = "not run: --skip-loop"
    ahead = ("--set", "rollout.max_staleness=1")
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "device": choose_device(),
        "loop": skipped if args.skip_loop else loop(),
        "sync": skipped if args.skip_loop else {"on-policy": sync(), "sampling ahead": sync(*ahead)},
        "compiled": f"not run: needs a GPU and --shapes {COMPILED_SHAPE}",
        "train_phase": {},
    }
    for shape in args.shapes:
        with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
            result["train_phase"][shape] = measured(shape, Path(folder), args.checkpointing)
            if shape == COMPILED_SHAPE and choose_device() == "cuda":
                flags = ["--model", f"{folder}/model", "--dtype", "bfloat16"]
                result["compiled"] = written_by("compiled.py", Path(folder), *flags)
        print(json.dumps({shape: result["train_phase"][shape]}), flush=True)
        if args.out:
            write_json(args.out, machine_info() | result)
    print(json.dumps(machine_info() | result, indent=1))


def loop() -> list[dict[str, float]] | dict[str, Any]:
    """Metrics of three training steps through the command line, or why they failed."""
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        data, run = Path(folder, "data"), Path(folder, "run")
        prepare = [*SKYLITE, "prepare", "gsm8k", "--synthetic", "--limit", "400", "--out", str(data)]
        train = [*SKYLITE, "train", "--recipe", "gsm8k_cpu", "--data", str(data), "--run", str(run)]
        if failed := failure_of(prepare) or failure_of([*train, "--steps", "3", "--set", "eval.limit=0"]):
            return failed
        return [{k: line[k] for k in LOOP_KEYS if k in line} for line in read_metrics(run / "metrics.jsonl")]


def sync(*flags: str) -> dict[str, Any]:
    """Result of sync.py: medians over five steps of a run."""
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        return written_by("sync.py", Path(folder), *flags)


def measured(shape: str, folder: Path, checkpointing: list[str]) -> list[dict[str, Any]]:
    """A row of train_phase.py for each mode of a random model in `folder`/model, or why it failed.

    Each mode is a process of its own, so that one that runs out of memory does not end the others.
    """
    # A process of its own too: its GPU memory must be free before the measurement.
    if failed := failure_of([sys.executable, __file__, "--make", shape, str(folder / "model")]):
        return [failed]
    on_gpu = choose_device() == "cuda"
    flags = ["--model", str(folder / "model"), "--dtype", "bfloat16" if on_gpu else "float32", "--publish"]
    flags += (TINY_SIZES if shape == "tiny" else SIZES).split()
    # FlexAttention has no backward pass on a CPU.
    flex = [("selective", False, "flex")] if on_gpu else []
    modes = [*((mode, False, "sdpa") for mode in checkpointing), ("selective", True, "sdpa"), *flex]
    rows = []
    for mode, offload, attention in modes:
        wanted = ["--checkpointing", mode, "--attention", attention, *(["--offload"] if offload else [])]
        found = written_by("train_phase.py", folder, *flags, *wanted)
        row = {"checkpointing": mode, "offload": offload, "attention": attention}
        rows.append(row | (found["rows"][0] if "rows" in found else found))
    return rows


def written_by(script: str, folder: Path, *flags: str) -> dict[str, Any]:
    """The result of another script in this folder, or why it failed."""
    out = folder / "out.json"
    out.unlink(missing_ok=True)
    failed = failure_of([sys.executable, str(HERE / script), *flags, "--out", str(out)])
    found: dict[str, Any] = failed or json.loads(out.read_text(encoding="utf-8"))
    return found


def failure_of(command: list[str]) -> dict[str, Any] | None:
    """How a command failed, None if it succeeded. The reason is the first error in its output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    output = done.stdout + done.stderr
    reason = REASON.search(output)
    failed = reason.group(1) if reason else output.strip().rpartition("\n")[2]
    return {"failed": failed, "exit_code": done.returncode, "last_lines": output[-2000:]}


def make_model(shape: str, folder: Path) -> None:
    """Save a Qwen2 model of this shape with random bfloat16 weights."""
    import torch
    import transformers

    hidden, intermediate, layers, heads, kv_heads, vocab, tied = SHAPES[shape]
    config = transformers.Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        max_position_embeddings=4096,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
