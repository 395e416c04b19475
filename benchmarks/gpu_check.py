"""`make gpu-check`: the same loop on CUDA, and the train phase at the shapes of real models. No network, no weights: random ones will do.

    python benchmarks/gpu_check.py --out benchmarks/results/gpu.json
    python benchmarks/gpu_check.py --shapes tiny --skip-loop          (the script itself, on any machine)

1. Versions and devices.
2. The loop: `skylite train`, 3 steps of SmolLM2-135M on generated problems, vLLM and trainer on the GPU; every sync proven by its canary.
3. The train phase (train_phase.py) of Qwen2.5 0.5B, 1.5B and 7B shapes with random weights, bf16, r 32, with and without checkpointing:
   tokens a second, share of the matrix peak, memory.
4. Seconds to publish the adapter of each shape.

What could not be run says so in the result, with the reason.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

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
HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=[s for s in SHAPES if s != "tiny"])
    parser.add_argument("--checkpointing", nargs="+", default=["none", "selective"])
    parser.add_argument("--skip-loop", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%d"), **devices()}
    result["loop"] = "not run: --skip-loop" if args.skip_loop else loop()
    result["train_phase"] = {}
    for shape in args.shapes:
        with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
            result["train_phase"][shape] = measured(shape, Path(folder), args.checkpointing)
        print(json.dumps({shape: result["train_phase"][shape]}), flush=True)
        if args.out:
            write_json(args.out, result)
    print(json.dumps(result, indent=1))


def devices() -> dict[str, Any]:
    import torch

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found = {}
    for package in ("torch", "transformers", "peft", "vllm", "skylite"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return {"devices": names or [f"CPU: {platform.machine()}"], "versions": found}


def loop() -> Any:
    """Three steps through the command line; what the run wrote, or why it did not end."""
    skylite = str(Path(sys.executable).with_name("skylite"))
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        data, run = Path(folder, "data"), Path(folder, "run")
        prepare = [skylite, "prepare", "gsm8k", "--stand-in", "--limit", "400", "--out", str(data)]
        train = [skylite, "train", "--recipe", "gsm8k_cpu", "--data", str(data), "--run", str(run), "--steps", "3", "--set", "eval.limit=0"]
        for command in (prepare, train):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                return {"failed": " ".join(command[1:3]), "exit_code": done.returncode, "last_lines": (done.stdout + done.stderr)[-2000:]}
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        return [{k: line[k] for k in LOOP_KEYS if k in line} for line in lines]


def measured(shape: str, folder: Path, checkpointing: list[str]) -> list[dict[str, Any]]:
    """The rows of train_phase.py for a random model of this shape, and its publish time."""
    import torch

    model = make_model(shape, folder)
    tiny = shape == "tiny"
    command = [sys.executable, str(HERE / "train_phase.py"), "--model", str(model), "--out", str(folder / "rows.json"), "--publish"]
    command += ["--dtype", "bfloat16" if torch.cuda.is_available() else "float32", "--checkpointing", *checkpointing, "--steps", "3"]
    sizes = ("2", "2", "8", "8", "512") if tiny else ("8", "8", "256", "512", "16384")
    for flag, size in zip(("--prompts", "--group-size", "--prompt", "--completion", "--budget"), sizes, strict=True):
        command += [flag, size]
    done = subprocess.run(
        [*command, *(["--vocab", "500"] if tiny else [])], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, check=False
    )
    if done.returncode != 0:
        return [{"failed": done.stderr[-2000:]}]
    rows: list[dict[str, Any]] = json.loads((folder / "rows.json").read_text(encoding="utf-8"))["rows"]
    return rows


def make_model(shape: str, folder: Path) -> Path:
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
    model.save_pretrained(folder / shape)
    return folder / shape


if __name__ == "__main__":
    main()
