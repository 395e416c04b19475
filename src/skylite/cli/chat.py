"""Chat with an adapter in the terminal. Starts an engine, or talks to a running server with --url.

/quit ends, /reset forgets the conversation.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from pydantic import Field

from skylite.adapters.folder import ServedAdapter, find_adapter
from skylite.cli.options import WHICH, Model, Step
from skylite.cli.setting_flags import Flags, takes_settings
from skylite.config.base_section import Flag
from skylite.config.provenance import Provenance
from skylite.data.chat_tokenizer import run_template
from skylite.data.prompts import first_messages, read_prompts
from skylite.engine.chat import Chat, served_models
from skylite.engine.connections import KEY_VARIABLE, Address
from skylite.engine.interface import BASE_NAME
from skylite.engine.model_limits import context_length
from skylite.engine.start_engines import engine_config, single_engine_spec
from skylite.engine.watchdog import bring_up, engine_process, engine_starting
from skylite.errors import ConfigError, DataError, RunFailed
from skylite.hub.resolve import resolve_model
from skylite.processes.child import kill, start
from skylite.processes.private_folders import temporary_folder
from skylite.rollout.trusted_programs import allowed_launcher
from skylite.types import Message
from skylite.ui.logs import show
from skylite.untrusted_text import plain, plain_lines

logger = logging.getLogger(__name__)
MAX_CONTEXT = 4096
"""Tokens of a conversation, if the model allows as many."""
TIMEOUT_S = 600.0
QUIT, RESET = "/quit", "/reset"


SAMPLING = "Sampling"


class ChatFlags(Flags):
    """The flags of `skylite chat`."""

    provenance: Provenance
    target: Annotated[
        Path | None, typer.Argument(help="A run or an adapter folder. Not needed with --url.")
    ] = None
    model: Model = None
    step: Step = None
    base: Annotated[bool, Flag("--base", WHICH)] = False
    """Chat with the base model, without the adapter."""
    url: Annotated[str | None, Flag("--url", WHICH)] = None
    """Talk to a running `skylite serve`, e.g. http://127.0.0.1:8000. Default: start an engine."""
    system: Annotated[str | None, Flag("--system", SAMPLING)] = None
    """System prompt. Default: system prompt and examples of the training data."""
    temperature: Annotated[float, Flag("--temperature", SAMPLING)] = Field(0.7, ge=0)
    """0 is greedy."""
    max_tokens: Annotated[int, Flag("--max-tokens", SAMPLING)] = Field(512, ge=1)
    """Longest answer."""


@takes_settings((), of="run")
def chat(flags: ChatFlags) -> None:
    """Answer lines from stdin until /quit or the end of the input."""
    if flags.url is not None and flags.target is None:
        with connected(flags) as http:
            talk(Chat(http=http, model=served_model(http, flags), **sampling(flags)), opening(flags, None))
        return
    if flags.target is None:
        raise ConfigError("Nothing to chat with: no run, no adapter folder, no --url.", "Give a run.")
    served = find_adapter(flags.target, flags.step)
    messages = opening(flags, served)
    name = BASE_NAME if flags.base else served.adapter.name
    if flags.url is not None:
        with connected(flags) as http:
            require_model(http, name, flags.url)
            talk(Chat(http=http, model=name, **sampling(flags)), messages)
        return
    with started(flags, served) as http:
        talk(Chat(http=http, model=name, **sampling(flags)), messages)


def talk(chat: Chat, opening: list[Message]) -> None:
    """Read questions, print answers. An error of one answer does not end the chat."""
    show(f"chatting with {chat.model}; {QUIT} ends, {RESET} forgets the conversation", to_stderr=True)
    messages = list(opening)
    while True:
        try:
            question = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return
        if question == QUIT:
            return
        if question == RESET:
            messages = list(opening)
        elif question:
            messages = respond(chat, [*messages, Message(role="user", content=question)])


def respond(chat: Chat, messages: list[Message]) -> list[Message]:
    """Print the answer as it comes; the conversation after it. Ctrl-C keeps what was said so far."""
    pieces: list[str] = []
    try:
        for text in chat.answer(messages):
            pieces.append(text)
            sys.stdout.write(plain_lines(text))
            sys.stdout.flush()
    except KeyboardInterrupt:
        logger.info("stopped")
    except RunFailed as error:
        show(f"skylite: {error} {RESET} starts again.", to_stderr=True)
        return messages[:-1]
    sys.stdout.write("\n")
    sys.stdout.flush()
    return [*messages, Message(role="assistant", content="".join(pieces))]


def opening(flags: ChatFlags, served: ServedAdapter | None) -> list[Message]:
    """The turns before the first question: --system, or those of the training data."""
    if flags.system is not None:
        return [Message(role="system", content=flags.system)]
    if served is None or served.run_config is None:
        return []
    path = Path(served.run_config.config.data.path) / "train.parquet"
    try:
        info = read_prompts(path)[1]
    except DataError as error:
        logger.warning(f"{error.what} The chat starts without the system prompt of the training data.")
        return []
    if start := first_messages(info):
        logger.info(
            f"the chat starts as the training prompts did: system prompt {info.system or 'none'!r}, "
            f"{len(info.few_shot) // 2} examples; --system replaces both"
        )
    return start


@contextmanager
def connected(flags: ChatFlags) -> Iterator[httpx.Client]:
    """A client of --url, with the key in KEY_VARIABLE."""
    assert flags.url is not None, "the caller checks this"
    with Address.parse(flags.url, os.environ.get(KEY_VARIABLE)).client(TIMEOUT_S) as http:
        yield http


def served_model(http: httpx.Client, flags: ChatFlags) -> str:
    """The server's adapter, or its base with --base or without an adapter. Raises RunFailed."""
    names = served_models(http, str(flags.url))
    adapters = [name for name in names if name != BASE_NAME]
    chosen = [BASE_NAME] if flags.base else adapters or names
    if not chosen or chosen[0] not in names:
        raise RunFailed(f"{flags.url} serves {', '.join(map(plain, names)) or 'no model'}, not {BASE_NAME}.")
    return chosen[0]


def require_model(http: httpx.Client, name: str, url: str) -> None:
    if name not in (names := served_models(http, url)):
        raise RunFailed(
            f"{url} serves {', '.join(map(plain, names)) or 'no model'}, and not {name}.",
            "Leave out the run to chat with what is served, or choose --step.",
        )


@contextmanager
def started(flags: ChatFlags, served: ServedAdapter) -> Iterator[httpx.Client]:
    """A server with the adapter, on a Unix socket; it ends with the block."""
    config = engine_config(served, flags.provenance, "chat")
    named = replace(flags.provenance, file=served.adapter.path)
    launcher = allowed_launcher(config, named)
    model = resolve_model(flags.model or served.base_model).path
    with temporary_folder() as folder:
        address = Address.of_socket(folder / "engine.sock")
        spec = single_engine_spec(launcher, config, served, model, address)
        context = min(MAX_CONTEXT, context_length(model) or 0)
        template = run_template(served.run_config)
        spec = replace(spec, max_model_len=max(context, spec.max_model_len), template=template)
        child = start(engine_process(launcher, spec, folder / "engine.log"))
        try:
            with engine_starting(launcher, spec, child):
                bring_up(launcher, spec, child, config.engine.start_timeout_s, served.adapter)
            with address.client(TIMEOUT_S) as http:
                yield http
        finally:
            kill(child)


def sampling(flags: ChatFlags) -> dict[str, Any]:
    return {"temperature": flags.temperature, "max_tokens": flags.max_tokens}
