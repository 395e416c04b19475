"""Why a run failed, in words, and whether the trainer may simply be started again."""

from __future__ import annotations

from pathlib import Path

from skylite.errors import ChildDied, RunFailed, SkyliteError, TrainerLost
from skylite.orchestrator.plan import RunPlan
from skylite.processes.supervisor import Supervisor
from skylite.processes.torchrun import killed_rank
from skylite.ui.end_message import stopped_text

TRAINER = "trainer"


def explained(plan: RunPlan, error: SkyliteError, supervisor: Supervisor) -> SkyliteError:
    """The error with the rank's own reason where the trainer left one. TrainerLost: it need not come again."""
    if isinstance(error, TrainerLost):
        stopped = supervisor.stopped_pids(TRAINER)
        if stopped:
            error = TrainerLost(
                f"{error.what} Stopped by a signal (SIGSTOP): process {', '.join(map(str, stopped))}.",
                error.hint,
            )
    elif isinstance(error, ChildDied):
        error = _explained_death(plan, error, supervisor)
    return error


def _explained_death(plan: RunPlan, error: ChildDied, supervisor: Supervisor) -> SkyliteError:
    is_trainer, path = error.what.startswith(TRAINER), plan.run.trainer_error_path
    reason = plan.run.read_json(path) if path.exists() else None
    killed = killed_rank(supervisor.recent_log(TRAINER)) if is_trainer else None
    # A rank that was killed pulls the others down; what they say of it (a closed connection) explains nothing.
    if killed is not None and not (reason and reason["final"]):
        cause = ": by hand, or by the kernel for lack of memory" if killed.endswith("SIGKILL") else ""
        return TrainerLost(f"The trainer stopped: {killed}{cause}.", error.hint, error.log_tail)
    if reason is not None:
        what, hint = f"The trainer stopped (rank {reason['rank']}): {reason['what']}", str(reason["hint"])
        return RunFailed(what, hint) if reason["final"] else TrainerLost(what, hint, error.log_tail)
    return TrainerLost(error.what, error.hint, error.log_tail) if is_trainer else error


def with_what_is_kept(plan: RunPlan, error: SkyliteError) -> SkyliteError:
    """The error, and below it where things are and what to type next."""
    error.args = (f"{error}\n{stopped_text(plan.run, Path(plan.resolved.lora_sync_path))}",)
    return error
