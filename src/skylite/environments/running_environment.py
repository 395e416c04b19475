"""Starts what episodes need: the chat template's sandbox, the OpenAI server, and the process of episodes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from skylite.config.train import TrainConfig
from skylite.environments.episode_pool import running_episodes
from skylite.environments.openai_server import OpenAIServer
from skylite.environments.parse_reply import tool_format
from skylite.environments.renderer import Renderer, make_sandbox
from skylite.environments.sample_episodes import Environment
from skylite.processes.supervisor import Supervisor
from skylite.processes.temporary_folder import temporary_folder


@contextlib.asynccontextmanager
async def running_renderer(
    model_path: Path, stop_token_ids: tuple[int, ...], template: str | None = None
) -> AsyncIterator[Renderer]:
    """A renderer with its sandbox. `template`: text of a chat template instead of the model's own.

    Raises SkyliteError subclasses.
    """
    sandbox = make_sandbox(model_path, template, stop_token_ids)
    try:
        await asyncio.to_thread(sandbox.start)
        yield Renderer(sandbox, model_path)
    finally:
        sandbox.close()


@contextlib.asynccontextmanager
async def running_environment(
    config: TrainConfig,
    renderer: Renderer,
    stop_token_ids: tuple[int, ...],
    programs: Mapping[str, str],
    logs: Path,
    supervisor: Supervisor,
) -> AsyncIterator[Environment]:
    """An environment with the episode function of env.episode.

    `programs`: FILE.py:function -> sha256 that the user allowed. Raises SkyliteError subclasses.
    """
    spec, settings = config.env.episode, config.env
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(temporary_folder())  # its sockets are for this user only
        facts = await renderer.facts(config.data.template_args)
        server = OpenAIServer(
            config=config,
            renderer=renderer,
            stop_token_ids=stop_token_ids,
            stops=facts.stops,
            tool_format=tool_format(facts.template)
            if settings.tool_format == "auto"
            else settings.tool_format,
            socket_path=folder / "openai.sock",
        )
        await stack.enter_async_context(server.serving())
        pool = await stack.enter_async_context(
            running_episodes(spec, programs.get(spec), folder, logs, supervisor)
        )
        yield Environment(config, server, pool)


@contextlib.asynccontextmanager
async def environment_of_model(
    config: TrainConfig,
    model_path: Path,
    stop_token_ids: tuple[int, ...],
    template: str | None,
    programs: Mapping[str, str],
    logs: Path,
) -> AsyncIterator[Environment]:
    """`running_environment` for commands other than train: it starts the renderer and a supervisor too."""
    async with (
        Supervisor() as supervisor,
        running_renderer(model_path, stop_token_ids, template) as renderer,
        running_environment(config, renderer, stop_token_ids, programs, logs, supervisor) as environment,
    ):
        yield environment
