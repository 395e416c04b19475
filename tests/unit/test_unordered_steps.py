"""Steps that take groups as they finish (rollout.max_staleness of 2 or more), and their resume."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from skylite.data.prompt_order import prompts_for_step
from skylite.environments.single_turn import SingleTurn
from skylite.errors import ConfigError, RunFailed, SyncFailed
from skylite.rollout.resume import remove_after
from skylite.rollout.session import read_events
from skylite.rollout.unordered_steps import Finished, room, take
from skylite.run.metrics_file import read_metrics
from skylite.run.rollout_file import read_batches
from skylite.run.run_dir import RunDir
from skylite.types import Group, Prompt
from tests.settings import load_config
from tests.unit.data_cases import prompt
from tests.unit.simulated_run import PROMPTS, run_of, times


def finished(*versions: int) -> list[Finished]:
    """Groups that ended one after the other, sampled from these versions."""
    group = Group(prompt=prompt(), trajectories=())
    return [
        Finished(group=group, batch=1, version=v, sampled=(0.0, float(i))) for i, v in enumerate(versions)
    ]


def taken(done: list[Finished], in_flight: dict[int, int], step: int, staleness: int = 2) -> list[int] | None:
    """When the groups that a step of two takes ended."""
    found = take(done, Counter(in_flight), step=step, per_step=2, staleness=staleness)
    return None if found is None else [int(f.sampled[1]) for f in found]


def test_a_step_takes_the_first_groups_and_waits_only_for_those_that_get_too_old() -> None:
    assert taken(finished(0), {0: 5}, 1) is None, "a step takes two"
    assert taken(finished(0, 0), {0: 4}, 1) == [0, 1], "four are left for steps 2 and 3"
    assert taken(finished(0, 0), {0: 5}, 1) is None, "steps 2 and 3 have no room for five of version 0"
    assert taken(finished(1, 0, 1), {0: 1}, 2) == [1, 0], "the older first"
    assert taken(finished(1, 1), {0: 2}, 2) == [0, 1], "the two of version 0 can still be in step 3"
    assert taken(finished(1, 1), {0: 1}, 3) is None, "after step 3 a group of version 0 is too old"
    assert taken(finished(0, 1, 1), {0: 1}, 3) is None
    assert taken(finished(0, 0, 1), {1: 2}, 3) is None, "three of version 1 for the two places of step 4"
    assert taken(finished(0, 0, 1), {1: 1}, 3) == [0, 1]


def test_groups_start_while_steps_have_room_for_them() -> None:
    assert [room(n, 0, step=1, per_step=2, staleness=2) for n in (0, 4, 6)] == [6, 2, 0]
    assert room(4, 0, step=2, per_step=2, staleness=2) == 0, "version 0 must be used up by step 3"
    assert room(4, 1, step=2, per_step=2, staleness=2) == 2


def places(run: RunDir) -> dict[int, list[tuple[int, str]]]:
    """Step -> batch and prompt of each of its groups."""
    files = sorted(run.rollouts.iterdir())
    return {k: read_batches(path, k) for k, path in enumerate(files, 1)}


def versions(run: RunDir) -> dict[int, list[int]]:
    """Step -> versions that sampled it."""
    files = sorted(run.rollouts.iterdir())
    return {
        k: sorted(set(pq.read_table(path)["adapter_version"].to_pylist())) for k, path in enumerate(files, 1)
    }


def expected_places(num_steps: int) -> set[tuple[int, str]]:
    """Batch and prompt of each group of a run with two prompts a step."""
    return {(k, p.id) for k in range(1, num_steps + 1) for p in prompts_for_step(PROMPTS, k, 2, 0)}


def waits_for_file(slow: int, path: Path) -> Callable[[int], Awaitable[None]]:
    """The request of one prompt ends when the file is there, others at once."""

    async def sample(number: int) -> None:
        await asyncio.sleep(0.01)
        async with asyncio.timeout(30):
            while number == slow and not path.exists():
                await asyncio.sleep(0.002)

    return sample


def test_a_slow_group_does_not_hold_the_steps_after_it(tmp_path: Path) -> None:
    slow = int(prompts_for_step(PROMPTS, 1, 2, 0)[0].id)
    sample = waits_for_file(slow, RunDir(tmp_path).trainer_step_path(2))
    run, engine, _ = run_of(tmp_path, 2, 6, sample_s=sample, train_s=0.02)
    found = places(run)
    assert {place for of_step in found.values() for place in of_step} == expected_places(6)
    assert all(len(of_step) == 2 for of_step in found.values())
    assert (1, str(slow)) in found[3], "steps 1 and 2 were trained without it; step 3 is the last that can"
    assert versions(run)[3][0] == 0
    assert read_metrics(run.metrics_path)[2]["staleness/max"] == 2
    assert engine.names == ["policy-v000006"]


@pytest.mark.parametrize(("sample_s", "train_s"), [(0.005, 0.05), (0.05, 0.005), (0.02, 0.02)])
@pytest.mark.parametrize("staleness", [2, 4])
def test_no_group_is_older_than_the_limit_and_none_is_lost(
    tmp_path: Path, staleness: int, sample_s: float, train_s: float
) -> None:
    drawn = random.Random(staleness)

    async def sample(_: int) -> None:
        await asyncio.sleep(sample_s * 4 * drawn.random() ** 3)

    run, engine, _ = run_of(tmp_path, staleness, 12, sample_s=sample, train_s=train_s)
    assert {place for of_step in places(run).values() for place in of_step} == expected_places(12)
    assert all(k - 1 - staleness <= min(v) <= max(v) <= k - 1 for k, v in versions(run).items())
    metrics = read_metrics(run.metrics_path)
    assert max(m["staleness/max"] for m in metrics) <= staleness
    assert all(m["time/overhead_s"] <= m["time/step_s"] for m in metrics)
    loaded, unloaded = times(run, "adapter_loaded", "version"), times(run, "adapter_unloaded", "version")
    assert sorted(unloaded) == list(range(12))
    assert all(loaded[v] < unloaded[v] for v in unloaded)
    assert engine.names == ["policy-v000012"]


def test_a_resume_samples_what_was_in_flight_again_and_nothing_twice(tmp_path: Path) -> None:
    slow = int(prompts_for_step(PROMPTS, 2, 2, 0)[1].id)
    sample = waits_for_file(slow, RunDir(tmp_path).trainer_step_path(2))
    run, _, _ = run_of(tmp_path, 2, 4, sample_s=sample, train_s=0.02)
    assert (2, str(slow)) in places(run)[3], "it was late"
    remove_after(run, run.default_adapters, 2, reuse_rollouts=False)
    before = places(run)
    assert len(before) == 2
    _, engine, _ = run_of(tmp_path, 2, 8, first_step=3, sample_s=0.01, train_s=0.02)
    assert {k: v for k, v in places(run).items() if k < 3} == before
    assert {place for of_step in places(run).values() for place in of_step} == expected_places(8)
    assert len(engine.requests) == 12, "two prompts for each of six steps"
    assert engine.requests[0][:2] == ("policy-v000002", slow), "the lost group starts first, from the newest"


def test_stored_rollouts_are_trained_again(tmp_path: Path) -> None:
    run, _, _ = run_of(tmp_path, 2, 5, sample_s=0.01)
    stored = {k: run.rollout_path(k).read_bytes() for k in (4, 5)}
    remove_after(run, run.default_adapters, 3, reuse_rollouts=True)
    _, engine, _ = run_of(tmp_path, 2, 7, first_step=4, sample_s=0.01)
    assert {k: run.rollout_path(k).read_bytes() for k in (4, 5)} == stored
    assert {place for of_step in places(run).values() for place in of_step} == expected_places(7)
    assert len(engine.requests) == 4
    assert [m["rollout/stored"] for m in read_metrics(run.metrics_path)] == [0, 0, 0, 1, 1, 0, 0]


def test_an_ordered_run_goes_on_unordered(tmp_path: Path) -> None:
    run, _, _ = run_of(tmp_path, 0, 3, sample_s=0.01)
    remove_after(run, run.default_adapters, 3, reuse_rollouts=False)
    run_of(tmp_path, 2, 6, first_step=4, sample_s=0.01)
    assert {place for of_step in places(run).values() for place in of_step} == expected_places(6)


def test_nothing_is_sampled_from_a_version_that_is_not_verified(tmp_path: Path) -> None:
    with pytest.raises(SyncFailed, match="policy-v000002"):
        run_of(tmp_path, 3, 6, wrong_version=2)
    started = [e for e in read_events(RunDir(tmp_path).events_path) if e["event"] == "sampling_started"]
    assert max(e["version"] for e in started) <= 1


def test_a_group_that_is_left_out_is_replaced_by_a_later_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, sample = prompts_for_step(PROMPTS, 2, 2, 0)[0].id, SingleTurn._group

    async def group(self: SingleTurn, request: Any, index: int, prompt: Prompt, ids: Any) -> Group | None:
        return None if prompt.id == bad else await sample(self, request, index, prompt, ids)

    monkeypatch.setattr(SingleTurn, "_group", group)
    run, _, _ = run_of(tmp_path, 2, 6, sample_s=0.01, train_s=0.02)
    found = [place for of_step in places(run).values() for place in of_step]
    assert all(len(of_step) == 2 for of_step in places(run).values())
    assert expected_places(6) - set(found) == {(2, bad)}
    assert {number for number, _ in set(found) - expected_places(6)} == {7}
    assert sum(m["groups/dropped"] for m in read_metrics(run.metrics_path)) == 1


def test_a_failure_of_one_batch_ends_the_run(tmp_path: Path) -> None:
    class Fails:
        async def score(self, items: object) -> list[object]:
            raise RunFailed("The reward failed.", "")

    with pytest.raises(RunFailed, match="The reward failed"):
        run_of(tmp_path, 2, 6, scorer=Fails())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "value"),
    [("data.sampling", "pass_rate"), ("data.retire_after", 2), ("algorithm.zero_std_groups", "resample")],
)
def test_what_needs_all_groups_of_a_step_is_refused(setting: str, value: object) -> None:
    load_config(None, {"rollout.max_staleness": 1, setting: value})
    with pytest.raises(ConfigError, match=r"needs all groups of a step"):
        load_config(None, {"rollout.max_staleness": 2, setting: value})
