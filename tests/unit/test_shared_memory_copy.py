"""A model's files in memory: copied once, shared by runs, removed with the last run."""

from __future__ import annotations

from pathlib import Path

import pytest

from skylite.config.train import TrainConfig
from skylite.engine.vllm.server_command import engine_command
from skylite.engine.vllm.start_engines import engine_spec
from skylite.errors import ConfigError
from skylite.hub import shared_memory_copy
from skylite.hub.shared_memory_copy import model_in_shared_memory
from skylite.model.policy import load_policy
from skylite.rollout.plan import RunPlan
from skylite.run.files import TEMPORARY_MARK
from skylite.run.run_dir import RunDir
from tests.small_run import lone_rank, resolved, settings
from tests.unit.work_cases import parts, recorded_work


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "pytorch_model.bin"):
        (folder / name).write_text(name)
    return folder


def test_the_model_files_exist_inside_the_block_and_are_removed_after_it(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    with model_in_shared_memory(model, copy):
        assert sorted(p.name for p in copy.iterdir()) == ["config.json", "model.safetensors"]
        assert (copy / "config.json").read_text() == "config.json"
        assert copy.stat().st_mode & 0o777 == 0o700
    assert not copy.exists()


def test_the_copy_counts_its_bytes(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory_copy, "COPY_CHUNK", 4)
    with recorded_work() as found, model_in_shared_memory(model, tmp_path / "copy"):
        assert (tmp_path / "copy" / "config.json").read_text() == "config.json"
        with model_in_shared_memory(model, tmp_path / "copy"):
            pass
    what = "copying the model to shared memory"
    assert parts(found) == [(what, 11 + 17, 11 + 17), (what, 0, None)], "the second run copies nothing"
    assert found[0].in_bytes


def test_two_runs_share_one_copy_and_the_last_removes_it(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    with model_in_shared_memory(model, copy):
        with model_in_shared_memory(model, copy):
            made = copy.stat().st_ino
        assert copy.stat().st_ino == made
    assert not copy.exists()


def test_an_unfinished_copy_of_a_killed_run_is_not_used(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    leftover = tmp_path / f".copy{TEMPORARY_MARK}"
    leftover.mkdir()
    (leftover / "model.safetensors").write_text("half")
    with model_in_shared_memory(model, copy):
        assert (copy / "model.safetensors").read_text() == "model.safetensors"
    assert not leftover.exists()


def test_too_little_memory_is_a_clear_error_and_leaves_no_files(model: Path, tmp_path: Path) -> None:
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(1 << 43)  # sparse: larger than any memory, no bytes on disk
    copy = tmp_path / "copy"
    with pytest.raises(ConfigError, match="use_shm"), model_in_shared_memory(model, copy):
        pass
    assert [
        p.name for p in tmp_path.iterdir() if p.name.startswith((".copy", "copy")) and p.suffix != ".lock"
    ] == []


def test_trainer_and_engines_read_the_copy(tiny_llama: Path, tmp_path: Path) -> None:
    copy, elsewhere = tmp_path / "copy", tmp_path / "on a slow disk"
    with model_in_shared_memory(tiny_llama, copy):
        where = resolved(elsewhere, tmp_path).model_copy(update={"shm_path": str(copy)})
        plan = RunPlan(
            run=RunDir(tmp_path / "run"),
            config=TrainConfig(),
            resolved=where,
            train=[],
            held_out=[],
            rewards=("math",),
            first_step=1,
        )
        command = engine_command(engine_spec(plan.run_config, ["q_proj"], 0, tmp_path))
        assert str(copy) in command
        assert not any(str(elsewhere) in word for word in command)
        with lone_rank() as dist:
            assert load_policy(where, settings(), dist).lora, "the model's own folder is not there at all"
