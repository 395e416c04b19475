"""The flags of `skylite prepare` for a user's own data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from skylite.config.rollout import RewardParameters
from skylite.data.examples import ExampleSet
from skylite.data.user_columns import ColumnFlags, missing_flags
from skylite.data.user_tables import OwnSource, read_own_tables
from skylite.errors import ConfigError
from skylite.rewards import load_reward
from skylite.rewards.built_in import NEEDS_ANSWER
from skylite.run.trusted_programs import remember
from skylite.user_functions import resolve_spec

EXAMPLES = {"--question": "--question question", "--answer": "--answer answer", "--reward": "--reward gsm8k"}
"""Flag -> how it is typed."""


@dataclass(frozen=True, slots=True)
class RewardChoice:
    """What the flags say about the reward."""

    spec: str | None
    """--reward"""
    parameters: RewardParameters
    """--set reward.NAME=VALUE"""
    has_answers: bool
    """False: --no-answer"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFlags:
    """The flags of `skylite prepare` for a user's own data; None if not given."""

    config: str | None = None
    split: str | None = None
    validation_split: str | None = None
    test_split: str | None = None
    question: str | None = None
    answer: str | None = None
    id: str | None = None
    reward: str | None = None
    system: str | None = None
    few_shot: str | None = None

    def given(self) -> dict[str, str]:
        """The flags that were given."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def by_name(self) -> dict[str, object]:
        """Flag, as typed -> value."""
        return {f"--{name.replace('_', '-')}": value for name, value in asdict(self).items()}


def own_data_examples(
    target: str,
    flags: OwnFlags,
    chosen: RewardChoice,
    where: Sequence[str],
    limit: int | None,
    seed: int,
) -> ExampleSet:
    """Read the data and make prompts. Raises DataError and ConfigError."""
    from skylite.data.user_examples import OwnData, user_file_examples

    source = OwnSource(
        target=target,
        config=flags.config,
        train=flags.split,
        validation=flags.validation_split,
        test=flags.test_split,
    )
    columns = ColumnFlags(
        target=target,
        question=flags.question,
        answer=flags.answer,
        has_answers=chosen.has_answers,
        id=flags.id,
    )
    reward = _checked_reward(source, columns, chosen)
    data = OwnData(
        source=source,
        columns=columns,
        reward=resolve_spec(reward),
        parameters=chosen.parameters,
        system=flags.system,
        few_shot=flags.few_shot,
        where=where,
        limit=limit,
        seed=seed,
    )
    return user_file_examples(data)


def _checked_reward(source: OwnSource, columns: ColumnFlags, chosen: RewardChoice) -> str:
    """--reward. Raises ConfigError if it is missing, cannot be loaded or does not fit the other flags."""
    if columns.answer is not None and not chosen.has_answers:
        raise ConfigError(
            f"--answer {columns.answer} names the column of the reference answers, and --no-answer says that "
            "there are none.",
            "Remove one of them.",
        )
    if chosen.spec is None:
        raise _needs_reward(source, columns)
    if chosen.spec == "reasoning-gym":
        raise ConfigError(
            "The reward reasoning-gym only scores the entries of reasoning-gym.",
            "Use gsm8k, math or FILE.py:function.",
        )
    if chosen.spec in NEEDS_ANSWER and not chosen.has_answers:
        raise ConfigError(
            f"The reward {chosen.spec} compares with a reference answer, and --no-answer says that there is "
            "none.",
            "Give --answer COLUMN, or use regex, format, length or FILE.py:function.",
        )
    load_reward(chosen.spec, chosen.parameters, sha256=remember(chosen.spec).get(chosen.spec))
    return chosen.spec


def _needs_reward(source: OwnSource, columns: ColumnFlags) -> ConfigError:
    """The error without --reward, which names the other missing flags too.

    Data on the hub is not downloaded for that. Raises DataError if the data cannot be read.
    """
    is_here = source.is_file or Path(source.target).is_dir()
    first = read_own_tables(source).splits["train"].rows[0] if is_here else None
    missing = [*(missing_flags(columns, first) if first is not None else []), "--reward"]
    example = " ".join(EXAMPLES[name] for name in missing)
    no_answer = " For data without reference answers give --no-answer instead of --answer."
    return ConfigError(
        f"{source.target} needs {' and '.join(missing)}.",
        f"Example: {example}.{no_answer if '--answer' in missing else ''}",
    )
