"""Prepare a data set. Writes train, validation and test parquet files and checks every row."""

from __future__ import annotations

import dataclasses
import json
import logging
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from skylite.cli.options import AsJson, Verbose, numbers
from skylite.cli.prepare_own_data import OwnFlags, RewardChoice, own_data_examples
from skylite.cli.prepare_preview import ask_before_replacing, length_note, preview
from skylite.config.loading import read_parameters
from skylite.data.examples import ExampleSet, check_examples, check_ids, check_or_drop, prepared_row
from skylite.data.key_value_spec import REASONING_GYM
from skylite.data.prompts import SPLITS, Kind, PromptFileInfo, replace_folder
from skylite.data.user_tables import is_own_data
from skylite.errors import ConfigError, DataError, RunFailed
from skylite.notes import log_notes, notes_of
from skylite.progress_reporting import long_work
from skylite.rewards import load_reward
from skylite.rewards.built_in import BUILT_IN, without_extraction
from skylite.rewards.call_rewards import RewardFunction, finite_scores
from skylite.rewards.right_completion import PROBES, RightForm, form_of_scores
from skylite.rollout.trusted_programs import remember
from skylite.types import Prompt
from skylite.ui.logs import show
from skylite.user_functions import is_verifiers

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
ALGORITHMS = {"sft": "sft", "pairs": "dpo"}
"""Kind of data -> the algorithm that trains on it."""
CHECK_CHUNK = 64
"""Rows between two updates of the progress bar."""


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
    """The flags of `skylite prepare`; `prepare_data` does the work."""
    own = OwnFlags(
        config=config, split=split, validation_split=validation_split, test_split=test_split,
        question=question, answer=answer, id=id_, reward=reward, system=system, few_shot=few_shot,
        answer_template=answer_template, best_reward=best_reward,
    )  # fmt: skip
    prepare_data(
        target, out=out, replace=replace, source=source, synthetic=synthetic, first_source=first_source,
        difficulty=numbers(difficulty), where=tuple(where or ()), drop_failing=drop_failing,
        no_answer=no_answer, sft=sft, pairs=pairs, settings=tuple(settings or ()),
        limit=limit, seed=seed, model=model, as_json=as_json, **own.given(),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlagGroups:
    """The flags by what takes them: name -> value."""

    module: dict[str, object]
    """data_prep files."""
    file: dict[str, object]
    """A user's own data."""
    reward: dict[str, object]
    row: dict[str, object]
    kind: dict[str, object]

    @property
    def all(self) -> dict[str, object]:
        return self.module | self.file | self.reward | self.row | self.kind


def prepare_data(
    target: str,
    *,
    out: Path | None = None,
    source: Path | None = None,
    synthetic: bool = False,
    first_source: bool = False,
    difficulty: Sequence[int] = (),
    where: Sequence[str] = (),
    drop_failing: bool = False,
    no_answer: bool = False,
    sft: bool = False,
    pairs: bool = False,
    settings: Sequence[str] = (),
    limit: int | None = None,
    seed: int = 0,
    as_json: bool = False,
    replace: bool = True,
    model: str | None = None,
    **own: str | float | None,
) -> Path:
    """Prepare a data set, a reasoning-gym task or a user's own data. Returns the folder.

    `own`: the fields of OwnFlags. `replace`: without asking, also data that another command made. `model`:
    whose tokens to count. Raises DataError, ConfigError and ModelError; nothing is written then.
    """
    own_flags = OwnFlags(**own)  # type: ignore[arg-type]  # the caller names its fields
    chosen = RewardChoice(own_flags.reward, read_parameters(settings), has_answers=not no_answer)
    flags = FlagGroups(
        module={
            "--source": source,
            "--synthetic": synthetic,
            "--first-source": first_source,
            "--difficulty": difficulty,
        },
        file=own_flags.by_name(),
        reward={"--no-answer": no_answer, "--set": tuple(settings)},
        row={"--where": where, "--drop-failing": drop_failing},
        kind={"--sft": sft, "--pairs": pairs},
    )
    kind = _kind(flags.kind)
    _check_flags(target, kind, flags, model)
    if target.startswith(REASONING_GYM):
        examples = _reasoning_gym_task(target, limit, seed)
    elif is_verifiers(target):
        examples = _verifiers_tasks(target, limit, seed)
    elif is_own_data(target):
        examples = own_data_examples(target, own_flags, chosen, where, drop_failing, limit, seed, kind)
    else:
        examples = _dataset_module(
            target, source, synthetic, first_source, difficulty, where, chosen, limit, seed
        )
    examples = dataclasses.replace(examples, kind=kind)
    folder = out if out is not None else Path("data") / examples.dataset
    drop_failing = drop_failing or examples.drop_failing
    made_by = _command_line(target, flags.all | {"--limit": limit, "--seed": seed})
    if not replace:
        ask_before_replacing(folder, made_by)
    written = _check_and_write(examples, folder, drop_failing, limit, seed, made_by, model)
    show(_facts(folder, *written) if as_json else _summary(folder, *written))
    return folder


def _check_flags(target: str, kind: Kind, flags: FlagGroups, model: str | None) -> None:
    """Raise ConfigError for a flag that this target or kind of rows does not take."""
    if flags.kind["--pairs"] and not is_own_data(target):
        _refuse_flags({"--pairs": True}, f"{target}, which has no rejected replies")
    if kind != "prompts":
        names = ("--reward", "--few-shot", "--answer-template", "--best-reward")
        no_reward = {name: flags.file[name] for name in names} | flags.reward | {"--model": model}
        _refuse_flags(no_reward, f"--{kind}, which needs no reward and no lengths")
    if target.startswith(REASONING_GYM):
        refused = flags.module | flags.file | flags.reward | flags.row
        _refuse_flags(refused, "a reasoning-gym task")
    elif is_verifiers(target):
        _refuse_flags(flags.all, "an environment of verifiers")
    elif is_own_data(target):
        _refuse_flags(flags.module, "your own data")
    else:
        _refuse_flags(flags.file, "a data_prep file, which defines its columns and reward")


def _check_and_write(
    examples: ExampleSet,
    folder: Path,
    drop_failing: bool,
    limit: int | None,
    seed: int,
    made_by: str,
    model: str | None,
) -> tuple[dict[str, list[Prompt]], ExampleSet]:
    """The prompts by split, and the examples with all notes."""
    log_notes(notes_of(*examples.notes))
    prompts, dropped = _check(examples, drop_failing=drop_failing)
    log_notes(notes_of(*dropped))
    if examples.kind == "prompts" and not is_verifiers(examples.reward):
        log_notes([length_note([prompt for split in SPLITS for prompt in prompts[split]], model)])
    ids = {split: {prompt.id for prompt in part} for split, part in prompts.items()}
    described = dataclasses.replace(
        examples,
        notes=[*examples.notes, *dropped],
        splits={s: [e for e in part if e.prompt.id in ids[s]] for s, part in examples.splits.items()},
    )
    footers = _footers(described, prompts, limit=limit, seed=seed, made_by=made_by)
    rows = {split: [prepared_row(described, e) for e in part] for split, part in described.splits.items()}
    replace_folder(folder, rows, footers)
    return prompts, described


def _facts(folder: Path, prompts: dict[str, list[Prompt]], examples: ExampleSet) -> str:
    facts = {
        "folder": str(folder),
        "dataset": examples.dataset,
        "reward": examples.reward,
        "rows": {split: len(prompts[split]) for split in SPLITS},
        "notes": [*map(str, examples.notes)],
    }
    return json.dumps(facts, ensure_ascii=False, indent=1)


def _summary(folder: Path, prompts: dict[str, list[Prompt]], examples: ExampleSet) -> str:
    """The first row as the model sees it, and what was written."""
    first = preview(prepared_row(examples, examples.splits["train"][0]), added=examples.system)
    return f"{first}\n{_verdict(folder, prompts, examples)}"


def _verdict(folder: Path, prompts: dict[str, list[Prompt]], examples: ExampleSet) -> str:
    counts = ", ".join(f"{len(prompts[split])} {split}" for split in SPLITS)
    if is_verifiers(examples.reward):
        return f"wrote {folder}: {counts}; train on it with --env {shlex.quote(examples.reward)}"
    if examples.kind != "prompts":
        return f"wrote {folder}: {counts}; train on it with --set algorithm.name={ALGORITHMS[examples.kind]}"
    if examples.splits["train"][0].reference is None:
        return f"wrote {folder}: {counts}; the reward {examples.reward} uses no reference answers"
    best = "1.0" if examples.form is None or examples.form.best == 1.0 else examples.form.wanted()
    return (
        f"wrote {folder}: {counts}; every reference answer scores {best} under the reward {examples.reward}"
    )


def _dataset_module(
    target: str,
    source: Path | None,
    synthetic: bool,
    first_source: bool,
    difficulties: Sequence[int],
    where: Sequence[str],
    chosen: RewardChoice,
    limit: int | None,
    seed: int,
) -> ExampleSet:
    from skylite.data.data_prep_file import load_dataset, module_examples

    if synthetic and (source is not None or first_source):
        raise ConfigError(
            "--synthetic cannot be combined with --source or --first-source.", "Remove one of them."
        )
    examples = module_examples(
        load_dataset(target, has_answers=chosen.has_answers),
        source=source,
        synthetic=synthetic,
        first_source=first_source,
        difficulties=difficulties,
        where=where,
        limit=limit,
        seed=seed,
    )
    return dataclasses.replace(examples, parameters=chosen.parameters)


def _reasoning_gym_task(spec: str, limit: int | None, seed: int) -> ExampleSet:
    from skylite.data.reasoning_gym import reasoning_gym_examples

    remember("reasoning-gym")
    return reasoning_gym_examples(spec, limit=limit, seed=seed, show_progress=_show_progress)


def _verifiers_tasks(spec: str, limit: int | None, seed: int) -> ExampleSet:
    from skylite.data.verifiers import verifiers_examples

    remember(spec)
    with long_work(f"reading the tasks of {spec}"):
        return verifiers_examples(spec, limit=limit, seed=seed)


def _check(examples: ExampleSet, *, drop_failing: bool) -> tuple[dict[str, list[Prompt]], list[str]]:
    """Split -> prompts, and a note on the rows that were left out.

    Raises DataError for a row whose reference does not score as it must, unless such rows are left out.
    """
    check_ids(examples)
    if not examples.reward or is_verifiers(examples.reward):  # none, or its episodes give them
        return {split: [e.prompt for e in examples.splits[split]] for split in SPLITS}, []
    spec, first = examples.reward, examples.splits["train"][0]
    parameters = without_extraction(spec, examples.parameters)
    reward = load_reward(spec, parameters, first.prompt if first.reference is None else None)
    form = examples.form if examples.form is not None else _form_of_references(examples, reward)
    prompts: dict[str, list[Prompt]] = {split: [] for split in SPLITS}
    chunks = [
        (split, rows[start : start + CHECK_CHUNK])
        for split, rows in examples.splits.items()
        for start in range(0, len(rows), CHECK_CHUNK)
    ]
    dropped: list[str] = []
    for split, chunk in _show_progress(chunks, "checking every row"):
        prompts[split] += (
            check_or_drop(chunk, spec, reward, dropped, form)
            if drop_failing
            else check_examples(chunk, spec, reward, form)
        )
    for split in (split for split, kept in prompts.items() if not kept):
        raise DataError(
            f"No row of {split} has a reference answer that scores as it must. E.g.: {dropped[0]}"
        )
    if not dropped:
        return prompts, []
    total = len(dropped) + sum(map(len, prompts.values()))
    return prompts, [
        f"left out {len(dropped)} of {total} rows, whose reference answers do not score as they must; "
        f"the first: {dropped[0]}"
    ]


def _form_of_references(examples: ExampleSet, reward: RewardFunction) -> RightForm | None:
    """What a data_prep file's own reward gives its references; None for a built-in reward."""
    rows = [example for example in examples.splits["train"] if example.reference is not None]
    if examples.reward in BUILT_IN or not rows:
        return None
    probed = rows[:: max(1, len(rows) // PROBES)][:PROBES]
    try:
        right = finite_scores(examples.reward, reward, [(e.prompt, e.reference or "") for e in probed])
        empty = finite_scores(examples.reward, reward, [(e.prompt, "") for e in probed])
    except RunFailed:
        return None  # the check of every row names the row
    better = sum(right) > sum(empty)
    return form_of_scores(right, floor=max(empty)) if better or max(right) > 0 else None


def _footers(
    examples: ExampleSet,
    prompts: dict[str, list[Prompt]],
    *,
    limit: int | None,
    seed: int,
    made_by: str,
) -> dict[str, PromptFileInfo]:
    return {
        split: PromptFileInfo(
            dataset=examples.dataset,
            source_kind=table.kind,
            source=table.source,
            source_sha256=table.sha256,
            count=len(prompts[split]),
            seed=seed,
            split=split,
            reward=examples.reward,
            system=examples.system,
            few_shot=examples.few_shot,
            limit=limit if split == "train" else None,
            made_by=made_by,
            notes="; ".join(map(str, examples.notes)),
            has_answers=examples.has_answers,
            reward_settings=examples.parameters.model_dump(exclude_unset=True),
            answer_template=examples.form.template if examples.form is not None else "",
            best_reward=examples.form.best if examples.form is not None else 1.0,
            kind=examples.kind,
        )
        for split in SPLITS
        for table in [examples.tables[split]]
    }


def _kind(flags: dict[str, object]) -> Kind:
    if flags["--sft"] and flags["--pairs"]:
        raise ConfigError("--sft and --pairs make different data.", "Remove one of them.")
    return "sft" if flags["--sft"] else "pairs" if flags["--pairs"] else "prompts"


def _refuse_flags(flags: dict[str, object], what: str) -> None:
    given = [name for name, value in flags.items() if value not in (None, False, ()) and value != []]
    if given:
        raise ConfigError(
            f"{' and '.join(given)} cannot be used with {what}.",
            "Remove it." if len(given) == 1 else "Remove them.",
        )


def _command_line(target: str, flags: dict[str, object]) -> str:
    words = [f"skylite prepare {shlex.quote(target)}"]
    for name, value in flags.items():
        if value is True:
            words.append(name)
        elif name in ("--where", "--set") and isinstance(value, tuple | list):
            words += [f"{name} {shlex.quote(str(condition))}" for condition in value]
        elif isinstance(value, tuple | list) and value:
            words.append(f"{name} {','.join(map(str, value))}")
        elif value is not None and not isinstance(value, bool | tuple | list):
            words.append(f"{name} {shlex.quote(str(value))}")
    return " ".join(words)


def _show_progress(items: Sequence[_T], description: str) -> Iterator[_T]:
    """The items, while long work is shown."""
    with long_work(description, total=len(items)) as work:
        for item in items:
            yield item
            work.advance()
