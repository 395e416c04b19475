"""Parts of `make gpu-check` that look at the machine and run `skylite train`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from command_line import SKYLITE

if TYPE_CHECKING:
    from gpu_check import Report

ROOT = Path(__file__).parents[1]
STEPS = 3
METRICS = (
    "step",
    "reward/mean",
    "time/step_s",
    "time/rollout_s",
    "time/train_s",
    "time/publish_s",
    "time/load_s",
    "optim/grad_norm",
    "adapter/b_norm",
    "mismatch/logprob_diff_mean",
    "mismatch/logprob_diff_max",
)
ENGINES = ("VLLM::EngineCore", "tests.fakes.engine")
"""Names of the process to kill, and of its stand-in in a dry run."""
LOG_CHARS = 20_000
"""What the report keeps of the engine's log: a start of vLLM fits."""


def machine(report: Report) -> None:
    """nvidia-smi, what torch and vLLM see, and what Triton needs."""
    import torch

    from skylite.processes.build_tools import c_compiler, python_header

    if shutil.which("nvidia-smi"):
        done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=20, check=False)
        report.put("nvidia_smi", (done.stdout + done.stderr).splitlines())
    else:
        report.put("nvidia_smi", "not found")
    report.put("c_compiler", Path(compiler).name if (compiler := c_compiler()) else None)
    report.put("python_header", python_header() is not None)
    report.put("cuda_of_torch", torch.version.cuda)
    report.put("cuda_available", torch.cuda.is_available())
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        report.put("device", {"name": properties.name, "capability": torch.cuda.get_device_capability(0)})
        report.put("free_and_total_bytes", torch.cuda.mem_get_info(0))
        report.put("cudnn", torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        report.put("architectures", torch.cuda.get_arch_list())


def loop(report: Report) -> None:
    """`skylite train` for three steps. The engine is killed after the first one and must restart.

    Reports the engine's log however it ends. Raises RuntimeError if the run fails.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("out of time"))
    with tempfile.TemporaryDirectory(prefix="skylite-", ignore_cleanup_errors=True) as folder:
        command, env = loop_command(Path(folder), report.dry_run)
        try:
            watch(report, command, env, Path(folder, "run"))
        finally:
            # Not printed: it would push skylite's own last lines out of the report.
            report.put("engine_log", engine_log(Path(folder, "run", "logs", "vllm-0.log")), show=False)


def engine_log(path: Path) -> list[str]:
    """The last complete lines of vLLM's log, with the last state of each progress bar."""
    from skylite.processes.child import raw_log_tail

    lines = [line.rstrip("\r").rpartition("\r")[2] for line in raw_log_tail(path).split("\n")]
    text = "\n".join(lines)
    return text[-LOG_CHARS:].splitlines()[1 if len(text) > LOG_CHARS else 0 :]


def loop_command(folder: Path, dry_run: bool) -> tuple[list[str], dict[str, str]]:
    """Prepare data; returns the training command and its environment. Dry run: tiny model, fake engine."""
    env = os.environ | {"XDG_STATE_HOME": str(folder / "state")}
    last = ["--set", "eval.limit=0", "--set", "engine.max_restarts=2"]
    if dry_run:
        from skylite.engine.server_command import ENGINE_COMMAND
        from tests.e2e.project import make_project
        from tests.tiny_models import make_tiny_model
        from tests.torture.ground import FAKE_ENGINE_COMMAND

        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        os.environ["XDG_STATE_HOME"] = env["XDG_STATE_HOME"]  # make_project prepares with this environment
        project = make_project(folder, make_tiny_model(folder / "model"))
        words = project.train_args(str(folder / "run"), STEPS, *last)
        words[words.index("data")] = str(folder / "data")
        return [*SKYLITE, *words], env | {ENGINE_COMMAND: FAKE_ENGINE_COMMAND, "PYTHONPATH": path}
    data = folder / "data"
    prepare = [*SKYLITE, "prepare", "gsm8k", "--synthetic", "--limit", "400", "--out", str(data)]
    subprocess.run(prepare, check=True, env=env)
    where = ["--recipe", "gsm8k_cpu", "--data", str(data), "--run", str(folder / "run")]
    return [*SKYLITE, "train", *where, "--steps", str(STEPS), *last], env


def watch(report: Report, command: list[str], env: dict[str, str], run: Path) -> None:
    """Run the command, report each new step, and kill the engine once after the first step."""
    started = time.monotonic()
    process = subprocess.Popen(command, env=env, cwd=run.parent, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    killed_at = None
    while process.poll() is None:
        time.sleep(0.05)
        steps = report_steps(report, run, started)
        if steps and killed_at is None:
            killed_at = time.monotonic()
            report.put("engine_killed", {"after_step": steps, "process": kill_the_engine(process.pid)})
    steps = report_steps(report, run, started)
    if killed_at is not None:
        report.put("seconds_from_the_kill_to_the_end", round(time.monotonic() - killed_at, 1))
    report.put("restarts", read(run / "status.json").get("restarts", {}))
    if process.returncode or steps < STEPS:
        raise RuntimeError(f"skylite train ended with exit code {process.returncode} after {steps} steps")


def report_steps(report: Report, run: Path, started: float) -> int:
    """Report new steps, and the choices once they are known. Returns the number of recorded steps."""
    from skylite.run.metrics_file import read_metrics

    choices = read(run / "config.json").get("resolved", {}).get("choices", [])
    if choices and "choices" not in report.found:
        report.put("choices", choices)
        report.put("seconds_to_the_choices", round(time.monotonic() - started, 1))
    lines = read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    for line in lines[len(report.found.get("steps", [])) :]:
        kept = {k: v for k, v in line.items() if k in METRICS or k.startswith(("canary/", "mem/"))}
        report.add("steps", kept | {"seconds_since_start": round(time.monotonic() - started, 1)})
    return len(lines)


def kill_the_engine(pid: int) -> str:
    """Kill the engine below this process with SIGKILL. Returns its name."""
    for process in psutil.Process(pid).children(recursive=True):
        words = words_of(process)
        found = next((name for name in ENGINES if name in words), None)
        # Processes above the engine name it in their command lines; the engine itself has no such child.
        if found and not any(found in words_of(child) for child in process.children()):
            process.send_signal(signal.SIGKILL)
            return words[:200]
    return "no engine found"


def words_of(process: psutil.Process) -> str:
    """Its command line; empty for one that has just ended, as the short ones below a run do."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def read(path: Path) -> dict[str, Any]:
    """A JSON file, {} if it does not exist or is not complete."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return found
