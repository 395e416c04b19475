"""Successive halving of a sweep: who leaves at which rung, by scores that the test chooses. The loop of the
sweep's policies is the real one; a stub trains."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from skylite.errors import ConfigError, RunFailed
from skylite.rollout import sweep as sweep_module
from skylite.rollout.halving import Halving, check_halving, combinations, read_rungs
from skylite.rollout.plan import RunPlan
from skylite.rollout.shutdown import StopRequest
from skylite.rollout.sweep import End, Member
from skylite.run.metrics_file import held_out_scores, read_metrics, write_score
from skylite.run.run_dir import RunDir
from skylite.run.status import Status, read_status, write_status
from skylite.run.sweep_dir import SweepDir
from skylite.ui.sweep_screen import MemberScreen
from tests.made_up_runs import write_made_up_run
from tests.unit.simulated_run import plan_of

STEPS = 6
Scores = Mapping[str, Mapping[int, float]]
FOUR: Scores = {
    "a": {2: 0.1, 4: 0.9},
    "b": {2: 0.4, 4: 0.5},
    "c": {2: 0.3, 4: 0.6},
    "d": {2: 0.2, 4: 0.8},
}
"""At step 2 b and c are above d and a; at step 4 c is above b. a and d would have been best later."""


def no_stop() -> StopRequest:
    return StopRequest(asyncio.Event())


@dataclass
class Trained:
    """A sweep of stub policies in a folder, started as often as a test wants."""

    root: Path
    scores: Scores
    slow: Mapping[str, int] = field(default_factory=dict)
    """Policy -> how many turns of the event loop a step takes."""
    fails: Mapping[str, int] = field(default_factory=dict)
    """Policy -> the step at which it fails."""
    policies: Mapping[str, Mapping[str, Any]] | None = None
    dies_after: int | None = None
    """The process is killed after so many steps of all policies together."""
    steps: list[tuple[str, int]] = field(default_factory=list)
    """Every trained step, in order."""
    most: int = 0
    """Policies that trained at the same time."""
    training: set[str] = field(default_factory=set)

    @property
    def sweep(self) -> SweepDir:
        return SweepDir(self.root)

    def run(self, monkeypatch: pytest.MonkeyPatch, together: int = 9) -> dict[str, str]:
        """Start the sweep, or resume it: policy -> how it ended. Those that have ended take no part."""
        policies = self.policies or {name: {"lora.rank": k} for k, name in enumerate(self.scores)}
        self.root.mkdir(exist_ok=True)
        self.sweep.manifest_path.write_text(json.dumps({"policies": policies}))
        monkeypatch.setattr(sweep_module, "run_session", self.session)
        monkeypatch.setattr(sweep_module, "choose_checkpoint", lambda run, _: self.checkpoint(run))
        members = [
            Member(name, self.plan(name), MemberScreen(STEPS), no_stop())
            for name in self.scores
            if not self.sweep.why_left(name) and self.checkpoint(self.sweep.run(name)) < STEPS
        ]
        active = {m.name for m in members}
        halving = Halving(self.sweep, 2, STEPS, combinations(policies), active, read_rungs(self.sweep))
        self.members = {m.name: m for m in members}

        async def all_members() -> list[End]:
            free = asyncio.Semaphore(together)
            monkeypatch.setattr(sweep_module, "POLL_S", 0)
            shared: Any = SharedStub(self.sweep)
            return await asyncio.gather(
                *(sweep_module._run_member(shared, m, halving, free) for m in members)
            )

        ends = asyncio.run(all_members())
        return {m.name: str(end) for m, end in zip(members, ends, strict=True)}

    def plan(self, name: str) -> RunPlan:
        done = self.checkpoint(self.sweep.run(name))
        return plan_of(self.root / name, 0, STEPS, 2, done + 1, resumed=done > 0)

    def checkpoint(self, run: RunDir) -> int:
        path = run.root / "done"
        return int(path.read_text()) if path.exists() else 0

    async def session(self, plan: RunPlan, *, resume: bool, stop: StopRequest, **_: Any) -> bool:
        name, run = plan.run.root.name, plan.run
        assert resume == (plan.first_step > 1)
        self.training.add(name)
        self.most = max(self.most, len(self.training))
        try:
            for step in range(plan.first_step, plan.last_step + 1):
                for _turn in range(self.slow.get(name, 1)):
                    await asyncio.sleep(0)
                if stop.requested.is_set():
                    return False
                if self.fails.get(name) == step:
                    raise RunFailed(f"{name} fails at step {step}.")
                self.steps.append((name, step))
                if step % 2 == 0 and step < STEPS:
                    score = self.scores[name][step]
                    write_score(run, "step", step, score, plan.config.eval, is_binary=False)
                (run.root / "done").write_text(str(step))
                if len(self.steps) == self.dies_after:
                    raise KeyboardInterrupt
            write_status(
                run.status_path, Status(phase="stopped", step=step, num_steps=STEPS, adapter_version=step)
            )
            return True
        finally:
            self.training.discard(name)

    def trained(self) -> dict[str, int]:
        """Policy -> its steps."""
        return {name: sum(name == other for other, _ in self.steps) for name in self.scores}


@dataclass
class SharedStub:
    """What the loop of a policy uses of the shared processes."""

    sweep: SweepDir
    running: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize("together", [9, 2, 1])
@pytest.mark.parametrize("slow", [{}, {"a": 9}, {"b": 9, "c": 5}])
def test_the_better_half_stays_whoever_comes_first(
    together: int, slow: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = Trained(tmp_path / "s", FOUR, slow)
    ends = sweep.run(monkeypatch, together)
    assert {name: end.partition(":")[0] for name, end in ends.items()} == {
        "a": "left", "b": "left", "c": "done", "d": "left",
    }  # fmt: skip
    assert sweep.trained() == {"a": 2, "b": 4, "c": 6, "d": 2}
    assert sweep.most <= together
    assert ends["b"] == "left: held-out score 0.5 at step 4; 1 of 2 were higher (--halve-every)"
    status = read_status(sweep.sweep.run("a").status_path)
    assert status.phase == "stopped"
    assert "0.1 at step 2; " in str(status.error)
    assert sweep.sweep.why_left("a") == status.error


@pytest.mark.parametrize("dies_after", [1, 3, 6, 8, 11])
def test_a_killed_sweep_has_the_same_survivors_after_a_resume(
    dies_after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = Trained(tmp_path / "s", FOUR, {"a": 3}, dies_after=dies_after)
    with pytest.raises(KeyboardInterrupt):
        sweep.run(monkeypatch, together=3)
    # What the engine would answer a second time may differ in the last bits: only first scores count.
    before = {name: score for rung in read_rungs(sweep.sweep).values() for name, score in rung.items()}
    sweep.training.clear()
    sweep.run(monkeypatch, together=2)
    assert sweep.trained() == {"a": 2, "b": 4, "c": 6, "d": 2}
    after = read_rungs(sweep.sweep)
    assert after == {2: {"a": 0.1, "b": 0.4, "c": 0.3, "d": 0.2}, 4: {"b": 0.5, "c": 0.6}}
    assert all(score in (after[2][name], after.get(4, {}).get(name)) for name, score in before.items())


def test_equal_scores_leave_together_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 0.5, 0.3, 0.3, 0.3 none has two above it. Of 0.5, 0.5, 0.3, 0.3 the lower two have."""
    one = {name: {2: score, 4: score} for name, score in zip("abcd", (0.5, 0.3, 0.3, 0.3), strict=True)}
    assert Trained(tmp_path / "one", one).run(monkeypatch) == dict.fromkeys("abcd", "done")
    two = {name: {2: score, 4: 0.5} for name, score in zip("abcd", (0.5, 0.3, 0.5, 0.3), strict=True)}
    sweep = Trained(tmp_path / "two", two)
    sweep.run(monkeypatch)
    assert sweep.trained() == {"a": 6, "b": 2, "c": 6, "d": 2}


def test_of_an_odd_number_the_middle_stays_and_failures_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    five = {
        name: {2: score, 4: score} for name, score in zip("abcde", (0.1, 0.2, 0.3, 0.4, 0.5), strict=True)
    }
    sweep = Trained(tmp_path / "five", five)
    sweep.run(monkeypatch)  # 5 -> 3 (c, d, e) -> 2 (d, e)
    assert sweep.trained() == {"a": 2, "b": 2, "c": 4, "d": 6, "e": 6}
    sweep = Trained(tmp_path / "fails", five, fails={"e": 2, "d": 3})
    ends = sweep.run(monkeypatch)  # e fails before the rung: of a, b, c, d the half is c, d; d fails after it
    assert sweep.trained() == {"a": 2, "b": 2, "c": 6, "d": 2, "e": 1}
    assert ends["e"] == "failed: e fails at step 2."


def test_seeds_are_judged_by_their_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Means 0.45 and 0.5: rank 4 leaves with both seeds, although one has the highest score of all."""
    scores = {"r4s0": {2: 0.8}, "r4s1": {2: 0.1}, "r8s0": {2: 0.6, 4: 0.2}, "r8s1": {2: 0.4, 4: 0.1}}
    policies = {name: {"lora.rank": int(name[1]), "seed": int(name[3])} for name in scores}
    sweep = Trained(tmp_path / "s", scores, {"r4s1": 7}, policies=policies)
    ends = sweep.run(monkeypatch, together=3)
    assert sweep.trained() == {"r4s0": 2, "r4s1": 2, "r8s0": 6, "r8s1": 6}
    assert "held-out mean of 2 seeds 0.45 at step 2; 1 of 2 were higher" in ends["r4s0"]


def test_a_policy_that_waits_leaves_on_request_and_a_stopped_sweep_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a is slow, d has two above it and leaves, b has at most one above it and waits at step 4 instead.
    The user stops b; then Ctrl-C stops the others."""
    sweep = Trained(tmp_path / "s", FOUR, {"a": 10**6})
    loop_stop = asyncio.Event.set

    async def stop(plan: RunPlan, **keys: Any) -> bool:
        if plan.run.root.name != "a":
            return await original(plan, **keys)
        for _ in range(50):
            await asyncio.sleep(0)
        sweep.sweep.leave("b", "stopped by the user")
        loop_stop(sweep.members["b"].stop.requested)
        for _ in range(50):
            await asyncio.sleep(0)
        for member in sweep.members.values():
            loop_stop(member.stop.requested)
        return False

    original = sweep.session
    monkeypatch.setattr(Trained, "session", lambda self, plan, **keys: stop(plan, **keys))
    ends = sweep.run(monkeypatch)
    assert ends.pop("d").startswith("left: held-out score 0.2 at step 2; 2 of 4 were higher")
    assert ends == {"a": "stopped", "b": "left: stopped by the user", "c": "stopped"}
    monkeypatch.setattr(Trained, "session", lambda self, plan, **keys: original(plan, **keys))
    sweep.slow = {}
    sweep.run(monkeypatch)  # b has reached both rungs and counts there
    assert sweep.trained() == {"a": 2, "b": 4, "c": 6, "d": 2}


def test_a_policy_that_is_killed_before_its_evaluation_is_evaluated_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = Trained(tmp_path / "s", FOUR, dies_after=2)
    with pytest.raises(KeyboardInterrupt):
        sweep.run(monkeypatch, together=1)
    run = sweep.sweep.run("a")
    (run.evals / "step-v000002.json").unlink()
    called = []
    original = sweep.session

    async def evaluate(plan: RunPlan, **keys: Any) -> bool:
        if plan.run.root.name == "a" and plan.first_step == 3:
            called.append(plan.last_step)
            write_score(plan.run, "step", 2, 0.1, plan.config.eval, is_binary=False)
            return True
        return await original(plan, **keys)

    monkeypatch.setattr(Trained, "session", lambda self, plan, **keys: evaluate(plan, **keys))
    sweep.run(monkeypatch)
    assert called == [2]
    assert held_out_scores(run, sweep.plan("a").config.eval) == {2: 0.1}


def plans(tmp_path: Path, **changes: Any) -> dict[str, RunPlan]:
    a, b = (plan_of(tmp_path / name, 0, STEPS, 2, 1, resumed=False) for name in "ab")
    return {"a": a, "b": replace(b, config=b.config.model_copy(update=changes))}


@pytest.mark.parametrize(
    ("every", "grid", "changes", "sentence"),
    [
        (3, "lora.rank", {}, r"--halve-every 3 needs held-out scores at step 3, 6 .*eval\.every=2"),
        (6, "lora.rank", {}, "halves never: the policies train 6 steps"),
        (2, "seed", {}, "differ only in their seed"),
        (2, "num_steps", {"num_steps": 8}, "the policies differ in num_steps"),
    ],
)
def test_what_cannot_be_halved_is_refused(
    every: int, grid: str, changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    of = combinations({"a": {grid: 1}, "b": {grid: 2}})
    with pytest.raises(ConfigError, match=sentence):
        check_halving(every, plans(tmp_path, **changes), of)
    check_halving(2, plans(tmp_path), combinations({"a": {"lora.rank": 1}, "b": {"lora.rank": 2}}))


def test_policies_scored_on_other_rows_are_not_compared(tmp_path: Path) -> None:
    both = plans(tmp_path)
    both["b"] = replace(both["b"], held_out=both["b"].held_out[:1])
    with pytest.raises(ConfigError, match="the policies differ in data"):
        check_halving(2, both, combinations({"a": {"lora.rank": 1}, "b": {"lora.rank": 2}}))


@pytest.mark.parametrize(("name", "leaves"), [("collapsed", True), ("hacked", False), ("healthy", False)])
def test_a_policy_that_has_collapsed_leaves(
    name: str, leaves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the alarm of the report; an alarm of another kind ends nothing."""
    run, sweep = write_made_up_run(tmp_path, name), SweepDir(tmp_path)
    member = Member(name, plan_of(run.root, 0, 40, 10, 1, resumed=False), MemberScreen(40), no_stop())
    member.screen.state.history = read_metrics(run.metrics_path)
    monkeypatch.setattr(sweep_module, "WATCH_S", 0)
    shared: Any = SharedStub(sweep, {name: None})

    async def watch() -> None:
        watching = asyncio.create_task(sweep_module._watch_members(shared, [member]))
        while not (member.stop.requested.is_set() if leaves else member.seen == 40):
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0.005)
        watching.cancel()

    asyncio.run(watch())
    assert member.stop.requested.is_set() == leaves
    assert ("entropy fell" in sweep.why_left(name)) == leaves
    if leaves:
        assert member.end(sweep).how == "left"
        assert "collapsed" in str(read_status(run.status_path).error)
