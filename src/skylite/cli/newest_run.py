"""The run that a command takes if none is named."""

from __future__ import annotations

import logging
from pathlib import Path

from skylite.errors import ConfigError
from skylite.run.run_dir import RunDir

logger = logging.getLogger(__name__)
RUNS = Path("runs")
"""Where `skylite train` makes new runs."""


def newest_run() -> Path:
    """The run in ./runs that was started last; logs its name. Raises ConfigError without one."""
    folders = RUNS.iterdir() if RUNS.is_dir() else ()
    started = {p.stat().st_mtime_ns: p.parent for f in folders if (p := RunDir(f).config_path).is_file()}
    if not started:
        raise ConfigError(f"No run was named, and {RUNS} holds none.", "Name a run folder.")
    newest = started[max(started)]
    logger.info(f"{newest}: the newest run in {RUNS}")
    return newest
