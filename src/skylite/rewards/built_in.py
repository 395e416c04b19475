"""The built-in rewards: their names, their functions, and a perfect completion for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skylite.config.rollout import RewardParameters

BUILT_IN = ("gsm8k", "math", "exact_match", "format", "regex", "length", "countdown", "reasoning-gym")
NEEDS_ANSWER = ("gsm8k", "math", "exact_match", "countdown", "reasoning-gym")
DEFAULTS = RewardParameters()


def built_in_function(spec: str, parameters: RewardParameters) -> Callable[..., Any]:
    """The function of a name in BUILT_IN. Its libraries are imported only when it is named."""
    if spec == "gsm8k":
        from skylite.rewards.gsm8k import gsm8k

        return gsm8k
    if spec == "math":
        from skylite.rewards.math import math

        return math
    if spec == "countdown":
        from skylite.rewards.countdown import countdown

        return countdown
    if spec == "reasoning-gym":
        from skylite.rewards.reasoning_gym import check_reasoning_gym, reasoning_gym

        check_reasoning_gym()
        return reasoning_gym
    from skylite.rewards.text_rewards import ExactMatch, format_reward, length_reward, regex_reward

    if spec == "exact_match":
        return ExactMatch(parameters.answer_pattern, parameters.compare, parameters.ignore_case)
    if spec == "format":
        return format_reward(parameters.answer_pattern)
    if spec == "regex":
        return regex_reward(parameters.pattern)
    if spec == "length":
        return length_reward(parameters.min_length, parameters.max_length)
    raise NotImplementedError(f"{spec} is in BUILT_IN, but no function is returned for it here")


def reference_completion(spec: str, answer: str, parameters: RewardParameters = DEFAULTS) -> str | None:
    """A perfect completion: the answer in the form that the reward expects, or as it is.

    None for rewards that look at something else than the answer. `exact_match` needs no pattern for it
    (`without_extraction`).
    """
    if spec in ("regex", "length") or (spec == "format" and parameters.answer_pattern is not None):
        return None
    if spec in ("gsm8k", "format"):
        return answer if "####" in answer else f"#### {answer}"
    if spec == "math":
        return f"\\boxed{{{answer}}}"
    if spec == "exact_match":
        return reference_answer(spec, answer, parameters)
    return f"<answer>{answer}</answer>" if spec in ("countdown", "reasoning-gym") else answer


def reference_answer(spec: str, text: str, parameters: RewardParameters = DEFAULTS) -> str:
    """The answer in a worked solution that ends as the reward expects completions to end; else the text."""
    if spec in ("gsm8k", "format"):
        return text.rpartition("####")[2].strip()
    if spec == "exact_match" and parameters.answer_pattern is not None:
        from skylite.rewards.text_rewards import find_answer

        return (find_answer(parameters.answer_pattern, text) or text).strip()
    return text


def without_extraction(spec: str, parameters: RewardParameters) -> RewardParameters:
    """The settings for scoring a `reference_completion`: for exact_match it is the bare answer."""
    return parameters.model_copy(update={"answer_pattern": None}) if spec == "exact_match" else parameters
