"""`skylite prepare` on the command line: its flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skylite.cli.options import AsJson, Verbose, numbers

ORIGIN, COLUMNS, PROMPT, ROWS = (
    "Where the rows come from", "Your own data", "Prompt and reward", "Which rows",
)  # fmt: skip
Target = Annotated[
    str,
    typer.Argument(
        help="gsm8k, gsm8k_calculator, hendrycks_math, countdown, guess, reasoning-gym:TASK, "
        "verifiers:NAME, a data_prep .py file; or your own data: a .jsonl, .json, .csv or .parquet file, "
        "a folder of them, or a hub id."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(help="Output folder. Default: data/NAME, which is printed.", rich_help_panel=ORIGIN),
]
Replace = Annotated[
    bool,
    typer.Option(
        "--replace",
        help="Replace a folder that another prepare command made, without asking.",
        rich_help_panel=ORIGIN,
    ),
]
Source = Annotated[
    Path | None,
    typer.Option(help="Folder with the released files. Default: the hub.", rich_help_panel=ORIGIN),
]
Synthetic = Annotated[
    bool,
    typer.Option(
        "--synthetic", help="Generate problems in the format of the data set.", rich_help_panel=ORIGIN
    ),
]
FirstSource = Annotated[
    bool,
    typer.Option(
        "--first-source",
        help="Use the first available source: hub, --source, synthetic.",
        rich_help_panel=ORIGIN,
    ),
]
Difficulty = Annotated[
    str,
    typer.Option(
        help="How hard generated problems are, e.g. 1,2 (gsm8k: reasoning steps). Default: all for gsm8k, "
        "2,3 for countdown, 4 for guess.",
        rich_help_panel=ORIGIN,
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        help="Config of a hub data set or folder. Default: its only one, or the one named default.",
        rich_help_panel=COLUMNS,
    ),
]
Split = Annotated[
    str | None, typer.Option(help="Split to train on. Default: train.", rich_help_panel=COLUMNS)
]
ValidationSplit = Annotated[
    str | None,
    typer.Option(help="Split to validate on. Default: rows held out of --split.", rich_help_panel=COLUMNS),
]
TestSplit = Annotated[
    str | None,
    typer.Option(help="Split to test on. Default: rows held out of --split.", rich_help_panel=COLUMNS),
]
Question = Annotated[
    str | None,
    typer.Option(
        help="Column with questions, texts or chats. Default: question, problem, prompt or messages.",
        rich_help_panel=COLUMNS,
    ),
]
Answer = Annotated[
    str | None,
    typer.Option(
        help="Column with reference answers. Default: answer, or the chat's last turn.",
        rich_help_panel=COLUMNS,
    ),
]
Id = Annotated[
    str | None,
    typer.Option("--id", help="Column with unique ids. Default: row numbers.", rich_help_panel=COLUMNS),
]
NoAnswer = Annotated[
    bool,
    typer.Option(
        "--no-answer",
        help="The data has no reference answers, and the reward needs none.",
        rich_help_panel=COLUMNS,
    ),
]
Sft = Annotated[
    bool,
    typer.Option(
        "--sft",
        help="Chats to learn: messages, conversations, or prompt and completion. For algorithm.name=sft.",
        rich_help_panel=COLUMNS,
    ),
]
Pairs = Annotated[
    bool,
    typer.Option(
        "--pairs",
        help="Pairs of replies: chosen and rejected, with a prompt. For algorithm.name=dpo.",
        rich_help_panel=COLUMNS,
    ),
]
Reward = Annotated[
    str | None,
    typer.Option(
        help="gsm8k, math, ... or FILE.py:function. Your own data needs it. "
        "Default: what the data set defines.",
        rich_help_panel=PROMPT,
    ),
]
RewardSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="A.B=VALUE",
        help="Setting of the reward, e.g. reward.answer_pattern=REGEX. Repeatable. Default: the reward's.",
        rich_help_panel=PROMPT,
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        help='System prompt; "" is none. Default: the chat\'s, else the one that goes with the reward.',
        rich_help_panel=PROMPT,
    ),
]
FewShot = Annotated[
    str | None,
    typer.Option(
        metavar="N|FILE",
        help="Worked examples: the first N training rows, or a file of rows. Default: no examples.",
        rich_help_panel=PROMPT,
    ),
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN=VALUE,...",
        help="Use only rows with one of these values. Repeatable. Default: all rows.",
        rich_help_panel=ROWS,
    ),
]
AnswerTemplate = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="A right completion for your own reward, with {answer} in it. Default: usual forms are tried.",
        rich_help_panel=PROMPT,
    ),
]
BestReward = Annotated[
    float | None,
    typer.Option(
        help="What a right completion scores at least under your own reward. Default: what most rows score.",
        rich_help_panel=PROMPT,
    ),
]
DropFailing = Annotated[
    bool,
    typer.Option(
        "--drop-failing",
        help="Leave out rows whose reference answer does not score as those of the other rows.",
        rich_help_panel=ROWS,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Count the prompts' tokens with this model's chat template. Default: only characters.",
        rich_help_panel=ROWS,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Maximum rows of the training split. Default: all, or as many as a generated data set has.",
        rich_help_panel=ROWS,
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of generation and splits.", rich_help_panel=ROWS)]


def prepare(
    target: Target,
    out: Out = None,
    replace: Replace = False,
    source: Source = None,
    synthetic: Synthetic = False,
    first_source: FirstSource = False,
    difficulty: Difficulty = "",
    config: Config = None,
    split: Split = None,
    validation_split: ValidationSplit = None,
    test_split: TestSplit = None,
    question: Question = None,
    answer: Answer = None,
    no_answer: NoAnswer = False,
    id_: Id = None,
    sft: Sft = False,
    pairs: Pairs = False,
    reward: Reward = None,
    settings: RewardSettings = None,
    system: System = None,
    few_shot: FewShot = None,
    answer_template: AnswerTemplate = None,
    best_reward: BestReward = None,
    where: Where = None,
    drop_failing: DropFailing = False,
    limit: Limit = None,
    seed: Seed = 0,
    model: Model = None,
    as_json: AsJson = False,
    verbose: Verbose = None,
) -> None:
    """Prepare a data set. Writes train, validation and test parquet files and checks every row."""
    from skylite.cli.prepare import prepare as run
    from skylite.cli.prepare_own_data import OwnFlags

    own = OwnFlags(
        config=config, split=split, validation_split=validation_split, test_split=test_split,
        question=question, answer=answer, id=id_, reward=reward, system=system, few_shot=few_shot,
        answer_template=answer_template, best_reward=best_reward,
    )  # fmt: skip
    run(
        target, out=out, replace=replace, source=source, synthetic=synthetic, first_source=first_source,
        difficulty=numbers(difficulty), where=tuple(where or ()), drop_failing=drop_failing,
        no_answer=no_answer, sft=sft, pairs=pairs, settings=tuple(settings or ()),
        limit=limit, seed=seed, model=model, as_json=as_json, **own.given(),
    )  # fmt: skip
