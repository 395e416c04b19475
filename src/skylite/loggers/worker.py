"""The process of one logger: `python -m skylite.loggers.worker RUN NAME [--follow]`.

Without --follow it logs what the run has and ends. With it, it follows the run until the file END appears in
its temporary folder, then logs the rest and ends. Its output goes to RUN/logs/logger-NAME.log, and the last
line says why it failed.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn, get_args

from skylite.config.loading import read_run_config
from skylite.config.log import LoggerName
from skylite.errors import ConfigError, SkyliteError, error_line
from skylite.loggers.follow import Follower
from skylite.loggers.interface import writer_class
from skylite.loggers.journal import open_journal
from skylite.loggers.logger_processes import END
from skylite.run.run_dir import RunDir

POLL_S = 0.5
LOW_PRIORITY = 10
LARGEST_FILE = 4 << 30
"""Bytes of one file that a logger may write, its log included."""


def main() -> NoReturn:
    """Exit 0 when everything is logged, else 1."""
    os.nice(LOW_PRIORITY)
    limit_file_size(LARGEST_FILE)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    names = [name for name in get_args(LoggerName) if name == sys.argv[2]]
    try:
        log_run(RunDir(Path(sys.argv[1])), names[0], keep_following="--follow" in sys.argv[3:])
    except SkyliteError as error:
        _fail(str(error))
    except BaseException as error:  # a library may raise anything
        logging.exception("the logger failed")
        _fail(error_line(error))
    _exit(0)


def log_run(run: RunDir, name: LoggerName, *, keep_following: bool) -> None:
    """Log what the run has; with `keep_following`, also what it gets until it is asked to end."""
    journal = open_journal(run.loggers / f"{name}.jsonl")
    if journal is None:
        raise ConfigError(f"Another process logs {run.root} to {name}.", "Wait until it ends.")
    follower = Follower(run, read_run_config(run.config_path), journal, writer_class(name))
    end = Path(tempfile.gettempdir()) / END
    while keep_following and not end.exists():
        if run.metrics_path.exists():
            follower.catch_up()
        time.sleep(POLL_S)
    follower.catch_up()
    follower.close()


def limit_file_size(num_bytes: int) -> None:
    """Let every write beyond this size of a file fail with EFBIG."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    smaller = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_FSIZE, (smaller, hard))


def _fail(reason: str) -> NoReturn:
    print(reason, file=sys.stderr, flush=True)
    _exit(1)


def _exit(code: int) -> NoReturn:
    """End without the exit hooks of the libraries: they may wait for a network."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
