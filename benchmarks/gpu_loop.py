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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from gpu_sizes import make_model, sizes_of
from shared import SKYLITE, train_command

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
    "time/sync_s",
    "time/canary_s",
    "time/engine_sleep_s",
    "time/base_copies_s",
    "time/publish_s",
    "time/checkpoint_s",
    "time/load_s",
    "perf/completion_tokens_per_s",
    "tokens/unique",
    "tokens/total",
    "optim/grad_norm",
    "adapter/b_norm",
    "mismatch/logprob_diff_mean",
    "mismatch/logprob_diff_max",
)
ENGINES = ("VLLM::EngineCore", "tests/fakes/engine.py")
"""Names of the process to kill, and of its stand-in in a dry run."""
LOG_CHARS, SHORT_LOG_CHARS = 20_000, 6_000
"""What the report keeps of the engine's log, where a start of vLLM fits, and of each other log of the run."""

INTERRUPT_S = 20.0
"""A run gets Ctrl-C this long before its part's limit."""
SPARE_S, LONGEST_S = 10.0, 3600.0
"""Time to end a resumed run that takes too long and to write the logs; its limit where the part has none."""


def machine(report: Report) -> None:
    """nvidia-smi, what torch and vLLM see, and what Triton needs."""
    import torch

    from skylite.processes.hardware import c_compiler, python_header

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
    """`skylite train` of SmolLM2-135M for three steps. The engine is killed after the first and must restart.

    A fourth step follows with --resume, if there is time. Reports the end of each log however it ends.
    Raises RuntimeError if the run fails.
    """
    with run_folder(report) as folder:
        command, env = loop_command(folder, report.dry_run)
        watch(report, command, env, folder / "run", kill=True)
        report.put("resume", resume(report, env, folder / "run"))


def loop_of(report: Report, shape: str, sleep: str = "never") -> None:
    """Two steps of `skylite train` of a random model: 32 prompts with 8 completions of 512 tokens.

    They show how long sampling, training and sync take at this size. It ends early if time runs out.
    `sleep`: engine.sleep.
    """
    with run_folder(report) as folder:
        command, env = random_model_command(folder, sizes_of(shape, report.dry_run)[0], report.dry_run)
        command += ["--set", f"engine.sleep={sleep}"]
        watch(report, command, env, folder / "run", kill=False)


@contextmanager
def run_folder(report: Report) -> Iterator[Path]:
    """A folder for a run. Reports the ends of the run's logs afterwards, also at the part's limit."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("out of time"))
    with tempfile.TemporaryDirectory(prefix="skylite-", ignore_cleanup_errors=True) as folder:
        try:
            yield Path(folder)
        finally:
            report_logs(report, Path(folder, "run", "logs"))


def report_logs(report: Report, logs: Path) -> None:
    """Report the end of each log. Not printed: it would push skylite's own last lines out of the report."""
    engine = logs / "engine-0.log"
    report.put("engine_log", log_end(engine, LOG_CHARS), show=False)
    others = {path.name: log_end(path, SHORT_LOG_CHARS) for path in sorted(logs.glob("*.log"))}
    report.put("logs", {name: lines for name, lines in others.items() if name != engine.name}, show=False)


def log_end(path: Path, chars: int) -> list[str]:
    """The last complete lines of a log, with the last state of each progress bar."""
    from skylite.processes.child import raw_log_tail

    lines = [line.rstrip("\r").rpartition("\r")[2] for line in raw_log_tail(path).split("\n")]
    text = "\n".join(lines)
    return text[-chars:].splitlines()[1 if len(text) > chars else 0 :]


def loop_command(folder: Path, dry_run: bool) -> tuple[list[str], dict[str, str]]:
    """Prepare data; returns the training command and its environment. Dry run: tiny model, fake engine."""
    env = os.environ | {"XDG_STATE_HOME": str(folder / "state")}
    last = ["--set", "eval.limit=0", "--set", "engine.max_restarts=2"]
    if dry_run:
        from tests.e2e.project import FAKE_ENGINE, make_project
        from tests.tiny_models import make_tiny_model

        os.environ["XDG_STATE_HOME"] = env["XDG_STATE_HOME"]  # make_project prepares with this environment
        project = make_project(folder, make_tiny_model(folder / "model"))
        fake = [word for setting in FAKE_ENGINE for word in ("--set", setting)]
        words = project.train_args(str(folder / "run"), STEPS, *last, *fake)
        words[words.index("data")] = str(folder / "data")
        return [*SKYLITE, *words], env
    data = folder / "data"
    prepare = [*SKYLITE, "prepare", "gsm8k", "--synthetic", "--limit", "400", "--out", str(data)]
    subprocess.run(prepare, check=True, env=env)
    where = ["--recipe", "gsm8k_cpu", "--data", str(data), "--run", str(folder / "run")]
    return [*SKYLITE, "train", *where, "--steps", str(STEPS), *last], env


def random_model_command(folder: Path, shape: str, dry_run: bool) -> tuple[list[str], dict[str, str]]:
    """The training command of a random model, and its environment. Dry run: a fake engine."""
    from tests.e2e.project import FAKE_WORDS, make_project

    os.environ["XDG_STATE_HOME"] = str(folder / "state")  # make_project prepares with this environment
    make_project(folder, make_model(shape, folder / "model"))
    prompts, completion = (4, 12) if dry_run else (32, 512)
    settings: dict[str, object] = {
        "rollout.prompts_per_step": prompts,
        "rollout.group_size": 8,
        "rollout.max_prompt_tokens": 128,
        "rollout.max_completion_tokens": completion,
        "engine.max_num_seqs": prompts * 8,
        "trainer.tokens_per_micro_batch": 256 if dry_run else "auto",
        "data.difficulty": [],
        "eval.limit": 0,
        "sync.rollout_mismatch": "warn",
    }
    where = ["--model", str(folder / "model"), "--steps", str(STEPS - 1), *(FAKE_WORDS if dry_run else [])]
    return [*train_command(folder / "run", folder / "data", settings), *where], dict(os.environ)


def watch(report: Report, command: list[str], env: dict[str, str], run: Path, *, kill: bool) -> None:
    """Run the command and report each new step. `kill`: kill the engine once, after the first step.

    A run that is not done shortly before the part's limit is interrupted, and fails only without a step.
    """
    started = time.monotonic()
    process = subprocess.Popen(command, env=env, cwd=run.parent, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    killed_at, interrupted = None, False
    while process.poll() is None:
        time.sleep(0.05)
        steps = report_steps(report, run, started)
        if steps and kill and killed_at is None:
            killed_at = time.monotonic()
            report.put("engine_killed", {"after_step": steps, "process": kill_the_engine(process.pid)})
        if time.monotonic() > report.end - INTERRUPT_S and not interrupted:
            interrupted = True
            process.send_signal(signal.SIGINT)
    steps = report_steps(report, run, started)
    if killed_at is not None:
        report.put("seconds_from_the_kill_to_the_end", round(time.monotonic() - killed_at, 1))
    report.put("restarts", read(run / "status.json").get("restarts", {}))
    report.put("interrupted", interrupted)
    if not steps or (process.returncode and not interrupted) or (kill and steps < STEPS):
        raise RuntimeError(f"skylite train ended with exit code {process.returncode} after {steps} steps")


def resume(report: Report, env: dict[str, str], run: Path) -> str:
    """Train one more step from the checkpoint. Returns "ok" or why not: no failure of this part."""
    from gpu_check import ended

    needed, left = report.found["steps"][0]["seconds_since_start"], report.end - time.monotonic() - SPARE_S
    if left < needed:
        return f"not tried: {left:.0f} s left, and the first start took {needed:.0f} s until its first step"
    command = [*SKYLITE, "train", "--resume", str(run), "--steps", str(STEPS + 1)]
    started = time.monotonic()
    process = subprocess.Popen(command, env=env, cwd=run.parent, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    status = ended(process, min(left, LONGEST_S))
    seconds, steps = time.monotonic() - started, report_steps(report, run, started)
    if status == "done" and steps == STEPS + 1:
        return "ok"
    return f"{status}: exit code {process.returncode} after {seconds:.0f} s and step {steps}"


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
    """A command line, empty for a process that has just ended."""
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
