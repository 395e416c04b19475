"""env.episode: the name of a built-in episode, FILE.py:function, command:PROGRAM, or verifiers:NAME."""

from __future__ import annotations

import shlex

from skylite.data.verifiers import check_verifiers, parse_verifiers
from skylite.environments.episodes import BUILT_IN
from skylite.errors import ConfigError
from skylite.rewards.reasoning_gym import check_reasoning_gym
from skylite.user_functions import (
    CODE_IN_DATA,
    COMMAND,
    EPISODE,
    VERIFIERS,
    check_function,
    is_command,
    is_program,
    is_verifiers,
)

USERS_FOLDER = "SKYLITE_USERS_FOLDER"
"""Variable of the host: where the user started skylite, whose command:PROGRAM runs there."""


def check_episode(spec: str) -> None:
    """Check env.episode without running it. Raises ConfigError."""
    if spec in CODE_IN_DATA:
        check_reasoning_gym()
    if spec in BUILT_IN:
        return
    if is_command(spec):
        command_words(spec)
    elif is_verifiers(spec):
        check_verifiers(spec)
    elif is_program(spec):
        check_function(spec, EPISODE)
    else:
        raise ConfigError(
            f"env.episode={spec} names no episode.",
            f"Use {', '.join(BUILT_IN)}, FILE.py:function with `async def function{EPISODE.arguments}`, "
            f"{COMMAND}PROGRAM ARGUMENTS, or {VERIFIERS}NAME.",
        )


def check_episode_data(spec: str, made_for: str, data: str) -> None:
    """Raise ConfigError if an environment of verifiers gets data without its tasks.

    `made_for`: the reward that `data` was prepared with.
    """
    if not is_verifiers(spec):
        return
    if not is_verifiers(made_for) or parse_verifiers(made_for).module != parse_verifiers(spec).module:
        raise ConfigError(
            f"{data} holds no tasks of {spec}.", f"Prepare them: skylite prepare {shlex.quote(spec)}."
        )


def command_words(spec: str) -> list[str]:
    """The program and its arguments. Raises ConfigError."""
    try:
        words = shlex.split(spec.removeprefix(COMMAND))
    except ValueError as error:
        raise ConfigError(
            f"env.episode={spec} is no command line: {error}.", "Quote it as in a shell."
        ) from None
    if not words:
        raise ConfigError(f"env.episode={spec} names no program.", f"E.g. {COMMAND}'python agent.py'.")
    return words
