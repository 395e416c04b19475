"""One trainer rank, started by torchrun: `-m skylite.trainer.worker RUN_DIR [--resume]`.

With --sweep the folder is that of a sweep, and the rank trains all of its runs (trainer/serve_runs.py).

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from skylite.config.loading import read_run_config
from skylite.config.train import RunConfig
from skylite.errors import OutOfMemory, SkyliteError, WriteFailed
from skylite.processes.hosts import number_ranks
from skylite.run.files import write_json
from skylite.run.host_places import wait_for_hosts
from skylite.run.run_dir import RunDir
from skylite.run.sweep_dir import SweepDir

if TYPE_CHECKING:
    from skylite.model.process_group import Dist


def main() -> NoReturn:
    """Train until done, stopped or failed, and exit with 0 or 1."""
    parser = argparse.ArgumentParser(prog="skylite.trainer.worker")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--host", type=int, default=0, help="number of this machine")
    arguments = parser.parse_args()
    run, sweep = RunDir(arguments.run_dir.resolve()), None
    if arguments.sweep:
        sweep = SweepDir(run.root)
        run = sweep.shared
    sys.excepthook = lambda kind, error, trace: exit_with_traceback(run, kind, error, trace)
    try:
        if sweep is not None:
            run_sweep_trainer(sweep)
        else:
            run_trainer(run, resume=arguments.resume, host=arguments.host)
    except SkyliteError as error:
        report_failure(run, error)
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
    report_failure(run, error)
    exit_now(1)


def run_trainer(run: RunDir, resume: bool, host: int = 0) -> None:
    """Join the process group and run the training loop."""
    run_config = read_run_config(run.config_path)
    if (hosts := run_config.config.trainer.hosts) > 1:
        number_ranks(host, hosts)
        timeout_s = 0.9 * run_config.config.trainer.step_timeout_s  # before the parent takes it for a hang
        wait_for_hosts(run.rendezvous, os.environ["TORCHELASTIC_RUN_ID"], hosts, timeout_s)
    from skylite.trainer.loop import train

    with joined_group(run_config, run.rendezvous) as dist:
        train(run, run_config, dist, resume=resume)


def run_sweep_trainer(sweep: SweepDir) -> None:
    """Join the process group and train the runs of a sweep. They agree on all that is set here."""
    run_config = read_run_config(sweep.run(next(iter(sweep.policies()))).config_path)
    from skylite.trainer.serve_runs import serve_runs

    with joined_group(run_config, sweep.shared.rendezvous) as dist:
        serve_runs(sweep, dist, report_failure)


@contextmanager
def joined_group(run_config: RunConfig, rendezvous: Path) -> Iterator[Dist]:
    """The process group of the ranks, with the run's threads, determinism and limit of memory."""
    from skylite.model.process_group import make_deterministic, process_group, set_threads
    from skylite.trainer.micro_batch_memory import limit_gpu_memory

    set_threads(run_config.config.trainer.num_threads)
    if run_config.config.trainer.deterministic:
        make_deterministic()
    with process_group(run_config.resolved.placement.device, rendezvous) as dist:
        limit_gpu_memory(run_config.resolved.memory, dist.device)
        yield dist


def report_failure(run: RunDir, error: BaseException) -> None:
    """Write why the run failed, for its parent. An error that nobody foresaw may go away by a restart."""
    if isinstance(error, SkyliteError):
        print(f"skylite: {error}", file=sys.stderr)
        lost = isinstance(error, OutOfMemory)
        kind = {"final": not lost, "out_of_memory": lost}
        report_error(run, {"what": error.what, "hint": error.hint, **kind})
        return
    last_line = traceback.format_exception_only(type(error), error)[-1].strip()
    hint = f"Its traceback is in {run.log_path('trainer')}."
    report_error(run, {"what": last_line, "hint": hint, "final": False})


def report_error(run: RunDir, reason: dict[str, str | bool]) -> None:
    """Write the reason for the parent, unless another rank has: the first failure caused the others.

    `final` in `reason`: a restart would fail again.
    """
    # On a full disk this fails too. The parent then shows the last lines of the log, which say the same.
    with suppress(WriteFailed):
        write_json(run.trainer_error_path, {**reason, "rank": int(os.environ["RANK"])}, once=True)


if __name__ == "__main__":
    main()
