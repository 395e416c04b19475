"""Why a run failed, in words, and whether the trainer may simply be started again."""

from __future__ import annotations

from pathlib import Path

from skylite.errors import ChildDied, RunFailed, SkyliteError, TrainerLost
from skylite.launch.supervisor import Supervisor
from skylite.orchestrator.plan import RunPlan
from skylite.ui.closing import stopped_text

TRAINER = "trainer"


def explained(plan: RunPlan, error: SkyliteError, supervisor: Supervisor) -> SkyliteError:
    """The error with the rank's own reason where the trainer left one. TrainerLost: it need not come again."""
    if isinstance(error, TrainerLost):
        stopped = supervisor.stopped_pids(TRAINER)
        if stopped:
            error = TrainerLost(f"{error.what} Stopped by a signal (SIGSTOP): process {', '.join(map(str, stopped))}.", error.hint)
    elif isinstance(error, ChildDied) and plan.run.trainer_error_path.exists():
        reason = plan.run.read_json(plan.run.trainer_error_path)
        what, hint = f"The trainer stopped (rank {reason['rank']}): {reason['what']}", str(reason["hint"])
        error = RunFailed(what, hint) if reason["final"] else TrainerLost(what, hint, error.log_tail)
    elif isinstance(error, ChildDied) and error.what.startswith(TRAINER):
        killed = "A rank ended without an error of its own: it was killed, by hand or by the kernel for lack of memory."
        said = "" if "Traceback" in error.log_tail else f" {killed}"
        error = TrainerLost(f"{error.what}{said}", error.hint, error.log_tail)
    return error


def with_what_is_kept(plan: RunPlan, error: SkyliteError) -> SkyliteError:
    """The error, and below it where things are and what to type next."""
    error.args = (f"{error}\n{stopped_text(plan.run, Path(plan.resolved.lora_sync_path))}",)
    return error
