"""Reward functions: (prompt, completion text) -> float.

A reference answer must score 1.0; `skylite prepare` checks that for every row.
"""

from __future__ import annotations

from collections.abc import Callable

from skylite.errors import ConfigError, RunFailed, non_finite_reward
from skylite.plugin_file import REWARD, UserCodeFailed, is_program, load_function, user_code
from skylite.types import Prompt, is_number

RewardFn = Callable[[Prompt, str], float]
"""(prompt, completion) -> a finite number. A completion that cannot be parsed scores 0.0.

An exception ends the run. NaN or infinity makes the step an anomaly (trainer/anomaly.py).
"""

BUILT_IN = ("gsm8k", "math", "format", "reasoning-gym")


def load_reward(spec: str, example: Prompt | None = None, sha256: str | None = None) -> RewardFn:
    """The function behind a spec: one of BUILT_IN or FILE.py:function.

    With `example`, calls it once on the example's answer, to find a broken reward before the run starts.
    `sha256`: of the content that the file must have; None: any. Raises ConfigError.
    """
    if spec not in BUILT_IN and not is_program(spec):
        raise ConfigError(
            f"There is no reward {spec!r}.", f"Use one of {', '.join(BUILT_IN)}, or FILE.py:function."
        )
    reward: RewardFn = _built_in(spec) if spec in BUILT_IN else load_function(spec, REWARD, sha256)
    if example is not None:
        try:
            finite_score(spec, reward, example, reference_completion(spec, example.answer))
        except RunFailed as error:
            raise ConfigError(f"The reward {spec} does not work: {error.what}", error.hint) from error
        finally:
            _close_sandboxes(spec)  # the workers of the run have their own
    return reward


def finite_score(name: str, reward: RewardFn, prompt: Prompt, completion: str) -> float:
    """Like `score`, but raises RunFailed for NaN and infinity, too."""
    value = score(name, reward, prompt, completion)
    if not is_number(value):
        raise non_finite_reward(name, repr(value), prompt.id, completion)
    return value


def score(name: str, reward: RewardFn, prompt: Prompt, completion: str) -> float:
    """The reward of one completion. It may be NaN or infinite: trainer/anomaly.py handles such a step.

    Raises RunFailed with the prompt's id if the function raises, SystemExit too, or does not return a number.
    """
    try:
        with user_code():
            value = reward(prompt, completion)
            number = _as_float(value)
            shown = repr(value)[:200] if number is None else ""
    except UserCodeFailed as error:
        raise RunFailed(
            f"The reward function {name} raised {error} "
            f"(prompt {prompt.id}, completion {completion[:80]!r}).",
            "A reward must return a number for every completion; correct it.",
        ) from error.__cause__
    if number is None:
        raise non_finite_reward(name, shown, prompt.id, completion)
    return number


def _as_float(value: object) -> float | None:
    """The number that a reward returned; None if it is no number."""
    if not isinstance(value, bool | int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # an int too large for a float
        return float("inf") if value > 0 else float("-inf")


def reference_completion(spec: str, answer: str) -> str:
    """A perfect completion: the answer in the form that the reward expects, or as it is."""
    if spec in ("gsm8k", "format"):
        return answer if "####" in answer else f"#### {answer}"
    if spec == "math":
        return f"\\boxed{{{answer}}}"
    return f"<answer>{answer}</answer>" if spec == "reasoning-gym" else answer


def _close_sandboxes(spec: str) -> None:
    if spec == "reasoning-gym":
        from skylite.rewards.reasoning_gym import close_sandboxes

        close_sandboxes()


def _built_in(spec: str) -> RewardFn:
    if spec == "math":
        from skylite.rewards.math import math_reward

        return math_reward
    if spec == "reasoning-gym":
        from skylite.rewards.reasoning_gym import check_reasoning_gym, reasoning_gym_reward

        check_reasoning_gym()
        return reasoning_gym_reward
    from skylite.rewards.gsm8k import format_reward, gsm8k_reward

    return gsm8k_reward if spec == "gsm8k" else format_reward
