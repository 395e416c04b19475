"""`make gpu-check`: the same loop on CUDA, and the train phase at the shapes of real models. No network, no weights: random ones will do.

    python benchmarks/gpu_check.py --out benchmarks/results/gpu.json
    python benchmarks/gpu_check.py --shapes tiny --skip-loop          (the script itself, on any machine)

1. Versions and devices.
2. The loop: `skylite train`, 3 steps of SmolLM2-135M on generated problems, vLLM and trainer on the GPU; every sync verified by its canary.
   Then sync.py on-policy and sampling ahead: a step against the longer of its phases, publish and load.
3. The train phase (train_phase.py) of Qwen2.5 0.5B, 1.5B and 7B shapes with random weights, bf16, r 32, with and without checkpointing,
   with trainer.offload and with trainer.attention=flex, three counted steps each: tokens a second, share of the matrix peak, memory; and
   seconds to publish each shape's adapter. An engine's load of an adapter is timed in 2 alone, at the small model's size.
4. compiled.py at the 0.5B shape: whether torch.compile pays.

What could not be run says so in the result, with the reason, and the rest goes on. Not covered: several GPUs.
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

from surroundings import about

from skylite.processes.machine import choose_device
from skylite.run.files import write_json

# hidden, intermediate, layers, heads, key-value heads, vocabulary, tied head (the models' config.json)
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
HERE = Path(__file__).parent
REASON = re.compile(r"^.*?\b((?:[\w.]+Error|error): .+)$", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    result: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "device": choose_device()}
    skipped = "not run: --skip-loop"
    result["loop"] = skipped if args.skip_loop else loop()
    result["sync"] = (
        skipped
        if args.skip_loop
        else {"on-policy": sync(), "sampling ahead": sync("--set", "rollout.max_staleness=1")}
    )
    result["compiled"] = f"not run: {COMPILED_SHAPE} on a GPU was not asked for, or there is none"
    result["train_phase"] = {}
    for shape in args.shapes:
        with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
            result["train_phase"][shape] = measured(shape, Path(folder), args.checkpointing)
            if shape == COMPILED_SHAPE and choose_device() == "cuda":
                result["compiled"] = written_by(
                    "compiled.py", Path(folder), "--model", f"{folder}/model", "--dtype", "bfloat16"
                )
        print(json.dumps({shape: result["train_phase"][shape]}), flush=True)
        if args.out:
            write_json(args.out, about() | result)
    print(json.dumps(about() | result, indent=1))


def loop() -> Any:
    """Three steps through the command line; what the run wrote, or why it did not end."""
    skylite = str(Path(sys.executable).with_name("skylite"))
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        data, run = Path(folder, "data"), Path(folder, "run")
        prepare = [skylite, "prepare", "gsm8k", "--synthetic", "--limit", "400", "--out", str(data)]
        train = [
            skylite,
            "train",
            "--recipe",
            "gsm8k_cpu",
            "--data",
            str(data),
            "--run",
            str(run),
            "--steps",
            "3",
            "--set",
            "eval.limit=0",
        ]
        if failed := failure_of(prepare) or failure_of(train):
            return failed
        lines = [
            json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        return [{k: line[k] for k in LOOP_KEYS if k in line} for line in lines]


def sync(*flags: str) -> dict[str, Any]:
    """What sync.py found: medians of five steps of a run."""
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        return written_by("sync.py", Path(folder), *flags)


def measured(shape: str, folder: Path, checkpointing: list[str]) -> list[dict[str, Any]]:
    """A row of train_phase.py for each mode, of a random model of this shape in `folder`/model, or why there is none.

    Each in a call of its own, so that one that runs out of memory takes none of the others along.
    """
    # In a process of its own too: the memory of the GPU that it takes must be free for what is measured.
    if failed := failure_of([sys.executable, __file__, "--make", shape, str(folder / "model")]):
        return [failed]
    tiny = shape == "tiny"
    flags = [
        "--model",
        str(folder / "model"),
        "--dtype",
        "bfloat16" if choose_device() == "cuda" else "float32",
        "--publish",
    ]
    sizes = ("2", "2", "8", "8", "512") if tiny else ("8", "8", "256", "512", "16384")
    for flag, size in zip(
        ("--prompts", "--group-size", "--prompt", "--completion", "--budget"), sizes, strict=True
    ):
        flags += [flag, size]
    flags += ["--vocab", "500"] if tiny else []
    rows = []
    # FlexAttention has no backward pass on a CPU.
    flex = [("selective", False, "flex")] if choose_device() == "cuda" else []
    for mode, offload, attention in [
        *((mode, False, "sdpa") for mode in checkpointing),
        ("selective", True, "sdpa"),
        *flex,
    ]:
        wanted = ["--checkpointing", mode, "--attention", attention, *(["--offload"] if offload else [])]
        found = written_by("train_phase.py", folder, *flags, *wanted)
        rows.append(
            {"checkpointing": mode, "offload": offload, "attention": attention}
            | (found["rows"][0] if "rows" in found else found)
        )
    return rows


def written_by(script: str, folder: Path, *flags: str) -> dict[str, Any]:
    """The result file of another script of this folder, or why there is none."""
    out = folder / "out.json"
    out.unlink(missing_ok=True)
    failed = failure_of([sys.executable, str(HERE / script), *flags, "--out", str(out)])
    found: dict[str, Any] = failed or json.loads(out.read_text(encoding="utf-8"))
    return found


def failure_of(command: list[str]) -> dict[str, Any] | None:
    """How a command failed; None when it did not. The reason is the first error it told of: what follows comes of it."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    said = done.stdout + done.stderr
    reason = REASON.search(said)
    failed = reason.group(1) if reason else said.strip().rpartition("\n")[2]
    return {"failed": failed, "exit_code": done.returncode, "last_lines": said[-2000:]}


def make_model(shape: str, folder: Path) -> None:
    """A Qwen2 of this shape with random weights in bf16, saved as anyone's model."""
    import torch
    import transformers

    hidden, intermediate, layers, heads, kv_heads, vocab, tied = SHAPES[shape]
    config = transformers.Qwen2Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, tie_word_embeddings=tied, max_position_embeddings=4096,
    )  # fmt: skip
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
