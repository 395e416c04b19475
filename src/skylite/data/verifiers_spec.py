"""`verifiers:NAME KEY=VALUE ...`: an environment of the package verifiers, and settings of its config.

KEY is a path in the environment's config, as verifiers' own flags have it (`--env.taskset.game` is
`taskset.game`). VALUE is JSON, or else text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from pydantic import ValidationError

from skylite import DISTRIBUTION
from skylite.data.key_value_spec import read_settings, split_spec
from skylite.errors import ConfigError
from skylite.optional_packages import install_command, requirements
from skylite.user_functions import VERIFIERS, UserCodeFailed, user_code

_EXAMPLE = f"E.g. {VERIFIERS}textarena taskset.game=Wordle-v0."


@dataclass(frozen=True, slots=True)
class VerifiersSpec:
    """An environment and its settings."""

    name: str
    """The taskset's id for verifiers: its package, or owner/name of the hub."""
    settings: dict[str, Any]
    """Nested, without the taskset's id."""

    @property
    def module(self) -> str:
        """The name as part of paths and ids."""
        return self.name.rpartition("/")[2].partition("@")[0].lower().replace("_", "-")


def parse_verifiers(spec: str) -> VerifiersSpec:
    """The parts of the text. Raises ConfigError."""
    name, words = split_spec(spec, VERIFIERS, _EXAMPLE)
    if not re.fullmatch(r"[\w./@-]+", name, re.ASCII):
        raise ConfigError(f"{spec} names no environment: {name!r} is no package name.", _EXAMPLE)
    settings = read_settings(spec, words, _EXAMPLE, reserved=["taskset.id"])
    return VerifiersSpec(name, settings)


def check_verifiers(spec: str) -> None:
    """Check the text, and that verifiers is installed, without importing it. Raises ConfigError."""
    parse_verifiers(spec)
    try:
        found = metadata.version("verifiers")
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"{spec} needs the package verifiers, which is not installed.",
            f"Run `{install_command('verifiers')}`.",
        ) from None
    for wanted in requirements(DISTRIBUTION, "verifiers"):
        if wanted.name == "verifiers" and not wanted.specifier.contains(found):
            raise ConfigError(
                f"{spec} needs verifiers{wanted.specifier}, and {found} is installed.",
                f"Run `{install_command('verifiers')}`.",
            )


def open_config(spec: str) -> Any:
    """The environment's config, of verifiers' EnvConfig. Imports its package. Raises ConfigError."""
    check_verifiers(spec)
    parsed = parse_verifiers(spec)
    taskset = parsed.settings.get("taskset", {})
    if not isinstance(taskset, dict):
        raise ConfigError(f"{spec}: taskset={json.dumps(taskset)} is no setting.", _EXAMPLE)
    try:
        with user_code(keep=ValidationError):
            vf = import_module("verifiers.v1")
            return vf.resolve_env_config({**parsed.settings, "taskset": {**taskset, "id": parsed.name}})
    except UserCodeFailed as error:
        raise cannot_open(spec, str(error)) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise cannot_open(spec, f"{where}: {first['msg']}") from None


def cannot_open(spec: str, reason: str) -> ConfigError:
    """The error for what verifiers or the environment raised."""
    return ConfigError(
        f"verifiers cannot open {spec}: {reason.rstrip('.')}.",
        "Install the environment's package, and check its name and settings.",
    )
