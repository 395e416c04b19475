"""`python -m torch.distributed.run --nproc-per-node N -m skylite.trainer.worker RUN_DIR [--resume]`: one trainer rank.

torch is imported after the parent-death signal is set.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from skylite.config.loading import read_run_config
from skylite.errors import SkyliteError, WriteFailed
from skylite.processes.parent_death import COMMAND_PID, die_with_parent
from skylite.run.files import write_json
from skylite.run.run_dir import RunDir


def main() -> NoReturn:
    """Train until done, stopped or failed, and end the process with 0 or 1."""
    # torchrun gives every rank a session of its own, so whoever ends torchrun's group does not reach it.
    die_with_parent(int(os.environ.get(COMMAND_PID, os.getppid())))
    parser = argparse.ArgumentParser(prog="skylite.trainer.worker")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    run = RunDir(arguments.run_dir.resolve())
    sys.excepthook = lambda kind, error, trace: end_with_traceback(run, kind, error, trace)
    try:
        work(run, resume=arguments.resume)
    except SkyliteError as error:
        print(f"skylite: {error}", file=sys.stderr)
        report(run, {"what": error.what, "hint": error.hint, "final": True})
        end(1)
    end(0)


def end(code: int) -> NoReturn:
    """End the process at once."""
    # Not sys.exit: after a failure torch would wait at the end for peers that are stuck in a collective with us, and after a good run
    # a thread of gloo that still runs while C++ takes itself apart aborts the process now and then. All that matters is on disk.
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            stream.flush()
    os._exit(code)


def end_with_traceback(
    run: RunDir, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> NoReturn:
    """For an error nobody foresaw: the traceback to the log, its last line to the parent, and the end, so that torchrun ends all ranks."""
    # Not sys.stderr: torch calls this with a buffer in its place, which it would print after us.
    traceback.print_exception(kind, error, trace, file=sys.__stderr__)
    last_line = traceback.format_exception_only(kind, error)[-1].strip()
    report(
        run, {"what": last_line, "hint": f"Its traceback is in {run.log_path('trainer')}.", "final": False}
    )
    end(1)


def work(run: RunDir, resume: bool) -> None:
    """Join the other ranks and run the loop."""
    run_config = read_run_config(run.config_path)
    from skylite.model.distributed import make_deterministic, process_group, set_threads
    from skylite.trainer.loop import train

    set_threads(run_config.config.trainer.num_threads)
    if run_config.config.trainer.deterministic:
        make_deterministic()
    with process_group(run_config.resolved.device, run.rendezvous) as dist:
        train(run, run_config, dist, resume=resume)


def report(run: RunDir, reason: dict[str, str | bool]) -> None:
    """Leave the reason for the parent to show, unless another rank has: what pulled this one down came first.

    `final`: it would happen again.
    """
    # A disk that is full refuses this too; the log's last lines, which the parent shows then, say the same.
    with suppress(WriteFailed):
        if not run.trainer_error_path.exists():
            write_json(run.trainer_error_path, {**reason, "rank": int(os.environ["RANK"])})


if __name__ == "__main__":
    main()
