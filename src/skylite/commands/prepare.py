"""`skylite prepare`: raw rows to train, validation and test parquet files, with every row checked."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from skylite.config.loading import read_parameters
from skylite.config.rollout import RewardParameters
from skylite.data.examples import SPLITS, ExampleSet, check_examples
from skylite.data.prompts import PromptFileInfo, write_prompts
from skylite.data.sources import READABLE
from skylite.errors import ConfigError, DataError, WriteFailed
from skylite.plugin_file import resolve_spec
from skylite.rewards import NEEDS_ANSWER, load_reward, without_extraction
from skylite.run.files import fsync_path, swap_paths, temporary_sibling
from skylite.run.programs_named_by_user import remember
from skylite.types import Prompt
from skylite.ui.logs import show

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
REASONING_GYM = "reasoning-gym:"
CHECK_CHUNK = 64
"""Rows between two updates of the progress bar."""


@dataclass(frozen=True, slots=True)
class RewardChoice:
    """What the flags say about the reward."""

    spec: str | None
    """--reward"""
    parameters: RewardParameters
    """--set reward.NAME=VALUE"""
    has_answers: bool
    """False: --no-answer"""


def prepare(
    target: str,
    *,
    out: Path | None = None,
    source: Path | None = None,
    synthetic: bool = False,
    first_source: bool = False,
    difficulty: Sequence[int] = (),
    question: str | None = None,
    answer: str | None = None,
    no_answer: bool = False,
    reward: str | None = None,
    settings: Sequence[str] = (),
    limit: int | None = None,
    seed: int = 0,
) -> Path:
    """Prepare a data set, a reasoning-gym task or a user's file. Returns the folder.

    Raises DataError and ConfigError; nothing is written then.
    """
    chosen = RewardChoice(reward, read_parameters(settings), has_answers=not no_answer)
    module_flags: dict[str, object] = {
        "--source": source,
        "--synthetic": synthetic,
        "--first-source": first_source,
        "--difficulty": difficulty,
    }
    reward_flags: dict[str, object] = {"--no-answer": no_answer, "--set": tuple(settings)}
    file_flags: dict[str, object] = {"--question": question, "--answer": answer, "--reward": reward}
    if target.startswith(REASONING_GYM):
        _refuse_flags(module_flags | file_flags | reward_flags, "a reasoning-gym task")
        examples = _reasoning_gym_task(target.removeprefix(REASONING_GYM), limit, seed)
    elif target.endswith(READABLE):
        _refuse_flags(module_flags, "your own file")
        examples = _user_file(Path(target), question, answer, chosen, limit, seed)
    else:
        _refuse_flags(file_flags, "a data_prep file, which defines its columns and reward")
        examples = _dataset_module(target, source, synthetic, first_source, difficulty, chosen, limit, seed)
    for note in examples.notes:
        logger.info(note)
    prompts = _check(examples)
    folder = out if out is not None else Path("data") / examples.dataset
    flags = module_flags | file_flags | reward_flags | {"--limit": limit, "--seed": seed}
    made_by = _command_line(target, flags)
    _replace_folder(folder, prompts, _footers(examples, limit=limit, seed=seed, made_by=made_by))
    show(_summary(folder, prompts, examples))
    return folder


def _summary(folder: Path, prompts: dict[str, list[Prompt]], examples: ExampleSet) -> str:
    counts = ", ".join(f"{len(prompts[split])} {split}" for split in SPLITS)
    if examples.splits["train"][0].reference is None:
        return f"wrote {folder}: {counts}; the reward {examples.reward} uses no reference answers"
    return f"wrote {folder}: {counts}; every reference answer scores 1.0 under the reward {examples.reward}"


def _dataset_module(
    target: str,
    source: Path | None,
    synthetic: bool,
    first_source: bool,
    difficulties: Sequence[int],
    chosen: RewardChoice,
    limit: int | None,
    seed: int,
) -> ExampleSet:
    from skylite.data.dataset_module import load_dataset, module_examples

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
        limit=limit,
        seed=seed,
    )
    return replace(examples, parameters=chosen.parameters)


def _reasoning_gym_task(task: str, limit: int | None, seed: int) -> ExampleSet:
    from skylite.data.reasoning_gym import reasoning_gym_examples

    remember("reasoning-gym")
    return reasoning_gym_examples(task, limit=limit, seed=seed, show_progress=_show_progress)


def _user_file(
    path: Path,
    question: str | None,
    answer: str | None,
    chosen: RewardChoice,
    limit: int | None,
    seed: int,
) -> ExampleSet:
    from skylite.data.user_file import user_file_examples

    reward = chosen.spec
    if answer is not None and not chosen.has_answers:
        raise ConfigError(
            f"--answer {answer} names the column of the reference answers, and --no-answer says that there "
            "are none.",
            "Remove one of them.",
        )
    if question is None or reward is None or (answer is None and chosen.has_answers):
        flags = {"--question": question, "--answer": answer, "--reward": reward}
        missing = [n for n, v in flags.items() if v is None and (n != "--answer" or chosen.has_answers)]
        raise ConfigError(
            f"{path} needs {' and '.join(missing)}.",
            "Example: --question question --answer answer --reward gsm8k. For data without reference answers "
            "give --no-answer instead of --answer.",
        )
    if reward == "reasoning-gym":
        raise ConfigError(
            "The reward reasoning-gym only scores the entries of reasoning-gym.",
            "Use gsm8k, math or FILE.py:function.",
        )
    if reward in NEEDS_ANSWER and not chosen.has_answers:
        raise ConfigError(
            f"The reward {reward} compares with a reference answer, and --no-answer says that there is none.",
            "Give --answer COLUMN, or use regex, format, length or FILE.py:function.",
        )
    load_reward(reward, chosen.parameters, sha256=remember(reward).get(reward))
    return user_file_examples(
        path,
        question=question,
        answer=answer,
        reward=resolve_spec(reward),
        parameters=chosen.parameters,
        limit=limit,
        seed=seed,
    )


def _check(examples: ExampleSet) -> dict[str, list[Prompt]]:
    """Split -> prompts. Raises DataError for a row whose reference answer does not score 1.0."""
    spec = examples.reward
    first = examples.splits["train"][0]
    parameters = without_extraction(spec, examples.parameters)
    reward = load_reward(spec, parameters, first.prompt if first.reference is None else None)
    prompts: dict[str, list[Prompt]] = {split: [] for split in SPLITS}
    chunks = [
        (split, rows[start : start + CHECK_CHUNK])
        for split, rows in examples.splits.items()
        for start in range(0, len(rows), CHECK_CHUNK)
    ]
    for split, chunk in _show_progress(chunks, "checking every row"):
        prompts[split] += check_examples(chunk, spec, reward)
    return prompts


def _footers(
    examples: ExampleSet, *, limit: int | None, seed: int, made_by: str
) -> dict[str, PromptFileInfo]:
    return {
        split: PromptFileInfo(
            dataset=examples.dataset,
            source_kind=table.kind,
            source=table.source,
            source_sha256=table.sha256,
            count=len(table.rows),
            seed=seed,
            split=split,
            reward=examples.reward,
            system=examples.system,
            few_shot=examples.few_shot,
            limit=limit if split == "train" else None,
            made_by=made_by,
            notes="; ".join(examples.notes),
            has_answers=examples.has_answers,
            reward_settings=examples.parameters.model_dump(exclude_unset=True),
        )
        for split in SPLITS
        for table in [examples.tables[split]]
    }


def _replace_folder(folder: Path, prompts: dict[str, list[Prompt]], infos: dict[str, PromptFileInfo]) -> None:
    """Replace the three files of `folder` atomically. Raises DataError, and leaves the folder as it was."""
    files = {f"{split}.parquet" for split in SPLITS}
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file, not a folder.", "Choose another --out.")
    foreign = sorted(p.name for p in folder.iterdir() if p.name not in files) if folder.is_dir() else []
    if foreign:
        raise DataError(
            f"{folder} contains other files ({', '.join(foreign[:3])}), which prepare would delete.",
            "Choose another --out.",
        )
    try:
        _write_and_swap(folder, prompts, infos)
    except (OSError, WriteFailed) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else error.what.rstrip(".")
        raise DataError(
            f"{folder} cannot be written: {reason}.", "Choose another --out or free space."
        ) from None


def _write_and_swap(folder: Path, prompts: dict[str, list[Prompt]], infos: dict[str, PromptFileInfo]) -> None:
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = temporary_sibling(folder)
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        for split in SPLITS:
            write_prompts(fresh / f"{split}.parquet", prompts[split], infos[split])
        fsync_path(fresh)
        if folder.exists():
            swap_paths(fresh, folder)
        else:
            os.rename(fresh, folder)
        fsync_path(folder.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _refuse_flags(flags: dict[str, object], what: str) -> None:
    given = [name for name, value in flags.items() if value not in (None, False, ()) and value != []]
    if given:
        raise ConfigError(
            f"{' and '.join(given)} cannot be used with {what}.",
            "Remove it." if len(given) == 1 else "Remove them.",
        )


def _command_line(target: str, flags: dict[str, object]) -> str:
    words = [f"skylite prepare {target}"]
    for name, value in flags.items():
        if value is True:
            words.append(name)
        elif name == "--set" and isinstance(value, tuple):
            words += [f"--set {shlex.quote(setting)}" for setting in value]
        elif isinstance(value, tuple | list) and value:
            words.append(f"{name} {','.join(map(str, value))}")
        elif value is not None and not isinstance(value, bool | tuple | list):
            words.append(f"{name} {value}")
    return " ".join(words)


def _show_progress(items: Sequence[_T], description: str) -> Iterable[_T]:
    """The items, with a progress bar if stderr is a terminal."""
    if not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, description, console=Console(stderr=True), transient=True)
