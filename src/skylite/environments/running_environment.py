"""Starts what episodes need: the OpenAI server and the process of episodes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from skylite.config.train import TrainConfig
from skylite.data.tokenizer import ChatTokenizer
from skylite.environments.episode_pool import running_episodes
from skylite.environments.openai_server import OpenAIServer
from skylite.environments.parse_reply import tool_format
from skylite.environments.renderer import Renderer
from skylite.environments.sample_episodes import Environment
from skylite.processes.child import Supervisor
from skylite.processes.private_folders import temporary_folder


@contextlib.asynccontextmanager
async def running_environment(
    config: TrainConfig,
    tokenizer: ChatTokenizer,
    model_path: Path,
    programs: Mapping[str, str],
    logs: Path,
    supervisor: Supervisor,
) -> AsyncIterator[Environment]:
    """An environment with the episode function of env.episode.

    Args:
        tokenizer: the model's; the caller closes it afterwards.
        programs: FILE.py:function -> sha256 that the user allowed.

    Raises SkyliteError subclasses.
    """
    spec, settings = config.env.episode, config.env
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(temporary_folder())  # its sockets are for this user only
        renderer = Renderer(tokenizer.run_jobs, model_path)
        facts = await renderer.facts(config.data.template_args)
        server = OpenAIServer(
            config=config,
            renderer=renderer,
            stop_token_ids=tokenizer.stop_token_ids,
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
    tokenizer: ChatTokenizer,
    model_path: Path,
    programs: Mapping[str, str],
    logs: Path,
) -> AsyncIterator[Environment]:
    """`running_environment` for commands other than train: it starts a supervisor too."""
    async with (
        Supervisor() as supervisor,
        running_environment(config, tokenizer, model_path, programs, logs, supervisor) as environment,
    ):
        yield environment
