"""The commands of environments: env check."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skylite.cli.options import SETTINGS, AsJson, Verbose
from skylite.cli.typer_help import Commands

env_app = Commands("Commands", help="Try the episodes of an environment.", no_args_is_help=True)
EPISODES = "Episodes and model"
Episode = Annotated[
    str,
    typer.Argument(
        help="guess, calculator, reasoning-gym, FILE.py:function, 'command:PROGRAM ARGUMENTS' or "
        "verifiers:NAME."
    ),
]
Data = Annotated[Path, typer.Option(help="Folder written by `skylite prepare`.", rich_help_panel=EPISODES)]
Model = Annotated[
    str | None,
    typer.Option(
        help="Hub id, local folder, or smollm2-135m. With --reply: play with this one too, afterwards. "
        "Default: smollm2-135m; with --reply only the scripted model.",
        rich_help_panel=EPISODES,
    ),
]
NumEpisodes = Annotated[
    int, typer.Option(min=1, help="Episodes to run, each twice.", rich_help_panel=EPISODES)
]
Replies = Annotated[
    list[str] | None,
    typer.Option(
        help="A reply of a scripted model, which needs no vLLM. Repeatable: the seed chooses one. "
        "Default: no scripted model.",
        rich_help_panel=EPISODES,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="A.B=VALUE",
        help="Any other setting, in TOML syntax. Repeatable. Default: each setting's own.",
        rich_help_panel=SETTINGS,
    ),
]


@env_app.callback()
def group() -> None:
    """Keep `check` a command of its own, although it is the only one."""


@env_app.command()
def check(
    episode: Episode,
    data: Data,
    model: Model = None,
    episodes: NumEpisodes = 4,
    reply: Replies = None,
    as_json: AsJson = False,
    settings: Settings = None,
    verbose: Verbose = None,
) -> None:
    """Run a few episodes and print their conversations and rewards.

    Also prints tokens, seconds, and the files and processes that an episode leaves open or running. Runs each
    twice with the same seed and prints where the results differ.
    """
    from skylite.cli.env_check import CheckFlags
    from skylite.cli.env_check import check as run_check

    run_check(
        CheckFlags(
            episode=episode, data=data, model=model, episodes=episodes, replies=tuple(reply or ()),
            as_json=as_json, settings=tuple(settings or ()),
        )
    )  # fmt: skip
