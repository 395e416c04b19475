"""What a logger must do. CONTRIBUTING.md says how to add one."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

from skylite.config.log import LoggerName
from skylite.errors import ConfigError
from skylite.optional_packages import install_command

LIBRARIES: dict[LoggerName, tuple[str, ...]] = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "swanlab": ("swanlab",),
}
"""Logger -> the packages that its extra installs. The class `Writer` is in loggers/NAME_writer.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerRun:
    """The run as a logger sees it."""

    folder: Path
    """RUN/loggers/NAME: where a logger keeps files on this machine."""
    run_id: str
    """The logger's id of this run; the same after a resume."""
    project: str
    name: str
    config: Mapping[str, Any]
    """The run's settings by dotted name."""
    last_step: int
    """The last step that the logger has; 0 for a new run. Later steps that it holds are discarded."""
    offline: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedSample:
    """A completion of a step."""

    question: str
    completion: str
    answer: str
    reward: float


class NewFolder(Enum):
    """When a logger gets an empty folder (own_folder.py)."""

    NEVER = "never"
    """It adds files under names that nobody can foresee, and reads none."""
    EACH_START = "each start"
    """It continues its run by the id alone."""
    EACH_START_WITH_ALL_STEPS = "each start, with all steps"
    """It would continue from its files. They may be a stranger's, so it logs the whole run again."""


class Writer(Protocol):
    """One run in one logger. Any exception ends the logger, never the run."""

    can_go_back: ClassVar[bool]
    """Whether opening with a smaller `last_step` discards the later steps. If not, a new run is opened."""

    @staticmethod
    def new_folder(offline: bool) -> NewFolder:
        """When the logger gets an empty folder."""

    def __init__(self, run: LoggerRun) -> None: ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step, on disk or on their way when it returns."""

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        """Log some completions of a step."""

    def close(self) -> None:
        """Finish the run; return when everything is written or sent."""


def writer_class(name: LoggerName) -> type[Writer]:
    """The class of a logger. Imports its library."""
    return cast(type[Writer], import_module(f"skylite.loggers.{name}_writer").Writer)


def require_libraries(names: Iterable[LoggerName]) -> None:
    """Raise ConfigError for a logger whose library is not installed."""
    for name in names:
        missing = [package for package in LIBRARIES[name] if importlib.util.find_spec(package) is None]
        if missing:
            raise ConfigError(
                f"The logger {name} needs the package {missing[0]}, which is not installed.",
                f"Run `{install_command(name)}`, or remove {name} from --log (log.to).",
            )
