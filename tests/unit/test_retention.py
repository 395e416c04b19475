"""What a clean-up keeps. It removes the rest and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from skylite.adapters.retention import clean_up, kept_adapters, kept_checkpoints, remove_unfinished_files
from skylite.config.rollout import RolloutConfig
from skylite.config.train import CheckpointConfig, SyncConfig, TrainConfig
from skylite.errors import ConfigError, DataError
from skylite.run.metrics_file import Label, held_out_scores, remove_scores_after, write_score
from skylite.run.run_dir import RunDir, adapter_name, published_versions
from tests.settings import load_config


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


def test_versions_that_a_resume_samples_from_are_kept(tmp_path: Path) -> None:
    """One step stale, step 7 samples from version 5, and step 9 from version 7."""
    run = RunDir(tmp_path)
    config = TrainConfig(
        checkpoint=CheckpointConfig(every=2, keep_last=2),
        sync=SyncConfig(keep_last=2),
        rollout=RolloutConfig(max_staleness=1),
    )
    for step in range(9):
        (run.default_adapters / adapter_name(step)).mkdir(parents=True)
    for step in (2, 4, 6, 8):
        run.checkpoint_path(step).mkdir(parents=True)
    clean_up(run, run.default_adapters, 8, config)
    assert [a.version for a in published_versions(run.default_adapters)] == [0, 5, 6, 7, 8]


def test_scores_on_other_problems_do_not_count(tmp_path: Path) -> None:
    run, config = RunDir(tmp_path), TrainConfig().eval.model_copy(update={"limit": 64})
    labels: list[tuple[Label, int]] = [("before", 0), ("step", 10), ("after", 20)]
    for label, version in labels:
        write_score(run, label, version, 0.1 * version, config, is_binary=True)
    (run.evals / "policy-v000010-test-greedy.json").write_text("{}")
    assert held_out_scores(run, config) == {0: 0.0, 10: 1.0, 20: 2.0}
    assert held_out_scores(run, config.model_copy(update={"limit": 32})) == {}


def test_keep_best_without_scores_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.keep_best=1 needs a held-out score"):
        load_config(None, {"checkpoint.keep_best": 1})
    with pytest.raises(ConfigError, match="multiple of checkpoint"):
        load_config(
            None, {"checkpoint.keep_best": 1, "checkpoint.every": 10, "eval.limit": 8, "eval.every": 15}
        )
    load_config(None, {"checkpoint.keep_best": 1, "eval.limit": 8, "eval.every": 20})


def test_scores_after_a_version_are_deleted_with_their_completions(tmp_path: Path) -> None:
    run, config = RunDir(tmp_path), TrainConfig().eval
    for label, version in (("before", 0), ("step", 10), ("step", 20), ("after", 30)):
        write_score(run, label, version, 0.5, config, is_binary=True)  # type: ignore[arg-type]
        (run.evals / f"{label}-v{version:06d}.parquet").touch()
    (run.evals / "policy-v000020-test-greedy.json").touch()
    remove_scores_after(run, 10)
    assert sorted(p.name for p in run.evals.iterdir()) == [
        "before-v000000.json", "before-v000000.parquet", "policy-v000020-test-greedy.json",
        "step-v000010.json",         "step-v000010.parquet",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"split": "test", "limit": null}', '{"split": "test", "limit": "x"}']
)
def test_a_damaged_score_is_named(tmp_path: Path, text: str) -> None:
    run = RunDir(tmp_path)
    run.evals.mkdir()
    (run.evals / "step-v000010.json").write_text(text)
    config = TrainConfig().eval.model_copy(update={"split": "test", "limit": None})
    if '"x"' in text:
        assert held_out_scores(run, config) == {}
    else:
        with pytest.raises(DataError, match=r"step-v000010\.json is not a valid held-out result"):
            held_out_scores(run, config)


def test_unfinished_files_are_deleted_and_links_are_not_followed(tmp_path: Path) -> None:
    run, precious = RunDir(tmp_path / "run"), tmp_path / "precious"
    for folder in (run.rollouts, run.logs, run.checkpoints / ".step-000001.tmp-7", precious):
        folder.mkdir(parents=True)
    (precious / "file").touch()
    (run.checkpoints / ".step-000001.tmp-7" / "x").touch()
    (run.logs / ".log.tmp-7").symlink_to(precious)
    for path in (
        run.rollouts / ".step-000001.parquet.tmp-7",
        run.root / ".status.json.tmp-7",
        run.root / ".hidden",
    ):
        path.touch()
    sync = tmp_path / "sync"
    (sync / ".policy-v000001.tmp-7").mkdir(parents=True)
    found = remove_unfinished_files(run, sync)
    assert [p.name for p in found] == [
        ".status.json.tmp-7", ".step-000001.parquet.tmp-7", ".step-000001.tmp-7", ".log.tmp-7",
        ".policy-v000001.tmp-7",
    ]  # fmt: skip
    assert not any(p.exists() or p.is_symlink() for p in found)
    assert (precious / "file").exists()
    assert (run.root / ".hidden").exists()
