"""What does a step cost besides sampling and training? Times the sync, and compares it with plain file I/O.

    python benchmarks/sync.py --gsm8k FOLDER_WITH_train.jsonl --out FILE
    python benchmarks/sync.py --gsm8k FOLDER_WITH_train.jsonl --set rollout.max_staleness=1 --out FILE

One run of 4 prompts x 8 completions of at most 128 tokens, LoRA rank 32. Without --gsm8k it uses generated
problems, whose completions are shorter. Reports medians over all steps but the first and the last, where a
run has extra waits. Plain I/O writes, syncs and reads the bytes of one adapter in the same folder.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from shared import SKYLITE, argument_parser, machine_info, train_command

from skylite.run.files import write_json
from skylite.run.metrics_file import read_metrics
from skylite.run.run_dir import RunDir, published_versions

REPEATS = 9


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="skylite-", dir=args.folder) as folder:
        run = RunDir(Path(folder, "run"))
        train(args, prepare(args.gsm8k, Path(folder)), run)
        steps = read_metrics(run.metrics_path)[1:-1]
        plain = plain_io(published_versions(run.default_adapters)[-1].weights_path)
    result = (
        summary(steps, plain) | machine_info() | {"plain_io": plain, "steps": [reported(s) for s in steps]}
    )
    print(json.dumps({k: v for k, v in result.items() if not isinstance(v, list)}, indent=1))
    if args.out:
        write_json(args.out, result)


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--gsm8k", type=Path, help="folder with train.jsonl as released")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--set", action="append", default=[], help="more settings of the run")
    parser.add_argument(
        "--folder", type=Path, help="where to put the run; default: the system's temporary folder"
    )
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def prepare(gsm8k: Path | None, folder: Path) -> Path:
    """Prepare the data set and return its folder."""
    what = ["gsm8k", "--synthetic"] if gsm8k is None else ["gsm8k", "--source", str(gsm8k)]
    subprocess.run([*SKYLITE, "prepare", *what, "--out", str(folder / "data")], check=True)
    return folder / "data"


def train(args: argparse.Namespace, data: Path, run: RunDir) -> None:
    settings = {
        "model.name": args.model,
        "num_steps": args.steps,
        "rollout.prompts_per_step": 4,
        "rollout.group_size": 8,
        "rollout.max_completion_tokens": 128,
        "lora.rank": 32,
        "optim.lr": 1e-4,
        "engine.kv_cache_gib": 0.5,
        # Most GSM8K groups get reward 0 here and would be skipped. With an entropy term they are computed.
        "algorithm.entropy_coef": 1e-12,
    }
    words = [word for setting in args.set for word in ("--set", setting)]
    subprocess.run([*train_command(run.root, data, settings), *words], check=True)


def plain_io(weights: Path) -> dict[str, float]:
    """Median seconds to write (with fsync) and to read the bytes of `weights`, in its folder."""
    data, path = weights.read_bytes(), weights.with_name("plain.bin")
    written, read = [], []
    for _ in range(REPEATS):
        started = time.perf_counter()
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        wrote = time.perf_counter()
        path.read_bytes()
        written.append(wrote - started)
        read.append(time.perf_counter() - wrote)
        path.unlink()
    return {"write_s": statistics.median(written), "read_s": statistics.median(read), "bytes": len(data)}


def reported(step: dict[str, Any]) -> dict[str, float]:
    """The metrics of a step that go into the result file."""
    return {
        k: v
        for k, v in step.items()
        if k.startswith(("time/", "staleness/", "mem/")) or k in ("step", "tokens/completion")
    }


def summary(steps: list[dict[str, Any]], plain: dict[str, float]) -> dict[str, float]:
    """Medians. The sync is publish and load; `until_loaded_s` includes the canary, which runs beside it."""

    def median(*keys: str) -> float:
        return float(statistics.median(sum(s[k] for k in keys) for s in steps))

    def share(*keys: str) -> float:
        return round(float(statistics.median(sum(s[k] for k in keys) / s["time/step_s"] for s in steps)), 4)

    sync, plain_s = median("time/publish_s", "time/load_s"), plain["write_s"] + plain["read_s"]
    longer = statistics.median(max(s["time/rollout_s"], s["time/train_s"]) for s in steps)
    return {
        "step_s": round(median("time/step_s"), 3),
        "sample_s": round(median("time/rollout_s"), 3),
        "train_s": round(median("time/train_s"), 3),
        "publish_s": round(median("time/publish_s"), 4),
        "load_s": round(median("time/load_s"), 4),
        "until_loaded_s": round(median("time/sync_s"), 4),
        "plain_io_s": round(plain_s, 4),
        "sync_vs_plain_io": round(sync / plain_s, 2),
        "sync_share": share("time/publish_s", "time/load_s"),
        "until_loaded_share": share("time/sync_s"),
        "overhead_share": share("time/overhead_s"),
        "overlap_s": round(median("time/overlap_s"), 3),
        "trainer_peak_gib": round(max(s["mem/rss_peak_bytes"] for s in steps) / 2**30, 2),
        "step_vs_longer_phase": round(median("time/step_s") / longer, 3),
    }


if __name__ == "__main__":
    main()
