"""The data sets of `skylite eval`: problems, reward and its settings."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from skylite.config.provenance import Provenance
from skylite.config.rollout import RewardParameters
from skylite.config.train import TrainConfig
from skylite.data.prompts import read_info, read_prompts
from skylite.errors import ConfigError
from skylite.notes import log_notes
from skylite.rollout.data_filter import fit_difficulty
from skylite.rollout.sources import ScoredData, source_for
from skylite.types import Prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataChoice:
    """What the flags say about the data."""

    paths: tuple[Path, ...]
    split: str
    limit: int | None
    provenance: Provenance
    """What the user typed; its file is the run, which may name reward programs."""
    is_own: bool
    """The run's own data, whose reward settings the run has recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalData:
    """A data set to evaluate on."""

    name: str
    """Name of its folder."""
    path: Path
    prompts: list[Prompt]
    scored: ScoredData
    """The first of its rewards alone scores."""

    @property
    def reward(self) -> str:
        """Spec of what scores."""
        return self.scored.rewards[0]


def read_data(choice: DataChoice, config: TrainConfig) -> list[EvalData]:
    """The problems of each data set, and its reward. Raises ConfigError or DataError."""
    paths = choice.paths
    names = [path.resolve().name for path in paths]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"Two data sets are named {twice[0]!r}, and the names of result files need different ones.",
            "Give each folder once, or rename one.",
        )
    return [_read_one(name, path, choice, config) for name, path in zip(names, paths, strict=True)]


def _read_one(name: str, path: Path, choice: DataChoice, config: TrainConfig) -> EvalData:
    file = path / f"{choice.split}.parquet"
    config = _without_foreign_filter(file, choice, config)
    prompts, info = read_prompts(file, difficulty=tuple(config.data.difficulty))
    provenance = choice.provenance
    keep = [k for k in RewardParameters.model_fields if choice.is_own or provenance.is_typed(f"reward.{k}")]
    first = config.reward.model_copy(update={"functions": config.reward.functions[:1], "weights": []})
    scored = source_for(config).allow(
        config.model_copy(update={"reward": first}),
        info,
        data=path,
        provenance=provenance,
        keep=keep,
    )
    log_notes(scored.notes)
    return EvalData(name=name, path=path, prompts=prompts[: choice.limit], scored=scored)


def _without_foreign_filter(file: Path, choice: DataChoice, config: TrainConfig) -> TrainConfig:
    """Leave out the run's data.difficulty if --data names another data set. Logs that."""
    run = choice.provenance.file_of("data.difficulty")
    if choice.is_own or run is None:
        return config
    data = config.data.model_copy(update={"path": str(file.parent)})
    elsewhere = config.model_copy(update={"data": data})
    fitted, note = fit_difficulty(elsewhere, config.data.model_dump(), read_info(file), str(run))
    if note:
        logger.info(note)
    return fitted
