"""Serve an adapter on 127.0.0.1. Starts an OpenAI-compatible server and prints a random API key.

Ends at Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from skylite.adapters.folder import find_adapter
from skylite.cli.options import Model, Step
from skylite.cli.setting_flags import takes_settings
from skylite.config.provenance import Provenance
from skylite.config.train import TrainConfig
from skylite.data.chat_tokenizer import ChatTemplate, clock_note, run_template
from skylite.engine.chat import longest_sequence
from skylite.engine.connections import KEY_VARIABLE, Address
from skylite.engine.interface import BASE_NAME, EngineSpec, Launcher
from skylite.engine.model_limits import context_length
from skylite.engine.start_engines import engine_config, single_engine_spec
from skylite.engine.watchdog import bring_up, engine_process, engine_starting
from skylite.errors import ConfigError, ModelError
from skylite.hub.resolve import resolve_model
from skylite.processes.child import Child, child_died, kill, poll, start
from skylite.processes.own_network import check_network
from skylite.processes.private_folders import state_folder
from skylite.progress_reporting import duration
from skylite.rollout.trusted_programs import allowed_launcher
from skylite.ui.logs import show, shows_debug
from skylite.untrusted_files import open_file

logger = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
POLL_S = 0.2
TIMEOUT_S = 5.0
"""For one answer of the server about itself."""
STOPPED = 130
"""Exit code after a stop by a signal, as of `train`."""


SERVER = "Server"


@takes_settings((), of="run")
def serve(
    provenance: Provenance,
    target: Annotated[Path, typer.Argument(help="A run or an adapter folder.")],
    model: Model = None,
    step: Step = None,
    host: Annotated[
        str,
        typer.Option(
            help="IP address to listen on. Beyond this machine only the API key protects the server, over "
            "plain HTTP. 0.0.0.0: all addresses.",
            rich_help_panel=SERVER,
        ),
    ] = LOOPBACK,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Its port.", rich_help_panel=SERVER)] = 8000,
) -> None:
    """Serve the adapter version, and `base` without adapter, until a signal or the server's own end.

    Raises ChildDied when the server ends by itself.
    """
    url = check_address(host, port)
    served = find_adapter(target, step)
    if served.is_on_tower:
        raise ModelError(
            f"{served.adapter.path} has LoRA on the tower that reads images, and `skylite serve` reads none.",
            "Write the merged model with `skylite export --merge`, and serve it with vLLM.",
        )
    config = engine_config(served, provenance, "serve")
    launcher = allowed_launcher(config, replace(provenance, file=served.adapter.path))
    model_path = resolve_model(model or served.base_model).path
    spec = single_engine_spec(launcher, config, served, model_path, Address(url))
    if spec.device == "cuda":
        check_network(config, ranks=False, isolated=False)
    warn_of_network(host)
    template, here = run_template(served.run_config), Address(url, chosen_key())
    log_template(template)
    spec = replace(
        spec,
        max_model_len=model_length(launcher, config, spec),
        fixed_adapter=served.adapter,
        template=template,
        address=Address(url_of(host, port), here.token),
    )
    process = engine_process(launcher, spec, log_file(host, port))
    with ended_by_signals(), here.client(TIMEOUT_S, proxies=False) as http:
        child = start(process)
        try:
            with log_shown(child):
                with engine_starting(launcher, spec, child, is_logged=False) as work:
                    bring_up(launcher, replace(spec, address=here), child, config.engine.start_timeout_s)
                logger.info(
                    f"ready after {duration(work.elapsed_s)}: {url}/v1 serves {served.adapter.name} and "
                    f"{BASE_NAME}, sequences of up to {longest_sequence(http, url):,} tokens. Its log is "
                    f"{process.log_path}. Ctrl-C ends it."
                )
                while poll(child) is None:
                    time.sleep(POLL_S)
            raise child_died(child)
        finally:
            kill(child)


def log_file(host: str, port: int) -> Path:
    """A new file in the user's state folder."""
    log = state_folder() / f"serve-{host}-{port}.log"
    log.unlink(missing_ok=True)
    return log


def warn_of_network(host: str) -> None:
    """Warn of an address that other machines may reach."""
    if not ipaddress.ip_address(host).is_loopback:
        logger.warning(
            f"Any machine that reaches {host} can connect. Only the API key guards the model, and plain HTTP "
            "shows the key and all texts to the network on the way. Put a proxy with TLS in front of it, or "
            "serve on 127.0.0.1 and use an SSH tunnel."
        )


def check_address(host: str, port: int) -> str:
    """The URL at which this machine reaches it. Raises ConfigError if it is taken or not this machine's.

    The engine would notice half a minute later.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(
            f"--host {host} is not an IP address.",
            "Give one of this machine's addresses, or 0.0.0.0 for all of them.",
        ) from None
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.create_server((host, port), family=family):
            pass
    except OSError as error:
        raise ConfigError(
            f"Nothing can listen on {host}, port {port}: {os.strerror(error.errno or 0)}.",
            "Choose another --port, or an address of this machine for --host.",
        ) from None
    if address.is_unspecified:
        address = ipaddress.ip_address(LOOPBACK if address.version == 4 else "::1")
    return url_of(str(address), port)


def url_of(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def model_length(launcher: Launcher, config: TrainConfig, spec: EngineSpec) -> int:
    """Tokens of the longest sequence: what the model was made for, as far as the KV cache holds them.

    -1: the engine finds out. On a CPU it cannot, because its batches must be as long, and they get a size at
    the start. A run's own limit always holds.
    """
    if spec.device == "cuda":
        return -1
    context = context_length(spec.model_path)
    memory = launcher.memory(config, spec.model_path, spec.device, spec.dtype, spec.cpu_lora)
    if not context or not memory.kv_per_token:
        return spec.max_model_len
    length = max(spec.max_model_len, min(context, memory.longest(spec.kv_cache_gib * 2**30)))
    if length < context:
        logger.info(
            f"sequences of up to {length:,} tokens: engine.kv_cache_gib={spec.kv_cache_gib:g} holds no more, "
            f"though the model was made for {context:,}"
        )
    return length


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """In this block Ctrl-C, SIGTERM and SIGHUP raise SystemExit(STOPPED), once. Obeys nohup."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)  # a second one must not leave processes behind
        sys.exit(STOPPED)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def log_shown(child: Child) -> Iterator[None]:
    """With -v, print the lines of the child's log as they come."""
    if not shows_debug():
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_follow, args=(child.spec.log_path, child.log_start, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _follow(path: Path, position: int, ended: threading.Event) -> None:
    with open_file(path) as log:
        log.seek(position)
        is_last = False
        while not is_last:
            is_last = ended.wait(POLL_S)
            if new := log.read():
                show(new.decode("utf-8", errors="replace").rstrip("\n"), to_stderr=True)


def log_template(template: ChatTemplate) -> None:
    """Log how chats are rendered, if not as the model says."""
    if template.text is not None:
        logger.info("chats are rendered with the run's own chat template")
    if note := clock_note(template):
        logger.info(note)
    if template.args:
        logger.info(
            f"arguments of the chat template, as in training: {json.dumps(dict(template.args))}; "
            "chat_template_kwargs of a request override them"
        )


def chosen_key() -> str:
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
