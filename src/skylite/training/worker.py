"""`python -m torch.distributed.run --nproc-per-node N -m skylite.training.worker RUN_DIR [--resume]`: one trainer rank.

torch is imported after the parent-death signal is set, so that there is hardly a moment in which a rank could be orphaned.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from skylite.config_files import read_run_config
from skylite.errors import SkyliteError
from skylite.run.files import write_json
from skylite.run.run_dir import RunDir

PR_SET_PDEATHSIG = 1


def main() -> NoReturn:
    """Train until done, stopped or failed, and end the process with 0 or 1."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="skylite.training.worker")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    run = RunDir(arguments.run_dir.resolve())
    code = 0
    try:
        work(run, resume=arguments.resume)
    except SkyliteError as error:
        report(run, error)
        code = 1
    # Not sys.exit: after a failure torch would wait at the end for peers that are stuck in a collective with us, and after a good run
    # a thread of gloo that still runs while C++ takes itself apart aborts the process now and then. All that matters is on disk.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def work(run: RunDir, resume: bool) -> None:
    """Join the other ranks and run the loop."""
    run_config = read_run_config(run.config_path)
    from skylite.training.dist import make_deterministic, process_group, set_threads
    from skylite.training.loop import train

    set_threads(run_config.config.trainer.num_threads)
    if run_config.config.trainer.deterministic:
        make_deterministic()
    with process_group(run_config.resolved.device) as dist:
        train(run, run_config, dist, resume=resume)


def report(run: RunDir, error: SkyliteError) -> None:
    """One line for the log, and a file for the parent to show."""
    print(f"skylite: {error}", file=sys.stderr, flush=True)
    write_json(run.trainer_error_path, {"what": error.what, "hint": error.hint, "rank": int(os.environ["RANK"])})


def die_with_parent() -> None:
    """Have the kernel kill this process when torchrun's agent ends, `kill -9` included."""
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before the kernel knew
        os._exit(1)


if __name__ == "__main__":
    main()
