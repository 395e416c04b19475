"""How long does a run take to its first rollout request, compared with starting vLLM alone?

    python benchmarks/startup.py --out benchmarks/results/startup_cpu.json

Each round starts, one after the other: vLLM's own server until /health answers (`plain`); skylite's server
module (engine/vllm/plugin/cpu_server.py) with the same flags (`ours`); a run until its first rollout request
(events.jsonl). Times count from before Python starts. The run also loads its trainer, publishes version 0,
loads it and verifies it. Reports medians, ratios, CPU seconds by process, and the median of nine
`skylite --help`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from shared import SKYLITE, argument_parser, machine_info, train_command

from skylite.adapters.target_modules import predict_target_modules
from skylite.config.train import TrainConfig
from skylite.engine.start_engines import engine_spec
from skylite.engine.vllm.client import VllmClient
from skylite.engine.vllm.launcher import VllmLauncher
from skylite.engine.vllm.plugin import CPU_SERVER, STOCK_SERVER
from skylite.engine.watchdog import wait_ready
from skylite.processes.child import ProcessSpec, kill, start
from skylite.rollout.plan import plan_run
from skylite.rollout.session import read_events
from skylite.run.files import write_json
from skylite.run.run_dir import RunDir

DEADLINE_S = 600.0


def main() -> None:
    args = parse_arguments()
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        data = Path(folder, "data")
        subprocess.run([*SKYLITE, "prepare", "gsm8k", "--synthetic", "--out", str(data)], check=True)
        for index in range(args.rounds):
            plain = asyncio.run(server_start(args.model, data, Path(folder), "plain", STOCK_SERVER))
            ours = asyncio.run(server_start(args.model, data, Path(folder), "ours", CPU_SERVER))
            rounds.append({**plain, **ours, **run_start(args.model, data, Path(folder, f"run{index}"))})
            print(json.dumps(rounds[-1]), flush=True)
    result = summary(rounds) | {"help_s": round(help_seconds(), 3)} | machine_info() | {"rounds": rounds}
    print(json.dumps({k: v for k, v in result.items() if k != "rounds"}, indent=1))
    if args.out:
        write_json(args.out, result)


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def settings(model: str, data: Path) -> dict[str, Any]:
    """Settings without an evaluation, which would run before the first rollout."""
    return {
        "model": {"name": model},
        "data": {"path": str(data)},
        "engine": {"kv_cache_gib": 0.5},
        "num_steps": 1,
    }


async def server_start(model: str, data: Path, folder: Path, name: str, module: str) -> dict[str, float]:
    """Wall and CPU seconds until a server of `module` with a run's flags answers /health."""
    config = TrainConfig.model_validate(settings(model, data))
    plan = plan_run(config, RunDir(folder / "plain"))
    modules = predict_target_modules(plan.resolved.model.path, plan.config.lora)
    spec = engine_spec(plan.run_config, modules, 0, folder)
    command = [module if word == CPU_SERVER else word for word in VllmLauncher().command(spec)]
    started = time.monotonic()
    child = start(
        ProcessSpec(
            name=spec.name, argv=command, env=VllmLauncher().environment(spec), log_path=folder / "vllm.log"
        )
    )
    client = VllmClient(spec.name, spec.address)
    try:
        await wait_ready(client, DEADLINE_S, folder / "vllm.log")
        seconds = time.monotonic() - started
        return {f"{name}_s": seconds, f"{name}_cpu_s": cpu_seconds(psutil.Process(child.pid))}
    finally:
        await client.aclose()
        kill(child)
        (folder / "engine-0.sock").unlink(missing_ok=True)


def run_start(model: str, data: Path, run: Path) -> dict[str, float]:
    """Seconds to each event up to the first rollout request of `skylite train`; CPU seconds until then."""
    command = train_command(run, data, {"num_steps": 1, "engine.kv_cache_gib": 0.5, "model.name": model})
    started = time.monotonic()
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while (seconds := event_times(RunDir(run), started)).get("sampling_started") is None:
            if process.poll() is not None or time.monotonic() - started > DEADLINE_S:
                raise RuntimeError(f"the run sent no rollout request: {seconds}")
            time.sleep(0.1)
        used = cpu_by_part(psutil.Process(process.pid))
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
    return {f"{event}_s": round(at, 3) for event, at in seconds.items()} | used


def cpu_by_part(run: psutil.Process) -> dict[str, float]:
    """CPU seconds of a run so far: vLLM, torchrun with its ranks, the parent with its reward workers."""
    used = {"vllm_cpu_s": 0.0, "trainer_cpu_s": 0.0, "parent_cpu_s": sum(run.cpu_times()[:2])}
    for child in run.children():
        words = " ".join(child.cmdline())
        part = "vllm" if CPU_SERVER in words else "trainer" if "torch.distributed.run" in words else "parent"
        used[f"{part}_cpu_s"] += cpu_seconds(child)
    return {name: round(seconds, 1) for name, seconds in used.items()}


def cpu_seconds(process: psutil.Process) -> float:
    """User and system time of a process and its descendants, including those that ended."""
    return sum(sum(one.cpu_times()[:4]) for one in [process, *process.children(recursive=True)])


def help_seconds() -> float:
    """Median seconds of nine `skylite --help`."""
    seconds = []
    for _ in range(9):
        started = time.perf_counter()
        subprocess.run([*SKYLITE, "--help"], check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def event_times(run: RunDir, started: float) -> dict[str, float]:
    """Seconds to the first occurrence of each event so far."""
    found: dict[str, float] = {}
    for event in read_events(run.events_path) if run.events_path.exists() else []:
        found.setdefault(event["event"], event["monotonic"] - started)
    return found


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    plain, ours, first = (
        statistics.median(r[key] for r in rounds) for key in ("plain_s", "ours_s", "sampling_started_s")
    )
    cpu = {
        key: round(statistics.median(r[key] for r in rounds), 1)
        for key in rounds[0]
        if key.endswith("_cpu_s")
    }
    return {
        "vllm_alone_s": round(plain, 2),
        "our_server_alone_s": round(ours, 2),
        "first_request_s": round(first, 2),
        "startup_ratio": round(first / plain, 3),
        "startup_ratio_of_rounds": round(
            statistics.median(r["sampling_started_s"] / r["plain_s"] for r in rounds), 3
        ),
        "over_our_server": round(first / ours, 3),
        **cpu,
    }


if __name__ == "__main__":
    main()
