"""The data sets of `skylite eval`: problems, reward and its settings."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from skylite.config.rollout import RewardParameters
from skylite.config.train import TrainConfig
from skylite.data.prompts import read_info, read_prompts
from skylite.environments.episode_spec import check_episode_data
from skylite.errors import ConfigError
from skylite.rollout.allowed_programs import allow_episode, allow_rewards
from skylite.rollout.data_filter import fit_difficulty
from skylite.rollout.reward_settings import apply_reward_settings
from skylite.run.trusted_programs import is_set
from skylite.types import Prompt
from skylite.user_functions import REWARD

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataChoice:
    """What the flags say about the data."""

    paths: tuple[Path, ...]
    split: str
    limit: int | None
    settings: tuple[str, ...]
    """--set"""
    named_by: Path | None
    """The run, which may name reward programs."""
    is_own: bool
    """The run's own data, whose reward settings the run has recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalData:
    """A data set to evaluate on."""

    name: str
    """Name of its folder."""
    path: Path
    prompts: list[Prompt]
    reward: str
    """Spec of what scores: the first reward function, or the episodes of an environment."""
    programs: dict[str, str]
    """FILE.py:function -> sha256 of the file that the user allowed."""
    parameters: RewardParameters


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
    if not choice.is_own:
        given = {key for key in RewardParameters.model_fields if is_set(choice.settings, f"reward.{key}")}
        config, note = apply_reward_settings(config, info, keep=given)
        if note:
            logger.info(note)
    if config.env.episode:
        reward = config.env.episode
        programs = allow_episode(reward, named_by=choice.named_by, settings=choice.settings)
        check_episode_data(reward, info.reward, str(path))
    else:
        named_by = None if is_set(choice.settings, REWARD.setting) else choice.named_by
        (reward,), programs = allow_rewards(config.reward.functions[:1], info, path, named_by=named_by)
    return EvalData(
        name=name,
        path=path,
        prompts=prompts[: choice.limit],
        reward=reward,
        programs=programs,
        parameters=config.reward,
    )


def _without_foreign_filter(file: Path, choice: DataChoice, config: TrainConfig) -> TrainConfig:
    """Leave out the run's data.difficulty if --data names another data set. Logs that."""
    if choice.is_own or choice.named_by is None or is_set(choice.settings, "data.difficulty"):
        return config
    data = config.data.model_copy(update={"path": str(file.parent)})
    elsewhere = config.model_copy(update={"data": data})
    fitted, note = fit_difficulty(elsewhere, config.data.model_dump(), read_info(file), str(choice.named_by))
    if note:
        logger.info(note)
    return fitted
