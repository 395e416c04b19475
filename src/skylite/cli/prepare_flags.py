"""The flags of `skylite prepare`: their declaration, which ones a target takes, and the command as typed."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field

from skylite.cli.options import AsJson
from skylite.cli.setting_flags import Flags
from skylite.config.base_section import Flag
from skylite.data.key_value_spec import REASONING_GYM
from skylite.data.prompts import Kind
from skylite.data.user_tables import is_own_data
from skylite.errors import ConfigError
from skylite.user_functions import is_verifiers

ORIGIN, COLUMNS, PROMPT, ROWS = (
    "Where the rows come from", "Your own data", "Prompt and reward", "Which rows",
)  # fmt: skip


class PrepareFlags(Flags):
    """The flags of `skylite prepare`."""

    target: Annotated[
        str,
        typer.Argument(
            help="gsm8k, gsm8k_calculator, hendrycks_math, countdown, guess, reasoning-gym:TASK, "
            "verifiers:NAME, a data_prep .py file; or your own data: a .jsonl, .json, .csv or .parquet file, "
            "a folder of them, or a hub id."
        ),
    ]
    out: Annotated[Path | None, Flag("--out", ORIGIN)] = None
    """Output folder. Default: data/NAME, which is printed."""
    replace: Annotated[bool, Flag("--replace", ORIGIN)] = False
    """Replace a folder that another prepare command made, without asking."""
    source: Annotated[Path | None, Flag("--source", ORIGIN)] = None
    """Folder with the released files. Default: the hub."""
    synthetic: Annotated[bool, Flag("--synthetic", ORIGIN)] = False
    """Generate problems in the format of the data set."""
    first_source: Annotated[bool, Flag("--first-source", ORIGIN)] = False
    """Use the first available source: hub, --source, synthetic."""
    difficulty: Annotated[str, Flag("--difficulty", ORIGIN)] = ""
    """How hard generated problems are, e.g. 1,2 (gsm8k: reasoning steps). Default: all for gsm8k, 2,3 for
    countdown, 4 for guess."""
    config: Annotated[str | None, Flag("--config", COLUMNS)] = None
    """Config of a hub data set or folder. Default: its only one, or the one named default."""
    split: Annotated[str | None, Flag("--split", COLUMNS)] = None
    """Split to train on. Default: train."""
    validation_split: Annotated[str | None, Flag("--validation-split", COLUMNS)] = None
    """Split to validate on. Default: rows held out of --split."""
    test_split: Annotated[str | None, Flag("--test-split", COLUMNS)] = None
    """Split to test on. Default: rows held out of --split."""
    question: Annotated[str | None, Flag("--question", COLUMNS)] = None
    """Column with questions, texts or chats. Default: question, problem, prompt or messages."""
    answer: Annotated[str | None, Flag("--answer", COLUMNS)] = None
    """Column with reference answers. Default: answer, or the chat's last turn."""
    no_answer: Annotated[bool, Flag("--no-answer", COLUMNS)] = False
    """The data has no reference answers, and the reward needs none."""
    sft: Annotated[bool, Flag("--sft", COLUMNS)] = False
    """Chats to learn: messages, conversations, or prompt and completion. For algorithm.name=sft."""
    pairs: Annotated[bool, Flag("--pairs", COLUMNS)] = False
    """Pairs of replies: chosen and rejected, with a prompt. For algorithm.name=dpo."""
    reward: Annotated[str | None, Flag("--reward", PROMPT)] = None
    """gsm8k, math, ... or FILE.py:function; none, to distil only. Your own data needs it. Default: what the
    data set defines."""
    settings: Annotated[list[str] | None, Flag("--set", PROMPT, metavar="A.B=VALUE")] = None
    """Setting of the reward, e.g. reward.answer_pattern=REGEX. Repeatable. Default: the reward's."""
    system: Annotated[str | None, Flag("--system", PROMPT)] = None
    """System prompt; "" is none. Default: the chat's, else the one that goes with the reward."""
    few_shot: Annotated[int | None, Flag("--few-shot", PROMPT)] = Field(None, ge=1)
    """Worked examples: the first N training rows. Default: no examples."""
    answer_template: Annotated[str | None, Flag("--answer-template", PROMPT, metavar="TEXT")] = None
    """A right completion for your own reward, with {answer} in it. Default: usual forms are tried."""
    best_reward: Annotated[float | None, Flag("--best-reward", PROMPT)] = None
    """What a right completion scores at least under your own reward. Default: what most rows score."""
    where: Annotated[list[str] | None, Flag("--where", ROWS, metavar="COLUMN=VALUE,...")] = None
    """Use only rows with one of these values. Repeatable. Default: all rows."""
    drop_failing: Annotated[bool, Flag("--drop-failing", ROWS)] = False
    """Leave out rows whose reference answer does not score as those of the other rows."""
    limit: Annotated[int | None, Flag("--limit", ROWS)] = Field(None, ge=1)
    """Maximum rows of the training split. Default: all, or as many as a generated data set has."""
    seed: Annotated[int, Flag("--seed", ROWS)] = Field(0, ge=0)
    """Seed of generation and splits."""
    model: Annotated[str | None, Flag("--model", ROWS)] = None
    """Count the prompts' tokens with this model's chat template. Default: only characters."""
    as_json: AsJson = False

    @property
    def kind(self) -> Kind:
        """What the rows are. Raises ConfigError if the flags ask for two kinds."""
        if self.sft and self.pairs:
            raise ConfigError("--sft and --pairs make different data.", "Remove one of them.")
        return "sft" if self.sft else "pairs" if self.pairs else "prompts"

    def typed(self, names: Iterable[str]) -> dict[str, Any]:
        """Flag -> value, of the fields with these names that the user typed."""
        values = {name: getattr(self, name) for name in names}
        unset = {name: field.default for name, field in type(self).model_fields.items()}
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
    "config", "split", "validation_split", "test_split", "question", "answer", "reward", "system",
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
