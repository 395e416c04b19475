"""Explain why a run failed, and decide whether a restart of the trainer may help.

Consumes: an error and what the trainer's ranks reported. Waits for: nothing.
Produces: the error in words, "failed" in status.json. Unblocks: a restart from a checkpoint, or the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from skylite.errors import (
    ChildDied,
    ConfigError,
    OutOfMemory,
    RunFailed,
    SkyliteError,
    TrainerLost,
    WriteFailed,
    error_line,
    write_failed,
)
from skylite.processes.child import Supervisor
from skylite.processes.torchrun import killed_rank
from skylite.rollout.plan import RunPlan
from skylite.run.run_dir import RunDir
from skylite.run.status import Status, read_status, write_status
from skylite.ui.end_message import stopped_text

TRAINER = "trainer"


@contextmanager
def failures_recorded(plan: RunPlan) -> Iterator[None]:
    """Write "failed" to status.json if an error ends the block, and raise an unforeseen one as RunFailed.

    The block contains `run_log`, which saves the traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        _write_end(plan, replace(_last_status(plan), phase="stopped", pids={}))
        raise
    except BaseException as error:  # noqa: BLE001 raised again in words, SystemExit too
        failure = _as_failure(plan, error)
        if (last := _last_status(plan)).error != str(failure):
            _write_end(plan, replace(last, phase="failed", pids={}, error=str(failure)))
        raise failure from None


def record_leaving(plan: RunPlan, why: str) -> None:
    """Write to status.json why a policy left its sweep before its last step."""
    _write_end(plan, replace(_last_status(plan), phase="stopped", pids={}, error=why))


def _as_failure(plan: RunPlan, error: BaseException) -> SkyliteError:
    if isinstance(error, SkyliteError):
        return error
    if isinstance(error, OSError):
        return with_next_commands(plan, write_failed(error))
    what = f"An unforeseen error ended the run: {error_line(error)}."
    return with_next_commands(plan, RunFailed(what, f"Its traceback is in {plan.run.log_path('skylite')}."))


def _last_status(plan: RunPlan) -> Status:
    try:
        return read_status(plan.run.status_path)
    except ConfigError:  # there is none yet, or a power cut emptied it
        step = plan.first_step - 1
        return Status(phase="starting", step=step, num_steps=plan.config.num_steps, adapter_version=None)


def _write_end(plan: RunPlan, status: Status) -> None:
    # If status.json cannot be written either, the user must still see why the run ended.
    with suppress(WriteFailed):
        write_status(plan.run.status_path, status)


def explain_failure(plan: RunPlan, error: SkyliteError, supervisor: Supervisor) -> SkyliteError:
    """Add what the trainer's ranks reported to the error. TrainerLost means that a restart may succeed."""
    if isinstance(error, TrainerLost):
        stopped = supervisor.stopped_pids(TRAINER)
        if stopped:
            error = TrainerLost(
                f"{error.what} Stopped by a signal (SIGSTOP): process {', '.join(map(str, stopped))}.",
                error.hint,
            )
    elif isinstance(error, ChildDied):
        error = explain_death(plan.run, error, supervisor.recent_log(TRAINER))
    return error


def explain_death(run: RunDir, error: ChildDied, trainer_log: str) -> SkyliteError:
    """The same for a child that died, from `run.trainer_error_path` and the trainer's log."""
    is_trainer, path = error.child == TRAINER, run.trainer_error_path
    reason = run.read_json(path) if path.exists() else None
    killed = killed_rank(trainer_log) if is_trainer else None
    # A killed rank takes the others down. Their errors (a closed connection) do not name the cause. A lack of
    # memory does: the ranks that wait for that rank may be killed after it.
    if killed is not None and not (reason and (reason["final"] or reason.get("out_of_memory"))):
        cause = ": by hand, or by the kernel for lack of memory" if killed.endswith("SIGKILL") else ""
        return TrainerLost(f"The trainer stopped: {killed}{cause}.", error.hint, error.log_tail)
    if reason is not None:
        what, hint = f"The trainer stopped (rank {reason['rank']}): {reason['what']}", str(reason["hint"])
        if reason.get("out_of_memory"):
            return OutOfMemory(what, hint, error.log_tail)
        return RunFailed(what, hint) if reason["final"] else TrainerLost(what, hint, error.log_tail)
    return TrainerLost(error.what, error.hint, error.log_tail) if is_trainer else error


def may_resume(plan: RunPlan, error: SkyliteError, trainer_restarts: int, stop_requested: bool) -> bool:
    """Whether the run resumes by itself from its last checkpoint.

    A lack of memory does not count as a restart: each attempt has smaller micro-batches, down to a smallest.
    """
    if stop_requested or not isinstance(error, TrainerLost):
        return False
    return isinstance(error, OutOfMemory) or trainer_restarts < plan.config.trainer.max_restarts


def with_next_commands(plan: RunPlan, error: SkyliteError) -> SkyliteError:
    """Append the run's folders and the commands to type next to the error's text."""
    error.args = (f"{error}\n{stopped_text(plan.run, plan.resolved.identity.lora_sync_path)}",)
    return error
