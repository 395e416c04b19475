"""`skylite serve`: vLLM's OpenAI server with the trained adapter, in the foreground."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from skylite.adapters.folder import find_adapter
from skylite.commands.notes import say
from skylite.config.train import TrainConfig
from skylite.engine.server import BASE_NAME, serve_command, serve_env
from skylite.engine.single import single_engine_spec
from skylite.hub.resolve import resolve_model
from skylite.vllm_plugin.key import KEY_VARIABLE


def serve(target: Path, *, model: str | None, step: int | None, port: int) -> None:
    """Become the server (exec): Ctrl-C ends it. The adapter answers under its version's name, the model alone as `base`."""
    served = find_adapter(target, step)
    config = served.run_config.config if served.run_config is not None else TrainConfig()
    spec = single_engine_spec(config, served, resolve_model(model or served.base_model).path, Path("unused"))
    name = served.adapter.name
    say(f"serving {name} ({served.adapter.path}) and {BASE_NAME} on http://127.0.0.1:{port}/v1")
    argv = serve_command(spec, adapter_name=name, adapter_path=served.adapter.path, port=port)
    os.execvpe(argv[0], argv, serve_env(spec, os.environ, _api_key()))


def _api_key() -> str:
    """The user's own, else a random one that is said once and kept nowhere: anyone on this machine can reach 127.0.0.1."""
    given = os.environ.get(KEY_VARIABLE)
    if given:
        say(f"the API key is that of {KEY_VARIABLE}")
        return given
    made = secrets.token_urlsafe(24)
    say(
        f"API key of this server, as `Authorization: Bearer KEY` (set {KEY_VARIABLE} for one of your own): {made}"
    )
    return made
