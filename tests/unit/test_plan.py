"""Settings that `skylite train` refuses on any machine before it writes anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skylite.config.train import TrainConfig
from skylite.data.prompts import PromptFileInfo, write_prompts
from skylite.errors import ConfigError
from skylite.orchestrator.plan import plan_run
from skylite.run.run_dir import RunDir
from tests.unit.data_cases import prompt


@pytest.mark.parametrize("trainer", [{"attention": "flex"}, {"offload": True}])
@pytest.mark.usefixtures("machine")
def test_gpu_settings_are_refused_without_a_gpu(trainer: dict[str, Any], tmp_path: Path) -> None:
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
    write_prompts(tmp_path / "data" / "train.parquet", [prompt()], info)
    config = TrainConfig.model_validate({"data": {"path": str(tmp_path / "data")}, "trainer": trainer})
    name, value = next(iter(trainer.items()))
    with pytest.raises(ConfigError, match=f"trainer.{name}={str(value).lower()} .*GPU"):
        plan_run(config, RunDir(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
