"""Try the rewards of a run before it starts: on right, wrong and empty completions, and on reference answers.

`skylite prepare` scores the reference answer of every row, but only under the reward that it is given.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from skylite.config.rollout import RewardConfig
from skylite.config.train import TrainConfig
from skylite.data.prompts import PromptFileInfo
from skylite.errors import ConfigError, RunFailed
from skylite.notes import Note, notes_of, warning
from skylite.rewards import Component
from skylite.rewards.built_in import (
    BUILT_IN,
    NO_REWARD,
    needs_answer,
    reference_completion,
    without_extraction,
)
from skylite.rewards.call_rewards import Item
from skylite.rewards.right_completion import ANSWER, USUAL_FORMS, fill, find_form, probe_rows
from skylite.rewards.worker_pool import RewardPool
from skylite.types import Prompt, Score, is_number

PROMPTS = 2
WRONG = ("", "I do not know.", "<think>", "12345")
"""Completions of a model that has learned nothing."""
NO_FEEDBACK = (
    "no reward returned a feedback on a wrong or a right completion, so algorithm.teacher_sees_feedback may "
    'have nothing to show: return it beside the points, as {"points": 0.0, "feedback": "..."}'
)


def without_reward(config: TrainConfig, rewards: Sequence[str]) -> tuple[TrainConfig, str]:
    """The settings of a run whose reward may be `none`: then without held-out scores, and a note on that.

    Raises ConfigError if the run needs a reward.
    """
    if NO_REWARD not in rewards:
        return config, ""
    algorithm, keep = config.algorithm, config.checkpoint.keep_best
    needs = {
        f"is one of {len(rewards)}": len(rewards) > 1,
        f"algorithm.name={algorithm.name} learns from rewards": algorithm.learns_from_rewards,
        "algorithm.teacher_sees_success shows what earned one": algorithm.teacher_sees_success,
        f"checkpoint.keep_best={keep} compares held-out scores": bool(keep),
    }
    if why := next((text for text, is_so in needs.items() if is_so), None):
        raise ConfigError(
            f"The reward {NO_REWARD} gives no points, and {why}.",
            "Name another with --reward. Without one a run can only distil: algorithm.name=opd, opsd or "
            "sdft, with algorithm.reward_weight=0.",
        )
    if not config.eval.limit:
        return config, ""
    update = {"eval": config.eval.model_copy(update={"limit": 0})}
    return config.model_copy(update=update), f"eval.limit=0: the reward {NO_REWARD} scores no held-out rows"


def check_calls(
    rewards: Sequence[str],
    config: TrainConfig,
    train: Sequence[Prompt],
    programs: Mapping[str, str],
    template: str = "",
) -> list[Note]:
    """Raise ConfigError if a user's reward raises or gives no number. Not finite ones may be skipped
    (anomaly.action). `template`: the form of a right completion that `prepare` found. Returns warnings.

    Called in a worker process, as in a run.
    """
    own = [spec for spec in rewards if spec not in BUILT_IN]
    if not own:
        return []
    prompts = train[:PROMPTS]
    items = [
        (prompt, completion)
        for prompt in prompts
        for completion in (*WRONG, fill(template or ANSWER, prompt.answer))
    ]
    scores = _score(own, config.reward, programs, items, config.reward.prefill)
    wants_feedback = config.algorithm.teacher_sees_feedback and not any(score.feedback for score in scores)
    notes = notes_of(warning(NO_FEEDBACK) if wants_feedback else None)
    if config.anomaly.action == "skip":
        return notes
    for (prompt, completion), score in zip(items, scores, strict=True):
        for name, value in score.components.items():
            if not is_number(value):
                raise ConfigError(
                    f"The reward {name} returned {value} for the completion {completion[:80]!r} of prompt "
                    f"{prompt.id}.",
                    "A reward must return a finite number for every completion, also an empty one.",
                )
    return notes


def blind_rewards(
    rewards: Sequence[str],
    config: TrainConfig,
    train: Sequence[Prompt],
    programs: Mapping[str, str],
    template: str,
    tag: str,
    hidden: Collection[str],
) -> list[str]:
    """Names of the rewards that give some right completion more than 0, but none without the hidden tags.

    Args:
        template: the form of a right completion that `prepare` found.
        tag: opens the thoughts in a form.
        hidden: the texts that no completion of the run has.
    """
    close = tag[0] + "/" + tag[1:]
    forms = [f.replace("<think>", tag).replace("</think>", close) for f in (template, *USUAL_FORMS) if f]
    rows = (probe_rows(train) or train)[:PROMPTS]
    right = [(row, fill(form, row.answer)) for row in rows for form in forms]
    seen = [(row, config.reward.prefill + _without(text, hidden)) for row, text in right]
    scores = _score(rewards, config.reward, programs, [*right, *seen])
    whole, cut = scores[: len(right)], scores[len(right) :]
    return [
        name
        for name in whole[0].components
        if any(s.components[name] > 0 for s in whole) and not any(s.components[name] > 0 for s in cut)
    ]


def _without(text: str, hidden: Collection[str]) -> str:
    for tag in hidden:
        text = text.replace(tag, "")
    return text


def _score(
    rewards: Sequence[str],
    config: RewardConfig,
    programs: Mapping[str, str],
    items: Sequence[Item],
    prefill: str = "",
) -> list[Score]:
    """Scores of a worker process, as in a run. Raises ConfigError for a reward that fails."""
    pool = RewardPool(
        rewards,
        timeout_s=config.timeout_s,
        programs=programs,
        log_path=Path(os.devnull),  # a run writes nothing before it starts
        parameters=config,
        prefill=prefill,
    )
    try:
        return asyncio.run(pool.score(items))
    except RunFailed as error:
        raise ConfigError(f"The reward cannot be used: {error.what}", error.hint) from error
    finally:
        pool.close()


def check_references(
    config: RewardConfig,
    info: PromptFileInfo,
    train: Sequence[Prompt],
    components: Sequence[Component],
    programs: Mapping[str, str],
) -> list[Note]:
    """Warnings on rewards under which no reference answer scores above 0, or above a wrong one.

    Raises ConfigError where that is certainly wrong: for a built-in reward that compares with the answer, and
    for the user's first function, which decides what is right, if it asks for the answer by name.
    """
    references = probe_rows(train)
    if not references or not config.functions:  # `prepare` has checked the data's own reward
        return []
    warnings = []
    for spec, component in zip(config.functions, components, strict=True):
        if not _gets_answer(spec, component):
            continue
        scores, beats_wrong = _fits(spec, references, config, info.answer_template, programs)
        if scores and (beats_wrong or not component.function.signature.asks_for_answer):
            continue
        if scores:
            warnings.append(
                warning(
                    f"the reward {spec} asks for the answer, but gives a right one no more than a wrong one "
                    "in any usual form"
                )
            )
            continue
        what = f"of {len(references)} reference answers scores above 0 under the reward {spec}"
        if _must_score(spec, component, is_first=component is components[0], prepared_for=info.reward):
            raise _scores_nothing(f"None {what}", spec, info, references[0])
        warnings.append(
            warning(f"none {what}; that is right for a penalty, or if it does not look at the answer")
        )
    return warnings


def _gets_answer(spec: str, component: Component) -> bool:
    if spec in BUILT_IN:
        return needs_answer(spec)
    return component.function.signature.takes_rest or component.function.signature.asks_for_answer


def _must_score(spec: str, component: Component, *, is_first: bool, prepared_for: str) -> bool:
    """A later function may be a penalty. One with **columns may ignore the answer, as many of TRL's do.

    A function that the data was prepared for may want a form of its own, which `prepare` took from the data.
    """
    asks = component.function.signature.asks_for_answer
    return spec in BUILT_IN or (is_first and asks and spec != prepared_for)


def _fits(
    spec: str,
    references: Sequence[Prompt],
    config: RewardConfig,
    prepared_template: str,
    programs: Mapping[str, str],
) -> tuple[bool, bool]:
    """Whether a right answer scores in some form, and whether it beats a wrong one there.

    Scores in a worker process, as a run does.
    """
    pool = RewardPool(
        [spec],
        timeout_s=config.timeout_s,
        programs=programs,
        log_path=Path(os.devnull),  # a run writes nothing before it starts
        parameters=without_extraction(spec, config),
    )

    def score(items: Sequence[Item]) -> list[float]:
        return [score.reward for score in asyncio.run(pool.score(items))]

    try:
        if spec in BUILT_IN:
            right = [(row, reference_completion(spec, row.answer) or row.answer) for row in references]
            scores = any(value > 0 for value in score(right))
            return scores, scores
        prepared = [prepared_template] if prepared_template else []
        form = find_form(score, references, [*prepared, *USUAL_FORMS])
        return form.fits, form.beats_wrong
    except RunFailed as error:
        raise ConfigError(f"The reward {spec} does not work: {error.what}", error.hint) from error
    finally:
        pool.close()


def _scores_nothing(what: str, spec: str, info: PromptFileInfo, first: Prompt) -> ConfigError:
    hint = (
        f"Choose a reward that fits the answers; the data was prepared for {info.reward}."
        if spec in BUILT_IN
        else "Correct the function; it got each answer alone and in usual forms, such as <answer>. If it "
        "does not compare with the answer, let it not ask for it."
    )
    return ConfigError(f"{what}; the first is {first.answer[-80:]!r} of prompt {first.id}.", hint)
