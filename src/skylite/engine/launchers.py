"""The launcher that `engine.launcher` names. This is the only file of engine/ that imports engine/vllm/."""

from __future__ import annotations

from collections.abc import Mapping

from skylite.config.engine import VLLM
from skylite.config.train import TrainConfig
from skylite.engine.connections import Address
from skylite.engine.interface import Engine, Launcher
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


def client_of(name: str, address: Address) -> Engine:
    """A client of a vLLM server that another program runs. `name`: in errors."""
    from skylite.engine.vllm.client import VllmClient

    return VllmClient(name, address)
