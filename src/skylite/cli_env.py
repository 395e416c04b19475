"""The commands of environments: env check."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skylite.cli_help import Commands
from skylite.cli_options import AsJson, Settings, Verbose

env_app = Commands("Commands", help="Try the episodes of an environment.", no_args_is_help=True)


@env_app.callback()
def group() -> None:
    """Keep `check` a command of its own, although it is the only one."""


@env_app.command()
def check(
    episode: Annotated[
        str,
        typer.Argument(
            help="guess, calculator, reasoning-gym, FILE.py:function, 'command:PROGRAM ARGUMENTS' or "
            "verifiers:NAME."
        ),
    ],
    data: Annotated[Path, typer.Option(help="Folder written by `skylite prepare`.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Hub id, local folder, or smollm2-135m. With --reply: play with this one too, afterwards. "
            "Default: smollm2-135m; with --reply only the scripted model."
        ),
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to run, each twice.")] = 4,
    reply: Annotated[
        list[str] | None,
        typer.Option(
            help="A reply of a scripted model, which needs no vLLM. Repeatable: the seed chooses one. "
            "Default: no scripted model."
        ),
    ] = None,
    as_json: AsJson = False,
    settings: Settings = None,
    verbose: Verbose = None,
) -> None:
    """Run a few episodes and print the conversations, rewards, tokens and seconds.

    Also names the files and processes that an episode leaves open or running. Runs each twice with the
    same seed and says where the results differ.
    """
    from skylite.commands.env_check import CheckFlags
    from skylite.commands.env_check import check as run_check

    run_check(
        CheckFlags(
            episode=episode, data=data, model=model, episodes=episodes, replies=tuple(reply or ()),
            as_json=as_json, settings=tuple(settings or ()),
        )
    )  # fmt: skip
