"""The flags of `skylite prepare`: their declaration, which ones a target takes, and the command as typed."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from skylite.cli.options import AsJson
from skylite.data.key_value_spec import REASONING_GYM
from skylite.data.prompts import Kind
from skylite.data.user_tables import is_own_data
from skylite.errors import ConfigError
from skylite.user_functions import is_verifiers

ORIGIN, COLUMNS, PROMPT, ROWS = (
    "Where the rows come from", "Your own data", "Prompt and reward", "Which rows",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareFlags:
    """The flags of `skylite prepare`."""

    target: Annotated[
        str,
        typer.Argument(
            help="gsm8k, gsm8k_calculator, hendrycks_math, countdown, guess, reasoning-gym:TASK, "
            "verifiers:NAME, a data_prep .py file; or your own data: a .jsonl, .json, .csv or .parquet file, "
            "a folder of them, or a hub id."
        ),
    ]
    out: Annotated[
        Path | None,
        typer.Option(help="Output folder. Default: data/NAME, which is printed.", rich_help_panel=ORIGIN),
    ] = None
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Replace a folder that another prepare command made, without asking.",
            rich_help_panel=ORIGIN,
        ),
    ] = False
    source: Annotated[
        Path | None,
        typer.Option(help="Folder with the released files. Default: the hub.", rich_help_panel=ORIGIN),
    ] = None
    synthetic: Annotated[
        bool,
        typer.Option(
            "--synthetic", help="Generate problems in the format of the data set.", rich_help_panel=ORIGIN
        ),
    ] = False
    first_source: Annotated[
        bool,
        typer.Option(
            "--first-source",
            help="Use the first available source: hub, --source, synthetic.",
            rich_help_panel=ORIGIN,
        ),
    ] = False
    difficulty: Annotated[
        str,
        typer.Option(
            help="How hard generated problems are, e.g. 1,2 (gsm8k: reasoning steps). Default: all for "
            "gsm8k, 2,3 for countdown, 4 for guess.",
            rich_help_panel=ORIGIN,
        ),
    ] = ""
    config: Annotated[
        str | None,
        typer.Option(
            help="Config of a hub data set or folder. Default: its only one, or the one named default.",
            rich_help_panel=COLUMNS,
        ),
    ] = None
    split: Annotated[
        str | None, typer.Option(help="Split to train on. Default: train.", rich_help_panel=COLUMNS)
    ] = None
    validation_split: Annotated[
        str | None,
        typer.Option(
            help="Split to validate on. Default: rows held out of --split.", rich_help_panel=COLUMNS
        ),
    ] = None
    test_split: Annotated[
        str | None,
        typer.Option(help="Split to test on. Default: rows held out of --split.", rich_help_panel=COLUMNS),
    ] = None
    question: Annotated[
        str | None,
        typer.Option(
            help="Column with questions, texts or chats. Default: question, problem, prompt or messages.",
            rich_help_panel=COLUMNS,
        ),
    ] = None
    answer: Annotated[
        str | None,
        typer.Option(
            help="Column with reference answers. Default: answer, or the chat's last turn.",
            rich_help_panel=COLUMNS,
        ),
    ] = None
    no_answer: Annotated[
        bool,
        typer.Option(
            "--no-answer",
            help="The data has no reference answers, and the reward needs none.",
            rich_help_panel=COLUMNS,
        ),
    ] = False
    id: Annotated[
        str | None,
        typer.Option("--id", help="Column with unique ids. Default: row numbers.", rich_help_panel=COLUMNS),
    ] = None
    sft: Annotated[
        bool,
        typer.Option(
            "--sft",
            help="Chats to learn: messages, conversations, or prompt and completion. For algorithm.name=sft.",
            rich_help_panel=COLUMNS,
        ),
    ] = False
    pairs: Annotated[
        bool,
        typer.Option(
            "--pairs",
            help="Pairs of replies: chosen and rejected, with a prompt. For algorithm.name=dpo.",
            rich_help_panel=COLUMNS,
        ),
    ] = False
    reward: Annotated[
        str | None,
        typer.Option(
            help="gsm8k, math, ... or FILE.py:function. Your own data needs it. "
            "Default: what the data set defines.",
            rich_help_panel=PROMPT,
        ),
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="A.B=VALUE",
            help="Setting of the reward, e.g. reward.answer_pattern=REGEX. Repeatable. "
            "Default: the reward's.",
            rich_help_panel=PROMPT,
        ),
    ] = None
    system: Annotated[
        str | None,
        typer.Option(
            help='System prompt; "" is none. Default: the chat\'s, else the one that goes with the reward.',
            rich_help_panel=PROMPT,
        ),
    ] = None
    few_shot: Annotated[
        str | None,
        typer.Option(
            metavar="N|FILE",
            help="Worked examples: the first N training rows, or a file of rows. Default: no examples.",
            rich_help_panel=PROMPT,
        ),
    ] = None
    answer_template: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="A right completion for your own reward, with {answer} in it. "
            "Default: usual forms are tried.",
            rich_help_panel=PROMPT,
        ),
    ] = None
    best_reward: Annotated[
        float | None,
        typer.Option(
            help="What a right completion scores at least under your own reward. "
            "Default: what most rows score.",
            rich_help_panel=PROMPT,
        ),
    ] = None
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN=VALUE,...",
            help="Use only rows with one of these values. Repeatable. Default: all rows.",
            rich_help_panel=ROWS,
        ),
    ] = None
    drop_failing: Annotated[
        bool,
        typer.Option(
            "--drop-failing",
            help="Leave out rows whose reference answer does not score as those of the other rows.",
            rich_help_panel=ROWS,
        ),
    ] = False
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum rows of the training split. Default: all, or as many as a generated data set has.",
            rich_help_panel=ROWS,
        ),
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of generation and splits.", rich_help_panel=ROWS)] = 0
    model: Annotated[
        str | None,
        typer.Option(
            help="Count the prompts' tokens with this model's chat template. Default: only characters.",
            rich_help_panel=ROWS,
        ),
    ] = None
    as_json: AsJson = False

    @property
    def kind(self) -> Kind:
        """What the rows are. Raises ConfigError if the flags ask for two kinds."""
        if self.sft and self.pairs:
            raise ConfigError("--sft and --pairs make different data.", "Remove one of them.")
        return "sft" if self.sft else "pairs" if self.pairs else "prompts"

    def typed(self, names: Iterable[str]) -> dict[str, Any]:
        """Flag -> value, of the fields with these names that the user typed."""
        unset = {field.name: field.default for field in fields(self)}
        values = {name: getattr(self, name) for name in names}
        return {_flag(name): v for name, v in values.items() if v not in (unset[name], [])}

    def refuse(self, names: Iterable[str], what: str) -> None:
        """Raise ConfigError if one of these was typed: `what` cannot take it."""
        if typed := self.typed(names):
            raise ConfigError(
                f"{' and '.join(typed)} cannot be used with {what}.",
                "Remove it." if len(typed) == 1 else "Remove them.",
            )

    def command_line(self) -> str:
        """The command that makes the same data, whatever its folder."""
        words = [f"skylite prepare {shlex.quote(self.target)}"]
        for flag, value in self.typed((*MODULE, *FILE, *REWARD, *ROW, *KIND, "limit")).items():
            values = value if isinstance(value, list) else [value]
            words += [flag] if value is True else [f"{flag} {shlex.quote(str(part))}" for part in values]
        return " ".join([*words, f"--seed {self.seed}"])


MODULE = ("source", "synthetic", "first_source", "difficulty")
"""Fields that data_prep files take."""
FILE = (
    "config", "split", "validation_split", "test_split", "question", "answer", "id", "reward", "system",
    "few_shot", "answer_template", "best_reward",
)  # fmt: skip
"""Fields that a user's own data takes."""
REWARD, ROW, KIND = ("no_answer", "settings"), ("where", "drop_failing"), ("sft", "pairs")


def _flag(name: str) -> str:
    return "--set" if name == "settings" else f"--{name.replace('_', '-')}"


def check_flags(flags: PrepareFlags) -> None:
    """Raise ConfigError for a flag that this target or kind of rows does not take."""
    target = flags.target
    if not is_own_data(target):
        flags.refuse(["pairs"], f"{target}, which has no rejected replies")
    if flags.kind != "prompts":
        no_reward = ("reward", "few_shot", "answer_template", "best_reward", *REWARD, "model")
        flags.refuse(no_reward, f"--{flags.kind}, which needs no reward and no lengths")
    if target.startswith(REASONING_GYM):
        flags.refuse((*MODULE, *FILE, *REWARD, *ROW), "a reasoning-gym task")
    elif is_verifiers(target):
        flags.refuse((*MODULE, *FILE, *REWARD, *ROW, *KIND), "an environment of verifiers")
    elif is_own_data(target):
        flags.refuse(MODULE, "your own data")
    else:
        flags.refuse(FILE, "a data_prep file, which defines its columns and reward")
