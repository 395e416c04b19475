"""A damaged checkpoint is named and skipped. The next older one is used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from skylite.errors import ConfigError, ModelError
from skylite.run.checkpoint_folder import (
    checkpoint_steps,
    choose_checkpoint,
    verify_checkpoint,
    write_checkpoint_manifest,
)
from skylite.run.run_dir import RunDir
from tests.logs import logged_messages

DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (
        lambda f: (f / "policy.safetensors").write_bytes(b"weight"),
        "policy.safetensors has 6 bytes, expected 7",
    ),
    "a changed byte": (
        lambda f: (f / "policy.safetensors").write_bytes(b"weighty"),
        "policy.safetensors has sha256",
    ),
    "a missing file": (lambda f: (f / "state.json").unlink(), "state.json cannot be read"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "has no manifest.json"),
    "a torn manifest": (lambda f: (f / "manifest.json").write_text('{"format": 3, "st'), "cannot be read"),
}


def make(run: RunDir, *steps: int) -> None:
    for step in steps:
        folder = run.checkpoint_path(step)
        folder.mkdir(parents=True)
        (folder / "policy.safetensors").write_bytes(b"weights")
        (folder / "state.json").write_text("{}")
        write_checkpoint_manifest(folder, step)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_older_one_is_used(damage: str, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    make(run, 10, 20)
    harm, words = DAMAGES[damage]
    harm(run.checkpoint_path(20))
    with logged_messages() as logged:
        assert choose_checkpoint(run, None) == 10
    assert len(logged) == 1
    assert "step-000020" in logged[0]
    assert words in logged[0]
    with pytest.raises(ModelError, match="step-000020"):
        choose_checkpoint(run, 20)


def test_without_an_intact_checkpoint_the_resume_is_refused(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    make(run, 10, 20)
    for step in (10, 20):
        (run.checkpoint_path(step) / "state.json").unlink()
    with pytest.raises(ModelError, match=r"All 2 checkpoints .* are damaged.* Give --at 0"):
        choose_checkpoint(run, None)
    assert choose_checkpoint(run, 0) == 0


def test_the_hashes_in_a_message_are_short(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    make(run, 10)
    (run.checkpoint_path(10) / "policy.safetensors").write_bytes(b"weighty")
    with pytest.raises(ModelError, match=r"has sha256 [0-9a-f]{12}\.\.\., expected [0-9a-f]{12}\.\.\.\."):
        verify_checkpoint(run.checkpoint_path(10))


def test_a_checkpoint_in_another_steps_folder_is_refused(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    make(run, 10)
    shutil.copytree(run.checkpoint_path(10), run.checkpoint_path(30))
    with pytest.raises(ModelError, match=r"step 10, expected .* step 30"):
        verify_checkpoint(run.checkpoint_path(30))


@pytest.mark.parametrize("found", [4, 6])
def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path, found: int) -> None:
    run = RunDir(tmp_path)
    make(run, 10)
    path = run.checkpoint_path(10) / "manifest.json"
    tree = json.loads(path.read_text())
    assert tree["format"] == 5
    path.write_text(json.dumps(tree | {"format": found}))
    with pytest.raises(ModelError, match=rf"has format {found} and step 10, expected format 5 and step 10"):
        verify_checkpoint(path.parent)


def test_the_requested_step_must_have_a_checkpoint(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    make(run, 10, 20)
    assert choose_checkpoint(run, 10) == 10
    assert choose_checkpoint(run, 0) == 0
    with pytest.raises(ConfigError, match="no checkpoint of step 15; it can resume from step 0, 10, 20"):
        choose_checkpoint(run, 15)


def test_a_run_without_checkpoints_resumes_from_its_start(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.checkpoints.mkdir()
    (run.checkpoints / ".step-000010.tmp-77").mkdir()
    assert checkpoint_steps(run) == []
    assert choose_checkpoint(run, None) == 0
