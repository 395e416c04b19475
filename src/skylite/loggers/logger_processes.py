"""Start and end the processes of the loggers. A failing logger raises nothing here."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from skylite.config.train import LoggerName
from skylite.errors import RunFailed
from skylite.loggers.follow import END
from skylite.processes.child import Child, ProcessSpec, describe_exit, kill, log_tail, poll, start
from skylite.run.run_dir import RunDir

logger = logging.getLogger(__name__)
ENV = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "WANDB_SILENT": "true",
    "GIT_PYTHON_REFRESH": "quiet",
    "MPLBACKEND": "Agg",
    # python-dotenv reads .env of every folder above, such as /tmp, where others write.
    "PYTHON_DOTENV_DISABLED": "1",
}


@dataclass(slots=True, eq=False)
class LoggerProcess:
    """A started logger."""

    name: LoggerName
    run: RunDir
    child: Child
    is_reported: bool = False
    """Its failure was printed."""

    def failure(self) -> str:
        """Why it ended; empty while it runs and after a success."""
        if poll(self.child) in (None, 0):
            return ""
        tail = log_tail(self.child.spec.log_path, 1, self.child.log_start)
        return f"it {describe_exit(self.child)}" + (f": {tail}" if tail else "")

    def report(self, problem: str) -> None:
        """Warn about a failure, once."""
        if problem and not self.is_reported:
            self.is_reported = True
            log, root = self.child.spec.log_path, self.run.root
            logger.warning(
                f"the logger {self.name} stopped, and the run continues without it: {problem.rstrip('.')}. "
                f"Its log is {log}; `skylite log {root} --to {self.name}` logs what it missed"
            )

    def finish(self) -> None:
        """Ask it to log the rest and end. Does not wait."""
        with contextlib.suppress(OSError):  # it has ended, and its folder is gone
            (self.child.folder.path / END).touch()

    def end(self) -> None:
        """Kill it, if it still runs."""
        kill(self.child)


def start_logger(run: RunDir, name: LoggerName, *, keep_following: bool) -> LoggerProcess:
    """Start the process of a logger. Raises RunFailed."""
    argv = [sys.executable, "-m", "skylite.loggers.follow", str(run.root), name]
    spec = ProcessSpec(
        name=f"logger {name}",
        argv=[*argv, "--follow"] if keep_following else argv,
        env=ENV | _mlflow_server(),
        log_path=run.log_path(f"logger-{name}"),
    )
    return LoggerProcess(name, run, start(spec))


def _mlflow_server() -> dict[str, str]:
    """MLFLOW_TRACKING_URI for a process with another working folder: a relative path becomes absolute."""
    place = os.environ.get("MLFLOW_TRACKING_URI", "")
    start, separator, path = place.partition(":///") if place.startswith("sqlite:") else ("", "", place)
    if separator:
        place = f"{start}{separator}{os.path.abspath(path)}"
    elif "://" not in place and place not in ("", "databricks", "uc"):
        place = Path(place.removeprefix("file:")).absolute().as_uri()
    return {"MLFLOW_TRACKING_URI": place} if place else {}


def start_loggers(run: RunDir, names: list[LoggerName]) -> list[LoggerProcess]:
    """Start loggers that follow the run. Warns about those that cannot be started."""
    started = []
    for name in names:
        try:
            started.append(start_logger(run, name, keep_following=True))
        except (RunFailed, OSError) as error:
            logger.warning(
                f"the logger {name} could not be started, and the run continues without it: {error}"
            )
    return started
