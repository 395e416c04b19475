"""What a clean-up keeps. It removes the rest and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from skylite.adapters.retention import (
    Label,
    clean_up,
    held_out_scores,
    kept_adapters,
    kept_checkpoints,
    write_score,
)
from skylite.config.checkpoint import CheckpointConfig
from skylite.config.loading import load_config
from skylite.config.train import SyncConfig, TrainConfig
from skylite.errors import ConfigError
from skylite.run.run_dir import RunDir, adapter_name, published_versions


def test_the_newest_and_the_best_checkpoints_are_kept() -> None:
    scores = {10: 0.5, 20: 0.7, 30: 0.7, 40: 0.6, 70: 0.99}  # 70 has no checkpoint
    steps = [10, 20, 30, 40, 50, 60]
    assert kept_checkpoints(steps, CheckpointConfig(keep_last=2), scores) == {50, 60}
    assert kept_checkpoints(steps, CheckpointConfig(keep_last=1, keep_best=1), scores) == {20, 60}
    assert kept_checkpoints(steps, CheckpointConfig(keep_last=1, keep_best=3), scores) == {20, 30, 40, 60}
    assert kept_checkpoints(steps, CheckpointConfig(keep_last=1, keep_best=2), {}) == {60}


def test_first_last_recent_and_checkpoint_adapters_are_kept() -> None:
    assert kept_adapters(range(10), 9, SyncConfig(keep_last=3), [4]) == {0, 4, 7, 8, 9}
    assert kept_adapters(range(10), 9, SyncConfig(keep_last=2, keep_every=3), []) == {0, 3, 6, 8, 9}
    assert kept_adapters(range(10), 7, SyncConfig(keep_last=2), []) == {0, 6, 7, 8, 9}, (
        "nothing newer than what is in use"
    )


def test_clean_up_removes_the_rest(tmp_path: Path) -> None:
    run, config = (
        RunDir(tmp_path),
        TrainConfig(checkpoint=CheckpointConfig(every=2, keep_last=1), sync=SyncConfig(keep_last=2)),
    )
    for step in range(9):
        (run.default_adapters / adapter_name(step)).mkdir(parents=True)
        (run.default_adapters / adapter_name(step) / "w").write_bytes(b"x" * 10)
    for step in (2, 4, 6, 8):
        run.checkpoint_path(step).mkdir(parents=True)
    removed = clean_up(run, run.default_adapters, 8, config)
    assert (removed.checkpoints, removed.adapters, removed.num_bytes) == ([2, 4, 6], [1, 2, 3, 4, 5, 6], 60)
    assert [a.version for a in published_versions(run.default_adapters)] == [0, 7, 8]
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_dir()) == [
        "adapters", "checkpoints", "policy-v000000", "policy-v000007", "policy-v000008", "step-000008",
    ]  # fmt: skip


def test_scores_on_other_problems_do_not_count(tmp_path: Path) -> None:
    run, config = RunDir(tmp_path), TrainConfig().eval.model_copy(update={"limit": 64})
    labels: list[tuple[Label, int]] = [("before", 0), ("step", 10), ("after", 20)]
    for label, version in labels:
        write_score(run, label, version, 0.1 * version, config)
    (run.evals / "policy-v000010-test-greedy.json").write_text("{}")
    assert held_out_scores(run, config) == {0: 0.0, 10: 1.0, 20: 2.0}
    assert held_out_scores(run, config.model_copy(update={"limit": 32})) == {}


def test_keep_best_without_scores_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.keep_best=1 needs a held-out score"):
        load_config(None, {"checkpoint.keep_best": 1})
    with pytest.raises(ConfigError, match="multiple of checkpoint"):
        load_config(None, {"checkpoint.keep_best": 1, "eval.limit": 8, "eval.every": 15})
    load_config(None, {"checkpoint.keep_best": 1, "eval.limit": 8, "eval.every": 20})
