"""Reward functions: (prompt, completion text) -> float.

A reference answer must score 1.0; `skylite prepare` checks that for every row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path

from skylite.errors import ConfigError, DataError, RunFailed, non_finite_reward
from skylite.plugin_file import import_file
from skylite.types import Prompt, is_number

RewardFn = Callable[[Prompt, str], float]
"""(prompt, completion) -> a finite number. A completion that cannot be parsed scores 0.0.

An exception ends the run. NaN or infinity makes the step an anomaly (trainer/anomaly.py).
"""

BUILT_IN = ("gsm8k", "math", "format", "reasoning-gym")


def load_reward(spec: str, example: Prompt | None = None) -> RewardFn:
    """The function behind a spec: one of BUILT_IN or FILE.py:function.

    With `example`, calls it once on the example's answer, to find a broken reward before the run starts.
    Raises ConfigError.
    """
    reward = _built_in(spec) if spec in BUILT_IN else _plug_in(spec)
    if example is not None:
        try:
            finite_score(reward, example, reference_completion(spec, example.answer))
        except RunFailed as error:
            raise ConfigError(f"The reward {spec} does not work: {error.what}", error.hint) from error
    return reward


def finite_score(reward: RewardFn, prompt: Prompt, completion: str) -> float:
    """As `score`; raises RunFailed for NaN and infinity too."""
    value = score(reward, prompt, completion)
    if not is_number(value):
        raise non_finite_reward(value, prompt.id, completion)
    return value


def score(reward: RewardFn, prompt: Prompt, completion: str) -> float:
    """The reward of one completion, NaN and infinity included: in training the guards decide what becomes of such a step.

    Raises RunFailed with the prompt's id when the function raises or returns no number at all.
    """
    try:
        value = reward(prompt, completion)
    except Exception as error:
        raise RunFailed(
            f"The reward function raised {type(error).__name__}: {error} (prompt {prompt.id}, completion {completion[:80]!r}).",
            "A reward must return a number for every completion; correct it.",
        ) from error
    if not isinstance(value, bool | int | float):
        raise non_finite_reward(value, prompt.id, completion)
    try:
        return float(value)
    except OverflowError:  # an int beyond every float
        return float("inf") if value > 0 else float("-inf")


def reference_completion(spec: str, answer: str) -> str:
    """A perfect completion: only the answer, in the form that the reward expects. User rewards get it raw."""
    if spec in ("gsm8k", "format"):
        return answer if "####" in answer else f"#### {answer}"
    if spec == "math":
        return f"\\boxed{{{answer}}}"
    return f"<answer>{answer}</answer>" if spec == "reasoning-gym" else answer


def component_name(spec: str) -> str:
    """What metrics call a reward: the built-in's name, or the function's."""
    return spec.rpartition(":")[2]


def resolve_spec(spec: str) -> str:
    """The spec with an absolute file path, so that it means the same from another folder."""
    if spec in BUILT_IN:
        return spec
    file, _, function = spec.rpartition(":")
    return f"{Path(file).resolve()}:{function}"


def _built_in(spec: str) -> RewardFn:
    if spec == "math":
        from skylite.rewards.math import math_reward

        return math_reward
    if spec == "reasoning-gym":
        from skylite.rewards.reasoning_gym import reasoning_gym_reward

        return reasoning_gym_reward
    from skylite.rewards.gsm8k import format_reward, gsm8k_reward

    return gsm8k_reward if spec == "gsm8k" else format_reward


def _plug_in(spec: str) -> RewardFn:
    file, colon, name = spec.rpartition(":")
    if not colon or not file.endswith(".py") or not name:
        raise ConfigError(
            f"There is no reward {spec!r}.", f"Use one of {', '.join(BUILT_IN)}, or FILE.py:function."
        )
    path = Path(file)
    if not path.is_file():
        raise ConfigError(
            f"The reward file {file} does not exist.", "Give FILE.py:function with a path from here."
        )
    try:
        module = import_file(path, "reward file")
    except DataError as error:
        raise ConfigError(error.what, error.hint) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(
            f"{file} has no function {name!r}.", "Define it: def NAME(prompt, completion) -> float."
        )
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name} in {file} cannot be called with (prompt, completion): {error}.",
            "Define it: def NAME(prompt, completion) -> float.",
        ) from None
    return partial(function)
