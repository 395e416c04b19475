"""`skylite log`: log a run, finished or not, to an experiment logger."""

from __future__ import annotations

from pathlib import Path

from skylite.config.loading import read_run_config
from skylite.config.log import LOGGER_NAMES, LoggerName
from skylite.errors import ConfigError, RunFailed
from skylite.loggers.interface import require_libraries
from skylite.loggers.processes import start_logger
from skylite.long_work import long_work
from skylite.run.folder_owner import require_own_place
from skylite.run.metrics_file import read_metrics
from skylite.run.run_dir import RunDir
from skylite.ui.logs import show


def log(target: Path, to: str) -> None:
    """Log what the run has, and what each logger has not yet. Raises SkyliteError subclasses."""
    names, run = logger_names(to), RunDir(target.resolve())
    read_run_config(run.config_path)
    require_own_place(run.root, run.logs, run.loggers)
    if not (steps := read_metrics(run.metrics_path)):
        raise ConfigError(f"{target} has no finished step to log.", "Log it after its first step.")
    require_libraries(names)
    failed = []
    for name in names:
        process = start_logger(run, name, keep_following=False)
        try:
            with long_work(f"logging {len(steps)} steps to {name}"):
                process.child.process.wait()
            problem = process.failure()
        finally:
            process.end()
        if problem:
            failed.append(f"{name}: {problem.rstrip('.')} (see {process.child.spec.log_path})")
        else:
            show(f"{name} has {target} up to step {steps[-1]['step']}")
    if failed:
        raise RunFailed(
            f"Not logged to {'; '.join(failed)}.", "Run the command again; no step is logged twice."
        )


def logger_names(text: str) -> list[LoggerName]:
    """`tensorboard,wandb` as names. Raises ConfigError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    names = [name for word in words for name in LOGGER_NAMES if name == word]
    if len(names) < len(words) or not words:
        unknown = next((w for w in words if w not in LOGGER_NAMES), text)
        raise ConfigError(f"{unknown!r} is not a logger.", f"Choose from {', '.join(LOGGER_NAMES)}.")
    return names
