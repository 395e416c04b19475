"""The launcher that `engine.launcher` names. This is the only file of engine/ that imports engine/vllm/."""

from __future__ import annotations

from collections.abc import Mapping

from skylite.config.engine import VLLM
from skylite.config.train import TrainConfig
from skylite.engine.interface import Launcher
from skylite.errors import ConfigError
from skylite.user_functions import LAUNCHER, UserCodeFailed, load_function, user_code


def load_launcher(config: TrainConfig, programs: Mapping[str, str]) -> Launcher:
    """The launcher. `programs`: spec -> sha256 of what the user allows. Raises ConfigError."""
    spec = config.engine.launcher
    if spec == VLLM:
        from skylite.engine.vllm.launcher import VllmLauncher

        return VllmLauncher()
    make = load_function(spec, LAUNCHER, programs[spec])
    try:
        with user_code():
            launcher: Launcher = make()
    except UserCodeFailed as error:
        raise ConfigError(f"{spec} cannot be used: {error}.", "Fix that file.") from error
    return launcher
