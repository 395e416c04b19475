"""Which share of a step's CPU time does the OpenAI server of episodes take? By process, in a guessing game.

    skylite prepare guess --synthetic
    python benchmarks/recorder_share.py --data data/guess --out benchmarks/results/recorder_share_cpu.json

CPU seconds of all processes of a run, from the first line of metrics.jsonl to the last. The server
("recorder", its old name, so that results compare) works in the command's own process, which also talks to
vLLM, scores and writes; the chat template is rendered in its sandbox. So the sum of both is more than the
server's share.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from command_line import SKYLITE, argument_parser
from machine_info import machine_info

from skylite.config.loading import read_run_config
from skylite.processes.hardware import cpu_cores
from skylite.run.files import write_json
from skylite.run.metrics_file import read_metrics
from skylite.vllm_plugin import CPU_SERVER

PARTS = {
    "skylite.trainer.worker": "trainer",
    CPU_SERVER: "engine",
    "skylite.environments.episode_host": "episodes",
    " -P -s -S -c ": "sandbox of the chat template",
}
"""Part of a command line -> what the process and those below it are."""
COMMAND = "command: recorder, requests to vLLM, files"


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        found = measure(args, Path(folder) / "run")
    print(found)
    if args.out is not None:
        write_json(args.out, machine_info() | {"steps": args.steps - 1} | found)


def measure(args: argparse.Namespace, run: Path) -> dict[str, Any]:
    words = ["train", "--recipe", "guess_cpu", "--data", str(args.data.resolve()), "--run", str(run)]
    words += ["--steps", str(args.steps), "--set", "eval.limit=0"]
    process = subprocess.Popen([*SKYLITE, *words])
    started, first = wait_for(process, run, 1)
    ended, last = wait_for(process, run, args.steps)
    if process.wait() != 0:
        raise SystemExit("the run failed")
    parts = {part: round(last[part] - first.get(part, 0.0), 2) for part in last}
    total, wall = sum(parts.values()), ended - started
    metrics = read_metrics(run / "metrics.jsonl")[1:]
    rollout = read_run_config(run / "config.json").config.rollout
    trajectories = rollout.prompts_per_step * rollout.group_size
    calls = trajectories * statistics.fmean(m["turns/mean"] for m in metrics)
    return {
        "step_s": round(wall / len(metrics), 2),
        "calls_a_step": round(calls, 1),
        "cpu_s": parts,
        "share_of_used_cpu": {part: round(s / total, 4) for part, s in parts.items()},
        "share_of_all_cores": {part: round(s / wall / cpu_cores(), 4) for part, s in parts.items()},
    }


def wait_for(process: subprocess.Popen[bytes], run: Path, step: int) -> tuple[float, dict[str, float]]:
    """When metrics.jsonl has the line of a step, and the CPU seconds by part up to then."""
    path = run / "metrics.jsonl"
    while not path.exists() or path.read_text(encoding="utf-8").count("\n") < step:
        if process.poll() is not None:
            raise SystemExit("the run ended early")
        time.sleep(0.05)
    return time.monotonic(), cpu_seconds(psutil.Process(process.pid), COMMAND)


def cpu_seconds(process: psutil.Process, part: str) -> dict[str, float]:
    """CPU seconds of a process, of those below it and of those that have ended, by part."""
    try:
        line = " ".join(process.cmdline())
        part = next((name for mark, name in PARTS.items() if mark in line), part)
        times, children = process.cpu_times(), process.children()
    except psutil.NoSuchProcess:
        return {}
    found = {part: sum(times[:4])}
    for child in children:
        for name, seconds in cpu_seconds(child, part).items():
            found[name] = found.get(name, 0.0) + seconds
    return found


if __name__ == "__main__":
    main()
