"""Read a run from Python: `skylite.load_run(path)`. It loads no torch and changes nothing in the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from skylite.config.loading import read_run_config
from skylite.config.train import RunConfig, TrainConfig
from skylite.errors import ConfigError
from skylite.run.metrics_file import held_out_scores, read_metrics
from skylite.run.rollout_file import read_rollouts
from skylite.run.run_dir import RunDir, published_versions
from skylite.run.status import Status, current_status
from skylite.types import Group


@dataclass(frozen=True, slots=True)
class Run:
    """A run on disk. All but the settings is read when asked for, so a live run shows its newest state."""

    path: Path
    """Absolute."""
    run_config: RunConfig
    """config.json: the settings, and under `resolved` what was decided on the run's machine."""

    @property
    def config(self) -> TrainConfig:
        """The settings."""
        return self.run_config.config

    @property
    def status(self) -> Status:
        """Phase ("dead" for a killed run), step and process ids. Raises ConfigError before there are any."""
        return current_status(self.path)

    @property
    def metrics(self) -> pa.Table:
        """A row for each recorded step, a column for each metric; null where it is missing or not finite.

        Raises DataError if metrics.jsonl is damaged.
        """
        lines = read_metrics(self._files.metrics_path)
        names = dict.fromkeys(["step", *(name for line in lines for name in line)])
        return pa.table({name: _column([line.get(name) for line in lines]) for name in names})

    @property
    def held_out(self) -> dict[int, float]:
        """Adapter version -> mean held-out score, the accuracy if the reward is 0 or 1; 0 is the start.

        Raises DataError for a damaged file.
        """
        return held_out_scores(self._files, self.config.eval)

    @property
    def steps(self) -> list[int]:
        """The steps whose rollouts are stored."""
        return list(self._files.stored_rollouts())

    def rollouts(self, step: int) -> list[Group]:
        """The groups of a step. Of a prompt: id, question and answer. Raises ConfigError if not stored."""
        path, steps = self._files.rollout_path(step), self.steps
        if step not in steps:
            stored = f"steps {steps[0]} to {steps[-1]}" if steps else "none"
            raise ConfigError(
                f"{self.path} has no rollouts of step {step} (stored: {stored}).", "Choose one of those."
            )
        return read_rollouts(path)

    @property
    def lora_sync_path(self) -> Path:
        """The folder with the published adapters. It moves with the run unless lora.lora_sync_path is set."""
        return self._files.adapters(self.run_config)

    def adapter(self, step: int) -> Path:
        """The PEFT folder that step published; step 0 is the start. Raises ConfigError if it is not kept."""
        versions = published_versions(self.lora_sync_path)
        for version in versions:
            if version.version == step:
                return version.path
        have = ", ".join(str(v.version) for v in versions) or "none"
        raise ConfigError(
            f"{self.path} has no adapter of step {step} (published and kept: {have}).",
            "Choose one of those; sync.keep_every keeps more.",
        )

    @property
    def _files(self) -> RunDir:
        return RunDir(self.path)


def load_run(path: str | Path) -> Run:
    """A folder that `skylite train` made. Raises ConfigError if it is not one."""
    folder = Path(path).resolve()
    return Run(folder, read_run_config(RunDir(folder).config_path))


def _column(values: list[Any]) -> pa.Array:
    """Integers as int64, other numbers as float64, anything else as text."""
    given = [v for v in values if v is not None]
    if all(isinstance(v, int | float) for v in given):
        is_whole = bool(given) and all(type(v) is int for v in given)
        return pa.array(values, pa.int64() if is_whole else pa.float64())
    return pa.array([None if v is None else str(v) for v in values], pa.string())
