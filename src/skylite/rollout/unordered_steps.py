"""Sample without waiting for the slowest group: rollout.max_staleness of 2 or more.

A batch is the prompts of one step of an ordered run. Batches start in order, each from the newest verified
version. A step takes the first groups that are finished, of whatever batches, those of older versions first.
So that no group gets too old, a batch only starts while the steps in which its groups may be trained have
room for all groups that wait (the capacity of AReaL, arXiv 2505.24298, section 5.1).

Consumes: verified versions. Waits for: groups of any batch. Produces: rollout files, which say of which batch
each group is. Unblocks: the trainer.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from skylite.rollout.sampling import SampledStep, prompts_of, request_of
from skylite.rollout.session import Session
from skylite.rollout.step_metrics import Interval
from skylite.run.rollout_file import read_batches
from skylite.run.run_dir import AdapterVersion
from skylite.types import Group, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A group that waits for its step."""

    group: Group
    batch: int
    version: int
    """That sampled it."""
    sampled: Interval
    """From the start of its batch to its last reply."""


def take(
    finished: Sequence[Finished], in_flight: Counter[int], *, step: int, per_step: int, staleness: int
) -> list[Finished] | None:
    """The groups of `step`, or None while it has to wait for more.

    `in_flight`: version -> number of groups that are being sampled from it. A group of version v must be in
    a step up to v + 1 + `staleness`. Taking the oldest first leaves the later steps the most room, so if
    they have too little, some group in flight belongs into this one.
    """
    order = sorted(finished, key=lambda f: (f.version, f.sampled[1]))
    chosen, rest = order[:per_step], order[per_step:]
    left = in_flight + Counter(f.version for f in rest)
    is_too_late = any(
        sum(n for v, n in left.items() if v <= version) > per_step * (version + 1 + staleness - step)
        for version in left
    )
    return None if len(chosen) < per_step or is_too_late else chosen


def room(num_waiting: int, version: int, *, step: int, per_step: int, staleness: int) -> int:
    """How many more groups may start from `version`, beside those in flight or not taken by a step yet.

    `step`: the next one that takes groups; with them it ends at version + 1 + `staleness`.
    """
    return per_step * (version + 2 + staleness - step) - num_waiting


@dataclass(slots=True)
class Batch:
    """Prompts whose groups are being sampled."""

    number: int
    version: int
    in_flight: int
    task: asyncio.Task[list[Group]] | None = None


@dataclass(slots=True)
class Stream:
    """Batches in flight, and the groups that no step has taken yet."""

    session: Session
    adapter: AdapterVersion
    """The newest that is verified."""
    taken: dict[int, set[str]] = field(default_factory=dict)
    """Batch -> ids of the prompts whose groups are in a rollout file of an earlier process."""
    requests: dict[int, Interval] = field(default_factory=dict)
    """Batch -> when engines worked on it; the end is inf until then."""
    batches: list[Batch] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    dropped: int = 0
    """Groups left out since the last step."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _next: int = 1

    @property
    def oldest(self) -> int:
        """The oldest version that a request may use."""
        return min([self.adapter.version, *(batch.version for batch in self.batches)])

    def start(self, step: int) -> None:
        """Start batches while there is room. `step`: the next one that takes groups."""
        config, last = self.session.plan.config, self.session.plan.last_step
        per_step, staleness = config.rollout.prompts_per_step, config.rollout.max_staleness
        while True:
            waiting = sum(batch.in_flight for batch in self.batches) + len(self.finished)
            needed = per_step * (last + 1 - step) - waiting
            free = room(waiting, self.adapter.version, step=step, per_step=per_step, staleness=staleness)
            prompts = self._next_prompts()[: max(0, needed)]
            if not prompts or free < len(prompts):
                return
            self._start(prompts)

    def _next_prompts(self) -> list[Prompt]:
        """Those of the next batch that are in no rollout file of an earlier process."""
        per_step = self.session.plan.config.rollout.prompts_per_step
        while len(self.taken.get(self._next, ())) >= per_step:
            self._next += 1
        seen = self.taken.get(self._next, ())
        return [p for p in prompts_of(self.session, self._next, 0) if p.id not in seen]

    def _start(self, prompts: Sequence[Prompt]) -> None:
        batch = Batch(self._next, self.adapter.version, len(prompts))
        self._next += 1
        started = time.monotonic()
        self.requests[batch.number] = (started, math.inf)

        def ended(group: Group | None) -> None:
            now = time.monotonic()
            batch.in_flight -= 1
            if group is None:
                self.dropped += 1
            else:
                self.finished.append(
                    Finished(group=group, batch=batch.number, version=batch.version, sampled=(started, now))
                )
            if not batch.in_flight:
                self.requests[batch.number] = (started, now)
            self.changed.set()

        request = request_of(self.session, batch.number, self.adapter)
        batch.task = asyncio.create_task(self.session.source.sample(prompts, request, ended))
        batch.task.add_done_callback(lambda _: self.changed.set())
        self.batches.append(batch)
        self.session.progress.event("sampling_started", step=batch.number, version=batch.version)

    def take(self, step: int) -> list[Finished] | None:
        """The groups of a step, which do not wait any more. None: it has to wait."""
        rollout = self.session.plan.config.rollout
        in_flight: Counter[int] = Counter()
        for batch in self.batches:
            in_flight[batch.version] += batch.in_flight
        per_step, staleness = rollout.prompts_per_step, rollout.max_staleness
        chosen = take(self.finished, in_flight, step=step, per_step=per_step, staleness=staleness)
        if chosen is not None:
            kept = set(map(id, chosen))
            self.finished = [f for f in self.finished if id(f) not in kept]
        return chosen

    def sampled(self, chosen: Sequence[Finished]) -> SampledStep:
        """The groups that a step took."""
        dropped, self.dropped = self.dropped, 0
        batches = [finished.batch for finished in chosen]
        return SampledStep(groups=[f.group for f in chosen], dropped=dropped, batches=batches)

    async def wait(self) -> None:
        """Until a group has ended or a version has come. Raises what the sampling of a batch raises."""
        await self.changed.wait()
        self.changed.clear()
        done = [batch for batch in self.batches if batch.task is not None and batch.task.done()]
        for batch in done:
            self.batches.remove(batch)
            if batch.task is not None:
                batch.task.result()

    async def follow(self, versions: asyncio.Queue[AdapterVersion]) -> None:
        """Take over each verified version."""
        while True:
            self.adapter = await versions.get()
            self.changed.set()

    def cancel(self) -> None:
        for batch in self.batches:
            if batch.task is not None:
                batch.task.cancel()


def taken_before(session: Session, step: int) -> dict[int, set[str]]:
    """Batch -> ids of its prompts whose groups earlier steps took. Raises DataError.

    A step whose file is gone took the batch of its number.
    """
    taken: dict[int, set[str]] = {}
    for earlier in range(1, step):
        path = session.plan.run.rollout_path(earlier)
        places = read_batches(path, earlier) if path.exists() else []
        for batch, prompt in places or [(earlier, p.id) for p in prompts_of(session, earlier, 0)]:
            taken.setdefault(batch, set()).add(prompt)
    return taken
