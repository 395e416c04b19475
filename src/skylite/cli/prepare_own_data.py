"""Prepare a user's own data: its columns, its reward, and the form in which the reward likes an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from skylite.cli.prepare_flags import PrepareFlags
from skylite.config.rollout import RewardParameters
from skylite.data.examples import ExampleSet
from skylite.data.user_examples import ColumnFlags, OwnData, missing_flags, user_file_examples
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


def own_data_examples(flags: PrepareFlags, parameters: RewardParameters) -> ExampleSet:
    """Read the data and make prompts. Raises DataError and ConfigError."""
    has_answers = not flags.no_answer
    source = OwnSource(
        target=flags.target,
        config=flags.config,
        train=flags.split,
        validation=flags.validation_split,
        test=flags.test_split,
    )
    data = OwnData(
        source=source,
        columns=ColumnFlags(
            target=flags.target,
            question=flags.question,
            answer=flags.answer,
            has_answers=has_answers,
        ),
        reward="",
        kind=flags.kind,
        system=flags.system,
        few_shot=flags.few_shot or 0,
        where=flags.where or (),
        drop_failing=flags.drop_failing,
        limit=flags.limit,
        seed=flags.seed,
    )
    if flags.kind != "prompts":
        return user_file_examples(data)
    spec, reward = _checked_reward(data, flags, parameters)
    _check_form_flags(flags)
    own = spec not in BUILT_IN and has_answers
    return user_file_examples(
        replace(
            data,
            reward=resolve_spec(spec),
            parameters=parameters,
            find_form=FormFinder(resolve_spec(spec), reward, flags) if own else None,
            empty_answers=() if has_answers else sorted(reward.signature.required & set(ANSWER_NAMES)),
        )
    )


def _checked_reward(
    data: OwnData, flags: PrepareFlags, parameters: RewardParameters
) -> tuple[str, RewardFunction]:
    """--reward and its function. Raises ConfigError if it is missing, broken or does not fit other flags."""
    if flags.answer is not None and flags.no_answer:
        raise ConfigError(
            f"--answer {flags.answer} names the column of the reference answers, and --no-answer says that "
            "there are none.",
            "Remove one of them.",
        )
    if flags.reward is None:
        raise _needs_reward(data.source, data.columns)
    if flags.reward == "reasoning-gym":
        raise ConfigError(
            "The reward reasoning-gym only scores the entries of reasoning-gym.",
            "Use gsm8k, math or FILE.py:function.",
        )
    if needs_answer(flags.reward) and flags.no_answer:
        raise ConfigError(
            f"The reward {flags.reward} compares with a reference answer, and --no-answer says that there is "
            "none.",
            "Give --answer COLUMN, or use regex, format, length or FILE.py:function.",
        )
    sha256 = remember(flags.reward).get(flags.reward)
    return flags.reward, load_reward(flags.reward, parameters, sha256=sha256)


def _check_form_flags(flags: PrepareFlags) -> None:
    """Raise ConfigError if --answer-template or --best-reward does not fit the other flags."""
    if flags.no_answer or flags.reward in BUILT_IN:
        other = "--no-answer" if flags.no_answer else f"the built-in reward {flags.reward}"
        typed = flags.typed(["answer_template", "best_reward"])
        if typed:
            raise ConfigError(
                f"{' and '.join(typed)} describes how your own reward scores a right answer, and cannot be "
                f"used with {other}.",
                "Remove it." if len(typed) == 1 else "Remove them.",
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
    flags: PrepareFlags

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
