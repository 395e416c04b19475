"""Why the trainer ended, as the run explains it, and when the run resumes by itself."""

from __future__ import annotations

import asyncio
import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skylite.errors import ChildDied, OutOfMemory, RunFailed, SkyliteError, TrainerLost
from skylite.processes.child import ProcessSpec, Supervisor
from skylite.rollout import run_session
from skylite.rollout.failures import TRAINER, explain_failure, may_resume
from skylite.rollout.plan import RunPlan
from tests.logs import logged_messages
from tests.unit.simulated_run import plan_of

SMALLER = "step 3 ran out of memory (no space). It is computed again with trainer.tokens_per_micro_batch=25."
KILLED = "rank      : 0 (local_rank: 0)\n  exitcode  : -9 (pid: 77)  (SIGKILL)\n"
"""A part of torchrun's summary."""
BY_SIGKILL = (
    "The trainer stopped: rank 0 (process 77) was killed by SIGKILL: "
    "by hand, or by the kernel for lack of memory."
)
NO_MEMORY = {"what": SMALLER, "hint": "", "final": False, "out_of_memory": True}
REFUSED = {"what": "step 3 ran out of memory with only 16 tokens.", "hint": "Use more ranks.", "final": True}
CRASHED = {"what": "RuntimeError: Connection closed by peer", "hint": "Read the log.", "final": False}
RESUMES: dict[int, set[type[SkyliteError]]] = {0: {OutOfMemory}, 1: {OutOfMemory, TrainerLost}}
"""trainer.max_restarts -> the failures after which a run resumes. Without --max-restarts it is 0."""


def plan_with(root: Path, max_restarts: int | None) -> RunPlan:
    """A plan with this trainer.max_restarts; None: the user did not set it."""
    plan = plan_of(root, 0, 3, 0, 1, False)
    if max_restarts is None:
        return plan
    trainer = plan.config.trainer.model_copy(update={"max_restarts": max_restarts})
    return replace(plan, config=plan.config.model_copy(update={"trainer": trainer}))


async def failure_of(plan: RunPlan, name: str, log: str, reason: dict[str, Any] | None) -> SkyliteError:
    """What the run reports after a child process has printed `log` and failed, and rank 1 gave `reason`."""
    plan.run.logs.mkdir()
    if reason is not None:
        plan.run.trainer_error_path.write_text(json.dumps({**reason, "rank": 1}))
    argv = ["sh", "-c", 'printf %s "$LAST_WORDS"; exit 1']
    async with Supervisor() as supervisor:
        spec = ProcessSpec(name=name, argv=argv, env={"LAST_WORDS": log}, log_path=plan.run.log_path(name))
        supervisor.start(spec)
        with pytest.raises(ChildDied) as failure:
            await supervisor.watch()
        return explain_failure(plan, failure.value, supervisor)


@pytest.mark.parametrize(
    ("log", "reason", "kind", "what"),
    [
        ("", NO_MEMORY, OutOfMemory, f"The trainer stopped (rank 1): {SMALLER}"),
        ("", REFUSED, RunFailed, f"The trainer stopped (rank 1): {REFUSED['what']}"),
        ("", CRASHED, TrainerLost, f"The trainer stopped (rank 1): {CRASHED['what']}"),
        ("", None, TrainerLost, "trainer ended with exit code 1."),
        (KILLED, None, TrainerLost, BY_SIGKILL),
        (KILLED, CRASHED, TrainerLost, BY_SIGKILL),
        (KILLED, NO_MEMORY, OutOfMemory, f"The trainer stopped (rank 1): {SMALLER}"),
        (KILLED, REFUSED, RunFailed, f"The trainer stopped (rank 1): {REFUSED['what']}"),
    ],
    ids=[
        "no memory",
        "final",
        "crash",
        "unknown",
        "killed",
        "killed, so a peer crashed",
        "no memory, so a peer was killed",
        "final, then killed",
    ],
)
def test_the_trainers_end_is_explained_and_only_a_lack_of_memory_resumes_without_max_restarts(
    tmp_path: Path, log: str, reason: dict[str, Any] | None, kind: type[SkyliteError], what: str
) -> None:
    plan = plan_with(tmp_path, None)
    found = asyncio.run(failure_of(plan, TRAINER, f"the traceback\n{log}", reason))
    assert (type(found), found.what) == (kind, what)
    told = reason if reason is not None and reason["what"] in what else None
    assert found.hint == (told["hint"] if told else f"Its log is {plan.run.log_path(TRAINER)}.")
    assert not isinstance(found, ChildDied) or found.log_tail.startswith("the traceback")
    for allowed in (plan, plan_with(tmp_path, 1)):
        expected = kind in RESUMES[allowed.config.trainer.max_restarts]
        assert may_resume(allowed, found, 0, stop_requested=False) is expected
        assert may_resume(allowed, found, 1, stop_requested=False) is (kind is OutOfMemory)
        assert not may_resume(allowed, found, 0, stop_requested=True)


def test_another_process_that_ends_is_not_taken_for_the_trainer(tmp_path: Path) -> None:
    """Even if its log looks like that of a trainer whose rank was killed."""
    plan = plan_with(tmp_path, 1)
    found = asyncio.run(failure_of(plan, "engine-0", KILLED, None))
    assert (type(found), found.what) == (ChildDied, "engine-0 ended with exit code 1.")
    assert not may_resume(plan, found, 0, stop_requested=False)


class Attempts:
    """A run whose attempts fail one after the other, and whose next one finishes."""

    def __init__(self, failures: list[SkyliteError], stops_at: int | None = None) -> None:
        self.failures, self.stops_at = failures, stops_at
        self.seen: list[tuple[bool, dict[str, int]]] = []
        """Whether each attempt resumed, and the restarts before it."""

    async def supervised(self, plan, screen, adapters, resume, limit, restarts, stop) -> bool:
        self.seen.append((resume, dict(restarts)))
        if len(self.seen) == self.stops_at:
            stop.on_signal(signal.SIGINT)
        if len(self.seen) <= len(self.failures):
            raise self.failures[len(self.seen) - 1]
        return True

    def run(self, plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Run to the end. Returns what was logged."""
        monkeypatch.setattr(run_session, "_supervised", self.supervised)
        monkeypatch.setattr(run_session, "plan_resume", lambda run: plan)
        with logged_messages() as logged:
            asyncio.run(run_session.run_session(plan, resume=False))
        return logged


def test_a_lack_of_memory_resumes_without_max_restarts_and_uses_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/how-to/gpus.md promises it. The user reads each time why the run resumes."""
    attempts = Attempts([OutOfMemory(SMALLER), OutOfMemory(SMALLER)])
    logged = attempts.run(plan_with(tmp_path / "unset", None), monkeypatch)
    assert attempts.seen == [(False, {}), (True, {}), (True, {})]
    assert logged == [f"{SMALLER} The run resumes from its last checkpoint."] * 2

    attempts = Attempts([OutOfMemory(SMALLER), TrainerLost("hangs."), OutOfMemory(SMALLER)])
    logged = attempts.run(plan_with(tmp_path / "one", 1), monkeypatch)
    assert attempts.seen == [(False, {}), (True, {}), (True, {TRAINER: 1}), (True, {TRAINER: 1})]
    of_one = "The run resumes from its last checkpoint (restart 1 of trainer.max_restarts=1)."
    assert logged[1] == f"hangs. {of_one}"


@pytest.mark.parametrize(
    ("failures", "max_restarts", "stops_at"),
    [
        ([TrainerLost("hangs.")], None, None),
        ([TrainerLost("hangs."), OutOfMemory(SMALLER), TrainerLost("again.")], 1, None),
        ([OutOfMemory(SMALLER)], 1, 1),
    ],
    ids=["no restart is allowed", "all restarts are used", "the user has asked for a stop"],
)
def test_a_run_that_may_not_resume_ends_with_its_last_failure(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failures: list[SkyliteError],
    max_restarts: int | None,
    stops_at: int | None,
) -> None:
    attempts = Attempts(failures, stops_at)
    with pytest.raises(TrainerLost) as failure:
        attempts.run(plan_with(tmp_path, max_restarts), monkeypatch)
    assert failure.value is failures[-1]
    assert len(attempts.seen) == len(failures)
