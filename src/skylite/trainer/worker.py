"""One trainer rank, started by torchrun: `-m skylite.trainer.worker RUN_DIR [--resume]`.

Consumes: config.json. Waits for: the other ranks, at the rendezvous. Produces: the loop's files, and
trainer-error.json if a rank fails. Unblocks: torchrun, which ends all ranks with the first that fails.
"""

from __future__ import annotations

import os

from skylite.processes.reaper import COMMAND_PID, die_with_parent

if __name__ == "__main__":
    # torchrun starts every rank in a new session, so a signal to torchrun's process group does not reach it.
    # Before the other imports, which take seconds: a rank that missed torchrun's end would live on.
    die_with_parent(int(os.environ.get(COMMAND_PID, os.getppid())))

import argparse
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from skylite.config.loading import read_run_config
from skylite.errors import OutOfMemory, SkyliteError, WriteFailed
from skylite.run.files import write_json
from skylite.run.run_dir import RunDir


def main() -> NoReturn:
    """Train until done, stopped or failed, and exit with 0 or 1."""
    parser = argparse.ArgumentParser(prog="skylite.trainer.worker")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    run = RunDir(arguments.run_dir.resolve())
    sys.excepthook = lambda kind, error, trace: exit_with_traceback(run, kind, error, trace)
    try:
        run_trainer(run, resume=arguments.resume)
    except SkyliteError as error:
        print(f"skylite: {error}", file=sys.stderr)
        lost = isinstance(error, OutOfMemory)
        kind = {"final": not lost, "out_of_memory": lost}
        report_error(run, {"what": error.what, "hint": error.hint, **kind})
        exit_now(1)
    except (SystemExit, KeyboardInterrupt) as error:  # of a library or a user's file: not a success
        exit_with_traceback(run, type(error), error, error.__traceback__)
    exit_now(0)


def exit_now(code: int) -> NoReturn:
    """Exit without cleanup. All results are on disk."""
    # sys.exit has two problems. After a failure, torch waits for peers that are stuck in a collective with
    # us. After a good run, a gloo thread that outlives C++'s static objects sometimes aborts the process.
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            stream.flush()
    os._exit(code)


def exit_with_traceback(
    run: RunDir, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> NoReturn:
    """Handle an unexpected error: log its traceback, report its last line to the parent, and exit.

    The exit makes torchrun end all ranks.
    """
    # Not sys.stderr: torch replaces it with a buffer here, and would print that buffer later.
    traceback.print_exception(kind, error, trace, file=sys.__stderr__)
    last_line = traceback.format_exception_only(kind, error)[-1].strip()
    hint = f"Its traceback is in {run.log_path('trainer')}."
    report_error(run, {"what": last_line, "hint": hint, "final": False})
    exit_now(1)


def run_trainer(run: RunDir, resume: bool) -> None:
    """Join the process group and run the training loop."""
    run_config = read_run_config(run.config_path)
    from skylite.model.process_group import make_deterministic, process_group, set_threads
    from skylite.trainer.loop import train
    from skylite.trainer.micro_batch_memory import limit_gpu_memory

    set_threads(run_config.config.trainer.num_threads)
    if run_config.config.trainer.deterministic:
        make_deterministic()
    with process_group(run_config.resolved.placement.device, run.rendezvous) as dist:
        limit_gpu_memory(run_config.resolved.memory, dist.device)
        train(run, run_config, dist, resume=resume)


def report_error(run: RunDir, reason: dict[str, str | bool]) -> None:
    """Write the reason for the parent, unless another rank has: the first failure caused the others.

    `final` in `reason`: a restart would fail again.
    """
    # On a full disk this fails too. The parent then shows the last lines of the log, which say the same.
    with suppress(WriteFailed):
        if not run.trainer_error_path.exists():
            write_json(run.trainer_error_path, {**reason, "rank": int(os.environ["RANK"])})


if __name__ == "__main__":
    main()
