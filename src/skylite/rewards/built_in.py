"""The built-in rewards: one declaration each in BUILT_IN. Their settings are RewardParameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skylite.config.rollout import RewardParameters
from skylite.rewards.countdown import countdown
from skylite.rewards.gsm8k import final_number, gsm8k
from skylite.rewards.math import closed_box, math
from skylite.rewards.reasoning_gym import reasoning_gym_reward
from skylite.rewards.text_rewards import ExactMatch, find_answer, format_reward, length_reward, regex_reward

DEFAULTS = RewardParameters()
Parameters = RewardParameters
NO_REWARD = "none"
"""The reward of data that is only distilled on: 0 for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltIn:
    """A built-in reward."""

    function: Callable[[Parameters], Callable[..., Any]]
    """The reward function with these settings."""
    right: Callable[[str, Parameters], str | None]
    """Reference answer -> a completion that scores 1.0; None: the reward looks at something else."""
    needs_answer: bool = True
    final_answer: Callable[[str, Parameters], str] = lambda text, _: text
    """The answer in a worked solution that ends as completions should end; else the text."""
    vote: Callable[[str, Parameters], str | None] | None = None
    """What a completion answers, the same text for equal answers. None: `skylite eval` takes no majority."""
    system: str = ""
    """System text of a user's data with this reward."""


def _exact_match(parameters: Parameters) -> ExactMatch:
    return ExactMatch(parameters.answer_pattern, parameters.compare, parameters.ignore_case)


def _found_answer(text: str, parameters: Parameters) -> str:
    if parameters.answer_pattern is None:
        return text
    return (find_answer(parameters.answer_pattern, text) or text).strip()


def _marked(answer: str, parameters: Parameters) -> str:
    return answer if "####" in answer else f"#### {answer}"


def _after_mark(text: str, parameters: Parameters) -> str:
    return text.rpartition("####")[2].strip()


def _gsm8k_vote(completion: str, parameters: Parameters) -> str | None:
    number = final_number(completion)
    return None if number is None else str(number)


def _in_tags(answer: str, parameters: Parameters) -> str:
    return f"<answer>{answer}</answer>"


_MARK = "Solve the problem step by step. End with a line of #### and the answer as a number."
BUILT_IN: dict[str, BuiltIn] = {
    "gsm8k": BuiltIn(
        function=lambda _: gsm8k, right=_marked, final_answer=_after_mark, vote=_gsm8k_vote, system=_MARK
    ),
    "math": BuiltIn(
        function=lambda _: math,
        right=lambda answer, _: f"\\boxed{{{answer}}}",
        vote=lambda completion, _: closed_box(completion),
        system="Solve the problem step by step. Put the final answer in \\boxed{}.",
    ),
    "exact_match": BuiltIn(
        function=_exact_match,
        right=_found_answer,  # scored `without_extraction`, so it needs no pattern
        final_answer=_found_answer,
        vote=lambda completion, parameters: _exact_match(parameters).vote(completion),
    ),
    "format": BuiltIn(
        function=lambda p: format_reward(p.answer_pattern),
        right=lambda answer, p: _marked(answer, p) if p.answer_pattern is None else None,
        needs_answer=False,
        final_answer=_after_mark,
        system=_MARK,
    ),
    "regex": BuiltIn(function=lambda p: regex_reward(p.pattern), right=lambda *_: None, needs_answer=False),
    "length": BuiltIn(
        function=lambda p: length_reward(p.min_length, p.max_length),
        right=lambda *_: None,
        needs_answer=False,
    ),
    "countdown": BuiltIn(function=lambda _: countdown, right=_in_tags),
    NO_REWARD: BuiltIn(function=lambda _: lambda completion: 0.0, right=lambda *_: None, needs_answer=False),
    "reasoning-gym": BuiltIn(function=lambda _: reasoning_gym_reward(), right=_in_tags),
}


def reference_completion(spec: str, answer: str, parameters: Parameters = DEFAULTS) -> str | None:
    """A right completion: the answer in the form that the reward expects; as it is for a user's function."""
    return BUILT_IN[spec].right(answer, parameters) if spec in BUILT_IN else answer


def reference_answer(spec: str, text: str, parameters: Parameters = DEFAULTS) -> str:
    """The answer in a worked solution that ends as the reward expects completions to end; else the text."""
    return BUILT_IN[spec].final_answer(text, parameters) if spec in BUILT_IN else text


def needs_answer(spec: str) -> bool:
    """Whether a built-in reward compares with the reference answer."""
    return spec in BUILT_IN and BUILT_IN[spec].needs_answer


def default_system(spec: str) -> str:
    """System text that goes with a reward; none with a user's function."""
    return BUILT_IN[spec].system if spec in BUILT_IN else ""


def without_extraction(spec: str, parameters: Parameters) -> Parameters:
    """The settings for scoring a `reference_completion`: for exact_match it is the bare answer."""
    return parameters.model_copy(update={"answer_pattern": None}) if spec == "exact_match" else parameters
