"""Log a run to experiment loggers afterwards. Logs each step once, however often you call it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from skylite.cli.options import AsJson, RunFolder
from skylite.config.loading import read_run_config
from skylite.config.train import LOGGER_NAMES, LoggerName
from skylite.errors import ConfigError, RunFailed
from skylite.loggers.logger_processes import start_logger
from skylite.loggers.writers import require_libraries
from skylite.progress_reporting import long_work
from skylite.run.metrics_file import read_metrics
from skylite.run.own_folders import require_own_place
from skylite.run.run_dir import RunDir
from skylite.ui.logs import show


def log(
    target: RunFolder,
    to: Annotated[str, typer.Option(help="Loggers, e.g. tensorboard,wandb (also trackio, mlflow, swanlab).")],
    as_json: AsJson = False,
) -> None:
    """Log what the run has, and what each logger has not yet. Raises SkyliteError subclasses."""
    names, run = logger_names(to), RunDir(target.resolve())
    read_run_config(run.config_path)
    require_own_place(run.root, run.logs, run.loggers)
    if not (steps := read_metrics(run.metrics_path)):
        raise ConfigError(f"{target} has no finished step to log.", "Log it after its first step.")
    require_libraries(names)
    last, logged, failed = steps[-1]["step"], list[LoggerName](), dict[LoggerName, str]()
    for name in names:
        if problem := _log_to(name, run):
            failed[name] = problem
        else:
            logged.append(name)
            if not as_json:
                show(f"{name} has {target} up to step {last}")
    if as_json:
        show(
            json.dumps({"run": str(target), "last_step": last, "logged": logged, "failed": failed}, indent=1)
        )
    if failed:
        problems = "; ".join(f"{name}: {problem}" for name, problem in failed.items())
        raise RunFailed(f"Not logged to {problems}.", "Run the command again; no step is logged twice.")


def _log_to(name: LoggerName, run: RunDir) -> str:
    """Log to one logger. Returns why it failed, or nothing."""
    process = start_logger(run, name, keep_following=False)
    try:
        with long_work(f"logging to {name}"):
            process.child.process.wait()
        problem = process.failure()
    finally:
        process.end()
    return problem and f"{problem.rstrip('.')} (see {process.child.spec.log_path})"


def logger_names(text: str) -> list[LoggerName]:
    """`tensorboard,wandb` as names. Raises ConfigError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    names = [name for word in words for name in LOGGER_NAMES if name == word]
    if len(names) < len(words) or not words:
        unknown = next((w for w in words if w not in LOGGER_NAMES), text)
        raise ConfigError(f"{unknown!r} is not a logger.", f"Choose from {', '.join(LOGGER_NAMES)}.")
    return names
