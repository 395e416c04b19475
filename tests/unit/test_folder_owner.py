"""A run from elsewhere names its folders. Folders that are not the run's are never written or deleted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from skylite.config.loading import read_run_config
from skylite.errors import ConfigError
from skylite.rollout.plan import write_config
from skylite.rollout.resume import plan_resume
from skylite.rollout.run_session import clear_control_files
from skylite.run.own_folders import MARK_NAME, require_own_folders, require_own_place
from skylite.run.run_dir import RunDir
from tests.unit.bad_inputs import Reply, call, snapshot
from tests.unit.run_cases import begin, publish_adapter_0


def claim(run: RunDir, lora_sync_path: str) -> None:
    """Change the path in the run's config.json."""
    tree = json.loads(run.config_path.read_text())
    for section in (tree["resolved"]["identity"], tree["config"]["lora"]):
        section["lora_sync_path"] = lora_sync_path
    run.config_path.write_text(json.dumps(tree))


def refused_by_all(run: RunDir, outside: Path) -> list[str]:
    """Messages of resume and clean-up, which both refuse and change nothing."""
    before = snapshot(run.root), snapshot(outside)
    replies: list[Reply] = [
        call(["train", "--resume", str(run.root)]),
        call(["adapters", "gc", str(run.root)]),
    ]
    assert [r.code for r in replies] == [2, 2], [r.output for r in replies]
    assert (snapshot(run.root), snapshot(outside)) == before
    return [r.output for r in replies]


@pytest.mark.parametrize("whose", ["another run's", "a run's that marked it", "a killed writer's"])
def test_a_sync_folder_of_another_run_is_refused(tmp_path: Path, whose: str) -> None:
    run, outside = begin(tmp_path), tmp_path / "outside"
    if whose == "another run's":
        outside = begin(tmp_path, "other").default_adapters
    elif whose == "a run's that marked it":
        begin(tmp_path, "other", lora_sync_path=str(outside))
    else:
        (outside / ".policy-v000001.tmp-7").mkdir(parents=True)
    claim(run, str(outside))
    for message in refused_by_all(run, outside):
        assert f"names {outside} as its lora_sync_path" in message
        assert "move them away" in message


@pytest.mark.parametrize(
    ("path", "words"), [("adapters", "which is not an absolute path"), ("/a\0b", "with a NUL character")]
)
def test_a_sync_folder_that_is_no_absolute_path_is_refused(tmp_path: Path, path: str, words: str) -> None:
    run = begin(tmp_path)
    claim(run, path)
    for message in refused_by_all(run, tmp_path / "outside"):
        assert words in message


def test_the_sync_folder_is_recognised_by_its_mark_and_an_empty_one_is_marked_again(
    tmp_path: Path,
) -> None:
    own = tmp_path / "memory"
    run = begin(tmp_path, lora_sync_path=str(own))
    require_own_folders(run, read_run_config(run.config_path))
    assert call(["adapters", "gc", str(run.root)]).code == 0
    assert (own / "policy-v000000").is_dir()
    own.rename(tmp_path / "before the reboot")
    require_own_folders(run, read_run_config(run.config_path))
    write_config(plan_resume(run))
    publish_adapter_0(own)
    require_own_folders(run, read_run_config(run.config_path))
    assert (own / MARK_NAME).read_bytes() == (tmp_path / "before the reboot" / MARK_NAME).read_bytes()


@pytest.mark.parametrize(
    "name",
    [
        "adapters",
        "checkpoints",
        "rollouts",
        "rendezvous",
        "logs/trainer.log",
        "metrics.jsonl",
        "rollouts/step-000009",
    ],
)
def test_a_symlink_out_of_the_run_is_refused(tmp_path: Path, name: str) -> None:
    run, outside = begin(tmp_path), tmp_path / "outside"
    publish_adapter_0(outside)
    if (run.root / name).exists():
        (run.root / name).rename(tmp_path / "aside")
    (run.root / name).symlink_to(outside)
    for message in refused_by_all(run, outside):
        assert f"{run.root / name} is a link out of the run, to {outside}" in message


def test_a_symlink_within_the_run_is_accepted(tmp_path: Path) -> None:
    run = begin(tmp_path)
    (run.root / "newest").symlink_to(run.default_adapters / "policy-v000000")
    require_own_folders(run, read_run_config(run.config_path))


def test_the_ranks_rendezvous_in_a_private_folder(tmp_path: Path) -> None:
    plan = plan_resume(begin(tmp_path))
    before = os.umask(0)
    try:
        plan.run.rendezvous.mkdir(mode=0o777)
        (plan.run.rendezvous / "old").touch()
        clear_control_files(plan)
    finally:
        os.umask(before)
    assert plan.run.rendezvous.stat().st_mode & 0o777 == 0o700
    assert not list(plan.run.rendezvous.iterdir())
    plan.run.rendezvous.rmdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").touch()
    plan.run.rendezvous.symlink_to(tmp_path / "outside")
    clear_control_files(plan)
    assert not plan.run.rendezvous.is_symlink()
    assert (tmp_path / "outside" / "kept").exists()


def test_links_that_a_logger_leaves_are_no_links_of_the_run(tmp_path: Path) -> None:
    """As wandb 0.31 leaves them offline. Such a run resumes, is cleaned up and can be logged again."""
    run = begin(tmp_path)
    folder = run.loggers / "wandb" / "wandb"
    logs = folder / "offline-run-20260101_101010-0123456789ab" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug-internal.log").write_text("")
    (tmp_path / "core-debug.log").write_text("of wandb, in the user's cache")
    (logs / "debug-core.log").symlink_to(tmp_path / "core-debug.log")
    (folder / "latest-run").symlink_to(logs.parent.name)
    (folder / "debug-internal.log").symlink_to(f"{logs.parent.name}/logs/debug-internal.log")
    require_own_folders(run, read_run_config(run.config_path))
    require_own_place(run.root, run.logs, run.loggers)
    assert plan_resume(run).resolved.identity.run_id is not None


@pytest.mark.parametrize("name", ["wandb", "wandb.jsonl", "wandb.lock"])
def test_a_link_in_place_of_a_loggers_folder_or_journal_is_refused(tmp_path: Path, name: str) -> None:
    run = begin(tmp_path)
    run.loggers.mkdir()
    (run.loggers / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is a link out of"):
        require_own_folders(run, read_run_config(run.config_path))
    with pytest.raises(ConfigError, match="is a link out of"):
        require_own_place(run.root, run.loggers)
