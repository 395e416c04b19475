"""Settings that `skylite train` refuses on any machine before it writes anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skylite.config.train import TrainConfig
from skylite.data.prompts import PromptFileInfo, write_rows
from skylite.errors import ConfigError
from skylite.notes import warning
from skylite.rollout import plan as plan_module
from skylite.rollout.plan import plan_run
from skylite.run.run_dir import RunDir
from tests.unit.data_cases import prompt


def config_with_data(folder: Path, **sections: Any) -> TrainConfig:
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
    write_rows(folder / "train.parquet", [prompt()], info)
    return TrainConfig.model_validate({"data": {"path": str(folder)}, "eval": {"limit": 0}} | sections)


@pytest.mark.parametrize("trainer", [{"attention": "flex"}, {"offload": True}])
@pytest.mark.usefixtures("machine")
def test_gpu_settings_are_refused_without_a_gpu(trainer: dict[str, Any], tmp_path: Path) -> None:
    config = config_with_data(tmp_path / "data", trainer=trainer)
    name, value = next(iter(trainer.items()))
    with pytest.raises(ConfigError, match=f"trainer.{name}={str(value).lower()} .*GPU"):
        plan_run(config, RunDir(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("machine")
def test_a_plan_tells_what_triton_lacks(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "triton_note", lambda device: warning(f"asked for {device}"))
    config = config_with_data(
        tmp_path / "data", model={"name": str(tiny_llama)}, rollout={"prompts_per_step": 1}
    )
    assert "warning: asked for cpu" in map(str, plan_run(config, RunDir(tmp_path / "run")).resolved.notes)
