"""Prepare a data set. Writes train, validation and test parquet files and checks every row."""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from skylite.cli.options import numbers
from skylite.cli.prepare_flags import PrepareFlags, check_flags
from skylite.cli.prepare_own_data import own_data_examples
from skylite.config.loading import read_parameters
from skylite.config.rollout import DataConfig, RewardParameters, RolloutConfig
from skylite.data.chat_tokenizer import load_tokenizer, read_template, too_long
from skylite.data.examples import ExampleSet, check_examples, check_ids, check_or_drop, prepared_row
from skylite.data.key_value_spec import REASONING_GYM
from skylite.data.prompts import (
    SPLITS,
    Chat,
    Pair,
    PreparedRow,
    PromptFileInfo,
    read_info,
    replace_folder,
)
from skylite.data.user_tables import is_own_data
from skylite.errors import ConfigError, DataError, RunFailed
from skylite.hub.resolve import resolve_model
from skylite.notes import Note, log_notes, notes_of, warning
from skylite.progress_reporting import long_work
from skylite.rewards import load_reward
from skylite.rewards.built_in import BUILT_IN, NO_REWARD, without_extraction
from skylite.rewards.call_rewards import RewardFunction, finite_scores
from skylite.rewards.right_completion import PROBES, RightForm, form_of_scores
from skylite.rollout.trusted_programs import remember
from skylite.types import Message, Prompt
from skylite.ui.logs import show
from skylite.user_functions import is_verifiers

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
ALGORITHMS = {"sft": "sft", "pairs": "dpo"}
"""Kind of data -> the algorithm that trains on it."""
CHECK_CHUNK = 64
"""Rows between two updates of the progress bar."""
SHOWN = 400
"""Characters of a message to show."""
TURNS = 3
"""Messages to show at each end of a long prompt."""


def prepare(flags: PrepareFlags) -> None:
    """The flags of `skylite prepare`; `prepare_data` does the work."""
    prepare_data(flags)


def prepare_data(flags: PrepareFlags) -> Path:
    """Prepare a data set, a reasoning-gym task or a user's own data. Returns the folder.

    Raises DataError, ConfigError and ModelError; nothing is written then.
    """
    parameters = read_parameters(flags.settings or ())
    check_flags(flags)
    examples = replace(_read_examples(flags, parameters), kind=flags.kind)
    folder = flags.out if flags.out is not None else Path("data") / examples.dataset
    if not flags.replace:
        ask_before_replacing(folder, flags.command_line())
    written = _check_and_write(examples, folder, flags)
    show(_facts(folder, *written) if flags.as_json else _summary(folder, *written))
    return folder


def _read_examples(flags: PrepareFlags, parameters: RewardParameters) -> ExampleSet:
    if flags.target.startswith(REASONING_GYM):
        return _reasoning_gym_task(flags.target, flags.limit, flags.seed)
    if is_verifiers(flags.target):
        return _verifiers_tasks(flags.target, flags.limit, flags.seed)
    if is_own_data(flags.target):
        return own_data_examples(flags, parameters)
    return replace(_dataset_module(flags), parameters=parameters)


def _check_and_write(
    examples: ExampleSet, folder: Path, flags: PrepareFlags
) -> tuple[dict[str, list[Prompt]], ExampleSet]:
    """The prompts by split, and the examples with all notes."""
    log_notes(notes_of(*examples.notes))
    prompts, dropped = _check(examples, drop_failing=flags.drop_failing or examples.drop_failing)
    log_notes(notes_of(*dropped))
    if examples.kind == "prompts" and not is_verifiers(examples.reward):
        log_notes([length_note([prompt for split in SPLITS for prompt in prompts[split]], flags.model)])
    ids = {split: {prompt.id for prompt in part} for split, part in prompts.items()}
    described = replace(
        examples,
        notes=[*examples.notes, *dropped],
        splits={s: [e for e in part if e.prompt.id in ids[s]] for s, part in examples.splits.items()},
    )
    footers = _footers(described, prompts, flags)
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
    if examples.reward == NO_REWARD:
        return f"wrote {folder}: {counts}; without a reward: train on it with --set algorithm.name=opd"
    if examples.splits["train"][0].reference is None:
        return f"wrote {folder}: {counts}; the reward {examples.reward} uses no reference answers"
    best = "1.0" if examples.form is None or examples.form.best == 1.0 else examples.form.wanted()
    return (
        f"wrote {folder}: {counts}; every reference answer scores {best} under the reward {examples.reward}"
    )


def _dataset_module(flags: PrepareFlags) -> ExampleSet:
    from skylite.data.data_prep_file import load_dataset, module_examples

    if flags.synthetic and (flags.source is not None or flags.first_source):
        raise ConfigError(
            "--synthetic cannot be combined with --source or --first-source.", "Remove one of them."
        )
    return module_examples(
        load_dataset(flags.target, has_answers=not flags.no_answer),
        source=flags.source,
        synthetic=flags.synthetic,
        first_source=flags.first_source,
        difficulties=numbers(flags.difficulty),
        where=flags.where or (),
        limit=flags.limit,
        seed=flags.seed,
    )


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
    examples: ExampleSet, prompts: dict[str, list[Prompt]], flags: PrepareFlags
) -> dict[str, PromptFileInfo]:
    return {
        split: PromptFileInfo(
            dataset=examples.dataset,
            source_kind=table.kind,
            source=table.source,
            source_sha256=table.sha256,
            count=len(prompts[split]),
            seed=flags.seed,
            split=split,
            reward=examples.reward,
            system=examples.system,
            few_shot=examples.few_shot,
            limit=flags.limit if split == "train" else None,
            made_by=flags.command_line(),
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


def _show_progress(items: Sequence[_T], description: str) -> Iterator[_T]:
    """The items, while long work is shown."""
    with long_work(description, total=len(items)) as work:
        for item in items:
            yield item
            work.advance()


def preview(row: PreparedRow, added: str) -> str:
    """The first training row as the model gets it, and its answer. `added`: the data set's system text."""
    turns = [_turn(message, added) for message in row.messages]
    if len(turns) > 2 * TURNS:
        turns = [*turns[:TURNS], f"  ... {len(turns) - 2 * TURNS} more messages ...", *turns[-TURNS:]]
    answers: dict[str, str] = {}
    if isinstance(row, Prompt):
        answers = {"right answer": row.answer}
    elif isinstance(row, Pair):
        answers = {"chosen": row.chosen, "rejected": row.rejected}
    shown = [f"  {name}: {_short(text)}" for name, text in answers.items() if text]
    what = "chat" if isinstance(row, Chat) else "prompt"
    return "\n".join([f"the first training {what}:", *turns, *shown])


def _turn(message: Message, added: str) -> str:
    is_added = message["role"] == "system" and message["content"] == added
    note = " (in every prompt; --system TEXT changes it)" if is_added else ""
    return f"  {message['role']}{note}: {_short(message['content'])}"


def _short(text: str) -> str:
    lines = text if len(text) <= SHOWN else f"{text[:SHOWN]} ... ({len(text):,} characters)"
    return lines.replace("\n", "\n    ")


def length_note(prompts: Sequence[Prompt], model: str | None) -> Note:
    """How long the prompts are, in tokens of `model` if one is given. Raises ModelError."""
    longest = max(prompts, key=_characters)
    if model is None:
        count = _characters(longest)
        return Note(
            f"the longest prompt, {longest.id}, has {count:,} characters; --model NAME counts its tokens"
        )
    template, limit = read_template(DataConfig()), RolloutConfig().max_prompt_tokens
    with contextlib.closing(load_tokenizer(resolve_model(model).path, template)) as tokenizer:
        counts = too_long(tokenizer, prompts, limit)
        if not counts:
            tokens = len(tokenizer.encode_chats([longest])[0])
            return Note(
                f"no prompt is over {limit} tokens of {model}; {longest.id}, the longest text, has {tokens}"
            )
    name = max(counts, key=lambda prompt: counts[prompt])
    return warning(
        f"{len(counts)} of {len(prompts)} prompts have more than {limit} tokens of {model}, a run's "
        f"default limit; the longest, {name}, has {counts[name]}. `train` needs --set "
        f"rollout.max_prompt_tokens={counts[name]}, or leaves them out with --set "
        "data.filter_overlong_prompts=true"
    )


def _characters(prompt: Prompt) -> int:
    return sum(len(message["content"]) for message in prompt.messages)


def is_terminal() -> bool:
    """Whether somebody can answer."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def ask_before_replacing(folder: Path, made_by: str) -> None:
    """Ask on a terminal before data that another command made is replaced. Raises ConfigError for a no."""
    try:
        earlier = read_info(folder / "train.parquet").made_by
    except DataError:
        return  # no data of ours; replace_folder refuses a folder with other files
    if earlier == made_by:
        return
    if is_terminal():
        show(f"{folder} holds the data of: {earlier}\nReplace it? [y/N]", to_stderr=True)
        if input().strip().lower() in ("y", "yes"):
            return
    raise ConfigError(
        f"{folder} holds the data of another command: {earlier}.",
        "Give another folder with --out, or --replace.",
    )
