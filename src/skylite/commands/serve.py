"""`skylite serve`: vLLM's OpenAI-compatible server with a trained adapter, in the foreground."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path

from skylite.adapters.folder import find_adapter
from skylite.data.chat_template import ChatTemplate, run_template
from skylite.engine.server_command import BASE_NAME, serve_command, serve_env
from skylite.engine.single_engine import engine_config, single_engine_spec
from skylite.hub.resolve import resolve_model
from skylite.processes.child import absolute_paths
from skylite.processes.import_path import NEUTRAL_FOLDER
from skylite.processes.own_network import check_network
from skylite.ui.logs import show, shows_info
from skylite.vllm_plugin.api_key import KEY_VARIABLE

logger = logging.getLogger(__name__)


def serve(target: Path, *, model: str | None, step: int | None, port: int, settings: Sequence[str]) -> None:
    """Replace this process by the server. Its models: the adapter version, and `base` without adapter."""
    served = find_adapter(target, step)
    config = engine_config(served, settings)
    spec = single_engine_spec(config, served, resolve_model(model or served.base_model).path, Path("unused"))
    if spec.device == "cuda":
        check_network(config, ranks=False, isolated=False)
    name = served.adapter.name
    logger.info(f"serving {name} ({served.adapter.path}) and {BASE_NAME} on http://127.0.0.1:{port}/v1")
    template = run_template(served.run_config)
    log_template(template)
    argv = serve_command(
        spec, adapter_name=name, adapter_path=served.adapter.path, port=port, template=template
    )
    env = serve_env(spec, absolute_paths(os.environ), _api_key())
    if not shows_info():
        env.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    with chdir(NEUTRAL_FOLDER):  # libraries obey files of the working folder
        os.execvpe(argv[0], argv, env)


def log_template(template: ChatTemplate) -> None:
    """Log how chats are rendered, if not as the model says."""
    if template.text is not None:
        logger.info("chats are rendered with the run's own chat template")
    if template.args:
        logger.info(
            f"arguments of the chat template, as in training: {json.dumps(dict(template.args))}; "
            "chat_template_kwargs of a request override them"
        )


def _api_key() -> str:
    """The key from the environment, else a random one: every user of this machine can reach 127.0.0.1."""
    given = os.environ.get(KEY_VARIABLE)
    if given:
        logger.info(f"the API key is the value of {KEY_VARIABLE}")
        return given
    key = secrets.token_urlsafe(24)
    # Printed, not logged: the key is a secret, and --quiet must not hide it.
    show(
        f"skylite: API key for `Authorization: Bearer KEY` (set {KEY_VARIABLE} to choose your own): {key}",
        to_stderr=True,
    )
    return key
