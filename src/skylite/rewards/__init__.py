"""Reward functions: built in, or the user's as FILE.py:function.

All are called by the same rule (signature.py). A reference answer must score 1.0; `skylite prepare` checks
that for every row of data with reference answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skylite.config.rollout import RewardParameters
from skylite.errors import ConfigError, RunFailed
from skylite.plugin_file import REWARD, UserCodeFailed, is_program, load_function, user_code
from skylite.rewards.call_rewards import RewardFunction, finite_scores, reward_function
from skylite.rewards.signature import SignatureProblem
from skylite.types import Prompt

BUILT_IN = ("gsm8k", "math", "exact_match", "format", "regex", "length", "countdown", "reasoning-gym")
NEEDS_ANSWER = ("gsm8k", "math", "exact_match", "countdown", "reasoning-gym")
DEFAULTS = RewardParameters()


def load_reward(
    spec: str,
    parameters: RewardParameters = DEFAULTS,
    example: Prompt | None = None,
    sha256: str | None = None,
) -> RewardFunction:
    """The function behind a spec: one of BUILT_IN or FILE.py:function.

    With `example`, calls it once, on the example's answer or on an empty completion, to find a broken reward
    before the run starts. `sha256`: of the content that the file must have; None: any. Raises ConfigError.
    """
    if spec not in BUILT_IN and not is_program(spec):
        raise ConfigError(
            f"There is no reward {spec!r}.", f"Use one of {', '.join(BUILT_IN)}, or FILE.py:function."
        )
    reward = (
        reward_function(_built_in(spec, parameters)) if spec in BUILT_IN else _users_function(spec, sha256)
    )
    if example is not None:
        try:
            completion = reference_completion(spec, example.answer) if example.answer else None
            finite_scores(spec, reward, [(example, completion or "")])
        except RunFailed as error:
            raise ConfigError(f"The reward {spec} does not work: {error.what}", error.hint) from error
        finally:
            _close_sandboxes(spec)  # the workers of the run have their own
    return reward


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
        from skylite.rewards.patterns import find_answer

        return (find_answer(parameters.answer_pattern, text) or text).strip()
    return text


def without_extraction(spec: str, parameters: RewardParameters) -> RewardParameters:
    """The settings for scoring a `reference_completion`: for exact_match it is the bare answer."""
    return parameters.model_copy(update={"answer_pattern": None}) if spec == "exact_match" else parameters


def _users_function(spec: str, sha256: str | None) -> RewardFunction:
    function = load_function(spec, REWARD, sha256)
    file, _, name = spec.rpartition(":")
    try:
        with user_code(keep=SignatureProblem):
            return reward_function(function)
    except (SignatureProblem, UserCodeFailed) as error:
        raise ConfigError(
            f"{name} in {file} cannot be called as a reward: {error}.",
            f"Define it: def {name}(completion, *, prompt, answer, **columns) -> float, "
            f"or for a batch: def {name}(completions, **columns) -> list[float].",
        ) from error


def _close_sandboxes(spec: str) -> None:
    if spec == "reasoning-gym":
        from skylite.rewards.reasoning_gym import close_sandboxes

        close_sandboxes()


def _built_in(spec: str, parameters: RewardParameters) -> Callable[..., Any]:
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
    from skylite.rewards.patterns import ExactMatch, format_reward, length_reward, regex_reward

    if spec == "exact_match":
        return ExactMatch(parameters.answer_pattern, parameters.compare, parameters.ignore_case)
    if spec == "format":
        return format_reward(parameters.answer_pattern)
    if spec == "regex":
        return regex_reward(parameters.pattern)
    if spec == "length":
        return length_reward(parameters.min_length, parameters.max_length)
    raise NotImplementedError(f"{spec} is in BUILT_IN, but no function is returned for it here")
