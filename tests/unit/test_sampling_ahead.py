"""Sampling one step ahead (rollout.max_staleness = 1), and its resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from skylite.errors import ConfigError, SyncFailed
from skylite.rollout.resume import remove_after
from skylite.rollout.session import read_events
from skylite.run.metrics_file import read_metrics
from skylite.run.run_dir import RunDir, published_versions
from tests.settings import load_config
from tests.unit.simulated_run import (
    run_of,
    sampled_from,
    times,
)


@pytest.mark.parametrize(
    ("sample_s", "train_s"),
    [(0.06, 0.06), (0.12, 0.02), (0.02, 0.12)],
    ids=["equal", "slow engine", "slow trainer"],
)
def test_the_next_step_is_sampled_during_training(tmp_path: Path, sample_s: float, train_s: float) -> None:
    run, engine, _ = run_of(tmp_path, 1, 5, sample_s=sample_s, train_s=train_s)
    assert sampled_from(run) == {1: 0, 2: 0, 3: 1, 4: 2, 5: 3}
    started, seen = times(run, "sampling_started", "step"), times(run, "trainer_step_seen", "step")
    assert all(started[k + 1] < seen[k] for k in range(1, 5)), "step k + 1 begins before step k is trained"
    written = times(run, "rollouts_written", "step")
    assert all(written[k] < written[k + 1] for k in range(1, 5))
    metrics = read_metrics(run.metrics_path)
    assert [m["staleness/max"] for m in metrics] == [0, 1, 1, 1, 1]
    assert [m["staleness/mean"] for m in metrics] == [0, 1, 1, 1, 1]
    assert all(0 <= m["time/overlap_s"] <= m["time/rollout_s"] for m in metrics)
    assert sum(m["time/overlap_s"] for m in metrics) > 0
    assert engine.names == ["policy-v000005"]


def test_a_checkpoint_before_the_step_file_is_no_part_of_the_sync(tmp_path: Path) -> None:
    keys = ("time/canary_s", "time/publish_s", "time/train_s", "policy/entropy", "mismatch/logprob_diff_mean")
    slow = dict.fromkeys(keys, 0.01) | {"time/checkpoint_s": 100.0}
    run, _, _ = run_of(tmp_path, 0, 2, facts={2: {"metrics": slow}})
    first, second = (m["time/sync_s"] for m in read_metrics(run.metrics_path))
    assert 0 < first < 50
    assert 0 < second + 100 < 50, "the file says that 100 s of the time since training went to the checkpoint"


def test_a_version_is_unloaded_after_the_last_step_sampled_from_it(tmp_path: Path) -> None:
    run, _, _ = run_of(tmp_path, 1, 5, sample_s=0.12, train_s=0.02)
    ended = times(run, "sampling_ended", "step")
    unloaded, loaded = times(run, "adapter_unloaded", "version"), times(run, "adapter_loaded", "version")
    assert all(loaded[v + 1] < ended[v + 2] < unloaded[v] for v in range(3)), (
        "the next is loaded while requests name this one"
    )


def test_nothing_is_sampled_from_a_version_that_is_not_verified(tmp_path: Path) -> None:
    for staleness in (0, 1):
        root = tmp_path / str(staleness)
        with pytest.raises(SyncFailed, match="policy-v000002"):
            run_of(root, staleness, 5, wrong_version=2)
        assert 2 not in sampled_from(RunDir(root)).values()
        sampled = {
            e["version"] for e in read_events(RunDir(root).events_path) if e["event"] == "sampling_started"
        }
        assert max(sampled) == 1


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_resumed_run_samples_like_an_uninterrupted_one(tmp_path: Path, staleness: int) -> None:
    straight, engine, _ = run_of(tmp_path / "straight", staleness, 6)
    run, first, _ = run_of(tmp_path / "cut", staleness, 4)
    run.checkpoint_path(3).mkdir()
    remove_after(run, run.default_adapters, 3, reuse_rollouts=False)
    assert 4 not in sampled_from(run), "what the dead attempt sampled beyond the checkpoint is sampled again"
    _, second, logged = run_of(tmp_path / "cut", staleness, 6, first_step=4)
    assert sampled_from(run) == sampled_from(straight)
    assert first.requests[:6] + second.requests == engine.requests
    assert "not interrupted" not in logged


@pytest.mark.parametrize("staleness", [0, 1])
def test_rollouts_after_the_checkpoint_are_reused_on_resume(tmp_path: Path, staleness: int) -> None:
    straight, engine, _ = run_of(tmp_path / "straight", staleness, 7)
    run, _, _ = run_of(tmp_path / "cut", staleness, 5)
    stored = {k: run.rollout_path(k).read_bytes() for k in (4, 5)}
    remove_after(run, run.default_adapters, 3, reuse_rollouts=True)
    _, second, _ = run_of(tmp_path / "cut", staleness, 7, first_step=4)
    assert second.requests == engine.requests[10:], "two prompts a step: steps 6 and 7 only"
    assert {k: run.rollout_path(k).read_bytes() for k in (4, 5)} == stored
    assert [m["rollout/stored"] for m in read_metrics(run.metrics_path)] == [
        0.0,
        0.0,
        0.0,
        1.0,
        1.0,
        0.0,
        0.0,
    ]
    keys = ("step", "reward/mean", "staleness/max", "completion/tokens_mean")
    found, expected = (
        [{k: m[k] for k in keys} for m in read_metrics(r.metrics_path)] for r in (run, straight)
    )
    assert found == expected


def test_a_resume_without_the_adapter_to_sample_from_logs_it(tmp_path: Path) -> None:
    run, _, _ = run_of(tmp_path, 1, 4)
    remove_after(run, run.default_adapters, 3, reuse_rollouts=False)
    (run.default_adapters / "policy-v000002").rename(tmp_path / "gone")
    _, _, logged = run_of(tmp_path, 1, 6, first_step=4)
    assert "policy-v000002 is missing in" in logged
    assert {k: v for k, v in sampled_from(run).items() if k > 3} == {4: 3, 5: 3, 6: 4}


def test_clean_up_keeps_the_adapter_that_a_resumed_run_samples_from(tmp_path: Path) -> None:
    run, _, _ = run_of(tmp_path, 1, 3, sample_s=0.0, train_s=0.0)
    run.checkpoint_path(3).mkdir()
    (run.checkpoint_path(3) / "state.json").write_text("{}")
    run_of(tmp_path, 1, 12, first_step=4, sample_s=0.0, train_s=0.0)
    assert [a.version for a in published_versions(run.default_adapters)] == [0, 2, 3, 10, 11, 12]


def test_staleness_without_a_correction_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"importance\.mode=none would not correct"):
        load_config(None, {"rollout.max_staleness": 1, "importance.mode": "none"})
    with pytest.raises(ConfigError, match=r"rollout\.max_staleness"):
        load_config(None, {"rollout.max_staleness": 9})
