"""Score a few reference answers under the rewards that the settings choose, before anything starts.

`skylite prepare` does this for every row, but only under the reward that it is given.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from skylite.config.rollout import RewardConfig
from skylite.data.prompts import PromptFileInfo
from skylite.errors import ConfigError, RunFailed
from skylite.rewards.built_in import BUILT_IN, NEEDS_ANSWER, reference_completion, without_extraction
from skylite.rewards.components import Component
from skylite.rewards.worker_pool import RewardPool
from skylite.types import Prompt

REFERENCES = 8
"""Answers to score, at equal distances in the data."""
FORMS = (
    "{}",
    "#### {}",
    "\\boxed{{{}}}",
    "<answer>{}</answer>",
    "<think>\n1 + 1 = 2\n</think>\n<answer>{}</answer>",
    "Answer: {}",
    "The answer is {}",
)
"""Completions to try with a user's function, whose form nobody knows."""


def check_references(
    config: RewardConfig,
    info: PromptFileInfo,
    train: Sequence[Prompt],
    components: Sequence[Component],
    programs: Mapping[str, str],
) -> list[str]:
    """Warnings on rewards under which no reference answer scores above 0.

    Raises ConfigError where that is certainly wrong: for a built-in reward that compares with the answer, and
    for the user's first function, which decides what is right, if it asks for the answer by name.
    """
    answered = [prompt for prompt in train if prompt.answer]
    references = answered[:: max(1, len(answered) // REFERENCES)][:REFERENCES]
    if not references or not config.functions:  # `prepare` has checked the data's own reward
        return []
    warnings = []
    for spec, component in zip(config.functions, components, strict=True):
        if not _gets_answer(spec, component) or _any_scores(spec, references, config, programs):
            continue
        what = f"of {len(references)} reference answers scores above 0 under the reward {spec}"
        if _must_score(spec, component, is_first=component is components[0], prepared_for=info.reward):
            raise _scores_nothing(f"None {what}", spec, info, references[0])
        warnings.append(
            f"warning: none {what}; that is right for a penalty, or if it does not look at the answer"
        )
    return warnings


def _gets_answer(spec: str, component: Component) -> bool:
    if spec in BUILT_IN:
        return spec in NEEDS_ANSWER
    return component.function.signature.takes_rest or _asks_for_answer(component)


def _must_score(spec: str, component: Component, *, is_first: bool, prepared_for: str) -> bool:
    """A later function may be a penalty. One with **columns may ignore the answer, as many of TRL's do.

    A function that the data was prepared for may want a form of its own, which `prepare` took from the data.
    """
    return spec in BUILT_IN or (is_first and _asks_for_answer(component) and spec != prepared_for)


def _asks_for_answer(component: Component) -> bool:
    return bool(component.function.signature.named & {"answer", "ground_truth"})


def _any_scores(
    spec: str, references: Sequence[Prompt], config: RewardConfig, programs: Mapping[str, str]
) -> bool:
    """Whether a reference scores above 0 in any form. Scores in a worker process, as a run does."""
    parameters = without_extraction(spec, config)
    pool = RewardPool(
        [spec],
        timeout_s=config.timeout_s,
        programs=programs,
        log_path=Path(os.devnull),  # a run writes nothing before it starts
        parameters=parameters,
    )
    try:
        for completions in zip(*(_completions(spec, prompt.answer) for prompt in references), strict=True):
            scores = asyncio.run(pool.score(list(zip(references, completions, strict=True))))
            if any(score.reward > 0 for score in scores):
                return True
    except RunFailed as error:
        raise ConfigError(f"The reward {spec} does not work: {error.what}", error.hint) from error
    finally:
        pool.close()
    return False


def _completions(spec: str, answer: str) -> list[str]:
    """Completions that give the answer, the likeliest form first."""
    if spec in BUILT_IN:
        return [reference_completion(spec, answer) or answer]
    return [form.format(answer) for form in FORMS]


def _scores_nothing(what: str, spec: str, info: PromptFileInfo, first: Prompt) -> ConfigError:
    hint = (
        f"Choose a reward that fits the answers; the data was prepared for {info.reward}."
        if spec in BUILT_IN
        else "Correct the function; it got each answer alone and in usual forms, such as <answer>. If it "
        "does not compare with the answer, let it not ask for it."
    )
    return ConfigError(f"{what}; the first is {first.answer[-80:]!r} of prompt {first.id}.", hint)
