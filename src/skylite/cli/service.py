"""Serve a base model to loops of Tinker's client.

They train LoRA policies on it and sample from them over HTTP; docs/how-to/from-tinker.md says what differs.
Ends at Ctrl-C or SIGTERM. What clients have saved stays in the folder, for the next start.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from pydantic import Field

from skylite.cli.serve import SERVER, STOPPED, check_address, warn_of_network
from skylite.cli.setting_flags import Flags, takes_settings
from skylite.config.base_section import Flag
from skylite.config.loading import load_config
from skylite.config.provenance import Provenance, Typed
from skylite.engine.connections import KEY_VARIABLE, UNIX
from skylite.errors import ConfigError
from skylite.optional_packages import install_command
from skylite.processes.private_folders import make_own_folder
from skylite.ui.logs import show

logger = logging.getLogger(__name__)
FOLDER_HINT = "Choose a folder of your own, which skylite creates with mode 0700."
MOST_LORAS = 4
CLIENTS = "Clients"


class ServiceFlags(Flags):
    """The flags of `skylite service` that are not settings."""

    provenance: Provenance
    out: Annotated[Path, Flag("--out", SERVER)] = Path("service")
    """Folder for what clients save, logs and the API key."""
    host: Annotated[str, Flag("--host", SERVER)] = "127.0.0.1"
    """IP address to listen on, or unix:PATH. Beyond this machine only the API key protects the service, over
    plain HTTP."""
    port: Annotated[int, Flag("--port", SERVER)] = Field(8000, ge=1)
    """Its port."""
    max_length: Annotated[int, Flag("--max-length", CLIENTS)] = Field(4096, ge=16)
    """Tokens of the longest sequence, to train on and to sample."""
    policies: Annotated[int, Flag("--policies", CLIENTS)] = Field(16, ge=1)
    """Training clients at once. Each takes memory for its adapter, gradient and optimizer."""
    session_timeout: Annotated[float, Flag("--session-timeout", CLIENTS)] = Field(300.0, ge=5)
    """Seconds of silence after which a client counts as gone, with what it has not saved."""
    dry_run: Annotated[bool, Flag("--dry-run", SERVER)] = False
    """Check everything, start nothing."""


@takes_settings(["model.name", "lora.rank"])
def service(flags: ServiceFlags) -> None:
    """Plan, then serve. Raises SkyliteError subclasses; exits 130 after a stop by a signal."""
    require_protobuf()
    from skylite.service.plan import plan_base
    from skylite.service.run import Limits, listening, read_keys, run_service

    provenance = with_defaults(flags.provenance, flags.max_length)
    base = plan_base(load_config(None, provenance), flags.out, provenance)
    if flags.dry_run:
        logger.info(f"ready: without --dry-run this command serves {base.model}")
        return
    make_own_folder(base.run.root, FOLDER_HINT)
    keys, note = read_keys(base.run, os.environ.get(KEY_VARIABLE))
    show(f"skylite: {note}", to_stderr=True)
    where = flags.host
    if not where.startswith(UNIX):
        where = check_address(flags.host, flags.port)
        warn_of_network(flags.host)
    with listening(flags.host, flags.port) as listener:
        logger.info(f"clients connect to {where} once the base is loaded")
        limits = Limits(policies=flags.policies, session_timeout_s=flags.session_timeout)
        asyncio.run(run_service(base, listener, keys, limits))
    sys.exit(STOPPED)


def require_protobuf() -> None:
    """Raise ConfigError without the extra `service`; vLLM brings it."""
    if find_spec("google.protobuf") is None:
        raise ConfigError("protobuf is not installed.", f"Install it: {install_command('service')}.")


def with_defaults(provenance: Provenance, max_length: int) -> Provenance:
    """The settings of a service where the user typed none. Raises ConfigError for those that have no effect
    here."""
    lengths = ("rollout.max_prompt_tokens", "rollout.max_completion_tokens")
    if typed := [name for name in lengths if provenance.is_typed(name)]:
        raise ConfigError(f"{typed[0]} has no effect in a service.", "Use --max-length.")
    half = max_length // 2
    made = {lengths[0]: Typed(max_length - half, "--max-length"), lengths[1]: Typed(half, "--max-length")}
    if not provenance.is_typed("engine.max_loras"):
        made["engine.max_loras"] = Typed(MOST_LORAS, "--set")
    return replace(provenance, typed={**made, **provenance.typed})
