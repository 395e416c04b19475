"""Check that the user allows the programs (FILE.py:function) of a run; others are refused.

The functions return spec -> sha256 for the allowed programs, so that no other content of these files runs.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from skylite.config.algorithm import AlgorithmConfig
from skylite.config.train import TrainConfig
from skylite.data.prompts import PromptFileInfo
from skylite.environments.episode_spec import check_episode
from skylite.errors import ConfigError
from skylite.run.trusted_programs import is_set, remember, require_named
from skylite.user_functions import (
    ADVANTAGE,
    EPISODE,
    POLICY_LOSS,
    REWARD,
    check_function,
    is_program,
    is_verifiers,
)


def allow_rewards(
    functions: Sequence[str], info: PromptFileInfo, data: Path, *, named_by: Path | None = None
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The specs of the reward functions, and the hashes of the programs among them.

    The functions are `functions`, or the reward that `data` was prepared with.

    `named_by`: the file that names `functions`; None: the user names them.
    Raises ConfigError for a program that only a file names, and for data whose rewards an environment gives.
    """
    if not functions and is_verifiers(info.reward):
        raise ConfigError(
            f"{data} holds tasks of {info.reward}, whose episodes give the rewards.",
            f"Train on it with --env {shlex.quote(info.reward)}, or choose a --reward.",
        )
    if not functions:
        return (info.reward,), require_named([info.reward], REWARD, data)
    programs = remember(*functions) if named_by is None else require_named(functions, REWARD, named_by)
    return tuple(functions), programs


def allow_algorithm(
    config: AlgorithmConfig, *, named_by: Path | None = None, settings: Sequence[str] = ()
) -> dict[str, str]:
    """Check that advantage and policy loss may run, and check their files without importing torch.

    `named_by`: the file that names them; None: the user names them. `settings`: the user's --set, which may
    name them. Raises ConfigError.
    """
    programs: dict[str, str] = {}
    for spec, kind in ((config.advantage, ADVANTAGE), (config.policy_loss, POLICY_LOSS)):
        if not is_program(spec):
            continue
        if named_by is None or is_set(settings, kind.setting):
            programs |= remember(spec)
        else:
            programs |= require_named([spec], kind, named_by)
        check_function(spec, kind)
    return programs


def allow_episode(spec: str, *, named_by: Path | None = None, settings: Sequence[str] = ()) -> dict[str, str]:
    """Check that env.episode may run. Arguments as for `allow_algorithm`. Raises ConfigError."""
    check_episode(spec)
    if named_by is None or is_set(settings, EPISODE.setting):
        return remember(spec)
    return require_named([spec], EPISODE, named_by)


def accept_same_rewards(
    recorded: TrainConfig, config: TrainConfig, info: PromptFileInfo, settings: Sequence[str]
) -> TrainConfig:
    """If --set names the rewards that the run uses already, allow them and undo that change in `config`."""
    functions = recorded.reward.functions
    if not is_set(settings, REWARD.setting) or config.reward.functions != (functions or [info.reward]):
        return config
    remember(*config.reward.functions)
    return config.model_copy(update={"reward": config.reward.model_copy(update={"functions": functions})})
