"""A warm start is checked before anything is written, and the run then owns a copy."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from skylite.adapters.import_adapter import copy_adapter, read_warm_start
from skylite.adapters.manifest import Canary, Manifest
from skylite.cli.main import app
from skylite.config.algorithm import AlgorithmConfig
from skylite.config.loading import read_run_config
from skylite.config.train import TrainConfig
from skylite.data.prompts import PromptFileInfo, write_rows
from skylite.errors import ConfigError, ModelError
from skylite.hub.resolve import check_folder
from skylite.rollout.plan import plan_run, write_run
from skylite.rollout.resume import plan_resume
from skylite.run.files import sha256_file
from skylite.run.run_dir import RunDir
from tests.logs import logged_messages
from tests.unit.data_cases import prompt
from tests.unit.run_cases import make_adapter, make_model


def publish(adapter: Path, fingerprint: str) -> Path:
    """Write skylite's manifest into an adapter folder."""
    weights = adapter / "adapter_model.safetensors"
    manifest = Manifest(
        version=60,
        step=60,
        parent=59,
        weights_sha256=sha256_file(weights),
        weights_bytes=weights.stat().st_size,
        base_model="the-base",
        base_fingerprint=fingerprint,
        rank=4,
        alpha=8.0,
        dtype="float32",
        target_modules=["q_proj"],
        canary=Canary(sequences=[[1, 2]], policy_logprobs=[[-1.0]], base_logprobs=[[-1.0]]),
    )
    (adapter / "manifest.json").write_text(manifest.model_dump_json())
    return adapter


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a model and data."""
    make_model(tmp_path / "model")
    info = PromptFileInfo(
        dataset="t",
        source_kind="generated",
        source="t",
        source_sha256="0",
        count=1,
        seed=0,
        split="train",
        reward="math",
        system="",
        few_shot=[],
    )
    write_rows(tmp_path / "data" / "train.parquet", [prompt()], info)
    return tmp_path


def config(
    root: Path, adapter: Path, rank: int = 4, alpha: float = 8.0, use_rslora: bool = False, **algorithm: Any
) -> TrainConfig:
    lora = {"rank": rank, "alpha": alpha, "use_rslora": use_rslora, "from_adapter": str(adapter)}
    sections = {
        "model": {"name": str(root / "model")},
        "data": {"path": str(root / "data")},
        "lora": lora,
        "algorithm": algorithm,
    }
    return TrainConfig.model_validate(sections)


def refusal(root: Path, adapter: Path, **settings: Any) -> str:
    """The error of plan_run, which must write nothing."""
    before = sorted(root.rglob("*"))
    with pytest.raises((ConfigError, ModelError)) as caught:
        plan_run(config(root, adapter, **settings), RunDir(root / "run"))
    assert sorted(root.rglob("*")) == before
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"rank": 32, "alpha": 8.0}, ["rank 4, but this run uses 32", "Leave out"]),
        ({"alpha": 8.5}, ["alpha 8, but this run uses 8.5"]),
        ({"rank": 8, "alpha": 16.0}, ["rank 4, but this run uses 8; alpha 8, but this run uses 16"]),
        ({"use_rslora": True}, ["use_rslora false, but this run uses true"]),
    ],
)
def test_settings_that_differ_from_the_adapter_are_refused(
    root: Path, settings: dict[str, Any], parts: list[str]
) -> None:
    message = refusal(root, make_adapter(root / "adapter", "model"), **settings)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"peft_type": "IA3"}, "peft_type is IA3"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "trained biases"),
        ({"modules_to_save": ["lm_head"]}, "fully trained modules"),
        ({"rank_pattern": {"q_proj": 8}}, "of rank 4, but its adapter_config.json says 8"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4 fits a changed base"),
        ({"r": "many"}, "is not a PEFT LoRA configuration"),
        ({"target_modules": ["q_proj", 1]}, "is not a PEFT LoRA configuration"),
        ({"target_modules": {"q_proj": 1}}, "is not a PEFT LoRA configuration"),
        ({"r": 8}, "of rank 4, but its adapter_config.json says 8"),
    ],
)
def test_only_plain_lora_is_accepted(root: Path, changes: dict[str, Any], part: str) -> None:
    assert part in refusal(root, make_adapter(root / "adapter", "model", **changes))


def test_every_reason_is_named_the_kind_of_adapter_first(root: Path) -> None:
    folder = make_adapter(
        root / "adapter", "model", peft_type="IA3", use_dora=True, modules_to_save=["lm_head"]
    )
    message = refusal(root, folder)
    assert "cannot be used: its peft_type is IA3; " in message
    assert "DoRA" in message
    assert "fully trained modules" in message


def test_a_copy_that_is_damaged_is_noticed_and_removed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_half(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:-4])

    run = RunDir(root / "run")
    monkeypatch.setattr(shutil, "copyfile", copy_half)
    with pytest.raises(ModelError):
        copy_adapter(make_adapter(root / "adapter", "model"), run.warm_start)
    assert not run.warm_start.exists()


@pytest.mark.parametrize(
    ("modules", "names"), [(["q_proj", "v_proj"], ["q_proj", "v_proj"]), ("all-linear", None), (None, None)]
)
def test_the_names_of_the_adapted_modules(root: Path, modules: Any, names: list[str] | None) -> None:
    folder = make_adapter(root / "adapter", "model", target_modules=modules)
    assert read_warm_start(folder).target_modules == names


def test_an_incomplete_or_damaged_folder_is_refused(root: Path) -> None:
    adapter = make_adapter(root / "adapter", "model")
    weights = adapter / "adapter_model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-4])
    assert "truncated" in refusal(root, adapter)
    save_file({"model.embed_tokens.weight": np.ones((3, 4), np.float32)}, weights)
    assert "contains no LoRA matrix" in refusal(root, adapter)
    weights.unlink()
    assert "adapter_model.safetensors is missing" in refusal(root, adapter)
    assert "adapter_config.json is missing" in refusal(root, root / "nothing here")
    assert "adapter_config.json is missing" in refusal(root, Path("~nobody of this name/adapter"))


def test_a_published_adapter_must_match_this_base_and_be_unchanged(root: Path) -> None:
    adapter = publish(
        make_adapter(root / "adapter", "elsewhere"), check_folder(root / "model", "").fingerprint
    )
    with logged_messages() as notes:
        plan_run(config(root, adapter), RunDir(root / "run"))
    assert any(f"warm start from {adapter} (rank 4, alpha 8, policy-v000060)" in note for note in notes)
    assert not any("elsewhere" in note for note in notes), "the fingerprint says more than the path"

    other = publish(
        make_adapter(root / "other", "model"),
        check_folder(make_model(root / "model 2", seed=1), "").fingerprint,
    )
    assert "was trained on the-base" in refusal(root, other)

    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert "sha256" in refusal(root, adapter)


def test_an_adapter_of_another_base_name_is_accepted_with_a_note(root: Path) -> None:
    adapter = make_adapter(root / "adapter", "/somebody/else/model")
    with logged_messages() as notes:
        plan = plan_run(config(root, adapter), RunDir(root / "run"))
    assert any("/somebody/else/model" in str(note) for note in plan.resolved.notes)
    assert {note.text for note in plan.resolved.notes} <= set(notes)
    same = make_adapter(root / "same", str(root / "model"))
    assert not any(
        "taken for the same" in str(n)
        for n in plan_run(config(root, same), RunDir(root / "run")).resolved.notes
    )


def test_a_kl_to_the_base_is_logged_for_a_warm_start(root: Path) -> None:
    adapter = make_adapter(root / "adapter", "model")
    for ref, warned in (("base", True), ("init", False)):
        plan = plan_run(config(root, adapter, kl_coef=0.1, kl_ref=ref), RunDir(root / "run"))
        warnings = [note.text for note in plan.resolved.notes if note.is_warning]
        assert any("pulls a warm start back to the base" in text for text in warnings) == warned


def test_the_run_owns_a_copy_and_resumes_without_the_source_folder(root: Path) -> None:
    adapter = publish(make_adapter(root / "adapter", "model"), check_folder(root / "model", "").fingerprint)
    files = {p.name: p.read_bytes() for p in adapter.iterdir()}
    run = RunDir(root / "run")
    write_run(plan_run(config(root, adapter), run))
    shutil.rmtree(adapter)
    assert {p.name: p.read_bytes() for p in run.warm_start.iterdir()} == files
    assert read_run_config(run.config_path).resolved.identity.warm_start == run.warm_start

    moved = RunDir(run.root.rename(root / "moved"))
    identity = plan_resume(moved).resolved.identity
    assert (identity.warm_start, identity.lora_sync_path) == (moved.warm_start, moved.default_adapters)


def test_a_teacher_is_checked_against_the_base_and_copied(root: Path) -> None:
    def distilled(adapter: Path) -> TrainConfig:
        algorithm = AlgorithmConfig(name="opd", teacher=str(adapter))
        return config(root, root).model_copy(update={"lora": TrainConfig().lora, "algorithm": algorithm})

    foreign, run = publish(make_adapter(root / "foreign", "model"), "0" * 64), RunDir(root / "run")
    with pytest.raises(ConfigError, match=r"foreign was trained on the-base .* Set --model"):
        plan_run(distilled(foreign), run)
    with pytest.raises(ModelError, match="nothing is not an adapter folder"):
        plan_run(distilled(root / "nothing"), run)
    own = publish(make_adapter(root / "own", "model"), check_folder(root / "model", "").fingerprint)
    plan = plan_run(distilled(own), run)
    assert any(f"teacher {own} (rank 4, alpha 8)" in note.text for note in plan.resolved.notes)
    write_run(plan)
    shutil.rmtree(own)
    assert not run.warm_start.exists()
    moved = RunDir(run.root.rename(root / "moved"))
    assert plan_resume(moved).resolved.identity.teacher == moved.teacher
    assert read_warm_start(moved.teacher).rank == 4


def test_a_run_without_a_warm_start_has_none(root: Path) -> None:
    cold = config(root, root).model_copy(update={"lora": TrainConfig().lora})
    run = RunDir(root / "run")
    write_run(plan_run(cold, run))
    assert not run.warm_start.exists()
    assert read_run_config(run.config_path).resolved.identity.warm_start is None


def test_existing_files_in_place_of_the_copy_are_never_deleted(root: Path) -> None:
    run = RunDir(root / "run")
    run.warm_start.mkdir(parents=True)
    (run.warm_start / "mine").touch()
    with pytest.raises(ConfigError, match="already exists"):
        plan_run(config(root, make_adapter(root / "adapter", "model")), run)
    assert [p.name for p in run.root.rglob("*")] == ["warm_start", "mine"]


def test_a_resume_takes_no_adapter_to_start_from(tmp_path: Path) -> None:
    words = ["train", "--from-adapter", f"{tmp_path / 'adapter'}", "--resume", f"{tmp_path / 'run'}"]
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, ConfigError)
    assert re.search(r"--from-adapter starts a new run .* they cannot be combined", str(error))
