"""The flags of `skylite prepare` for a user's own data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from skylite.config.rollout import RewardParameters
from skylite.data.examples import ExampleSet
from skylite.data.prompts import Kind
from skylite.data.user_examples import ColumnFlags, missing_flags
from skylite.data.user_tables import OwnSource, read_own_tables
from skylite.errors import ConfigError, RunFailed
from skylite.notes import Note, warning
from skylite.rewards import load_reward
from skylite.rewards.built_in import BUILT_IN, needs_answer
from skylite.rewards.call_rewards import ANSWER_NAMES, Item, RewardFunction, finite_scores
from skylite.rewards.right_completion import ANSWER, USUAL_FORMS, RightForm, fill, find_form, probe_rows
from skylite.rollout.trusted_programs import remember
from skylite.types import Prompt
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
    answer_template: str | None = None
    best_reward: float | None = None

    def given(self) -> dict[str, str | float]:
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
    drop_failing: bool,
    limit: int | None,
    seed: int,
    kind: Kind = "prompts",
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
    if kind != "prompts":
        data = OwnData(
            source=source, columns=columns, reward="", kind=kind, system=flags.system, where=where,
            drop_failing=drop_failing, limit=limit, seed=seed,
        )  # fmt: skip
        return user_file_examples(data)
    spec, reward = _checked_reward(source, columns, chosen)
    _check_form_flags(flags, chosen)
    own = spec not in BUILT_IN and chosen.has_answers
    data = OwnData(
        source=source,
        columns=columns,
        reward=resolve_spec(spec),
        parameters=chosen.parameters,
        find_form=FormFinder(resolve_spec(spec), reward, flags) if own else None,
        empty_answers=() if chosen.has_answers else sorted(reward.signature.required & set(ANSWER_NAMES)),
        system=flags.system,
        few_shot=flags.few_shot,
        where=where,
        drop_failing=drop_failing,
        limit=limit,
        seed=seed,
    )
    return user_file_examples(data)


def _checked_reward(
    source: OwnSource, columns: ColumnFlags, chosen: RewardChoice
) -> tuple[str, RewardFunction]:
    """--reward and its function. Raises ConfigError if it is missing, broken or does not fit other flags."""
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
    if needs_answer(chosen.spec) and not chosen.has_answers:
        raise ConfigError(
            f"The reward {chosen.spec} compares with a reference answer, and --no-answer says that there is "
            "none.",
            "Give --answer COLUMN, or use regex, format, length or FILE.py:function.",
        )
    function = load_reward(chosen.spec, chosen.parameters, sha256=remember(chosen.spec).get(chosen.spec))
    return chosen.spec, function


def _check_form_flags(flags: OwnFlags, chosen: RewardChoice) -> None:
    """Raise ConfigError if --answer-template or --best-reward does not fit the other flags."""
    given = [name for name in ("--answer-template", "--best-reward") if flags.by_name()[name] is not None]
    if given and (chosen.spec in BUILT_IN or not chosen.has_answers):
        other = f"the built-in reward {chosen.spec}" if chosen.has_answers else "--no-answer"
        raise ConfigError(
            f"{' and '.join(given)} describes how your own reward scores a right answer, and cannot be used "
            f"with {other}.",
            "Remove it." if len(given) == 1 else "Remove them.",
        )
    if flags.answer_template is not None and ANSWER not in flags.answer_template:
        raise ConfigError(
            f"--answer-template {flags.answer_template!r} has no {ANSWER}.",
            f"Write {ANSWER} where the answer stands, e.g. '<final>{ANSWER}</final>'.",
        )


@dataclass(frozen=True, slots=True)
class FormFinder:
    """Finds the form in which the user's own reward likes a right answer."""

    spec: str
    reward: RewardFunction
    flags: OwnFlags

    def __call__(self, prompts: Sequence[Prompt]) -> tuple[RightForm, list[Note | str]]:
        """The form and notes for the user. Raises ConfigError if the reward gives no form anything."""
        rows = probe_rows(prompts)
        given, best = self.flags.answer_template, self.flags.best_reward
        form = find_form(self._score, rows, USUAL_FORMS if given is None else [given], best)
        first = f"the first is {form.scores[0]:g} for {fill(form.template, rows[0].answer)[-80:]!r}"
        if best is not None and not any(map(form.accepts, form.scores)):
            raise ConfigError(
                f"No right completion reaches --best-reward {best:g} under the reward {self.spec}; {first}.",
                "Give a lower --best-reward, or the form that the reward wants: --answer-template TEXT.",
            )
        if not form.fits and self.reward.signature.asks_for_answer:
            raise _no_form(self.spec, rows[0].answer, given)
        if not form.beats_wrong:
            return form, [
                warning(
                    f"the reward {self.spec} gives a right answer ({first}) no more than a wrong one. If it "
                    "compares with the answer, give the form that it wants: --answer-template TEXT"
                )
            ]
        shown = fill(form.template, rows[0].answer)[-120:]
        is_plain = form.template == ANSWER and form.best == 1.0
        return form, (
            []
            if is_plain
            else [
                f"a right completion scores {form.wanted()}, e.g. {shown!r}; a wrong one up to {form.floor:g}"
            ]
        )

    def _score(self, items: Sequence[Item]) -> Sequence[float]:
        try:
            return finite_scores(self.spec, self.reward, items)
        except RunFailed as error:
            raise ConfigError(f"The reward {self.spec} does not work: {error.what}", error.hint) from error


def _no_form(spec: str, answer: str, template: str | None) -> ConfigError:
    if template is not None:
        return ConfigError(
            f"The reward {spec} gives the right completion {fill(template, answer)[-80:]!r} "
            "(--answer-template) no more than a wrong one, and not more than 0.",
            "Correct the template or the function.",
        )
    return ConfigError(
        f"The reward {spec} gives a right answer in no usual form more than 0: it got {answer[-80:]!r} "
        "alone, in <answer> tags with and without <think>, in \\boxed{}, after #### and in a sentence.",
        f"Give the form that it wants, e.g. --answer-template '<final>{ANSWER}</final>'. If it does not "
        "compare with the answers, give --no-answer.",
    )


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
