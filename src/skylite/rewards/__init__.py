"""Reward functions: built in, or the user's as FILE.py:function.

All are called by the same rule (reward_arguments.py). A reference answer must score 1.0; `skylite prepare`
checks that for every row of data with reference answers.
"""

from __future__ import annotations

from skylite.config.rollout import RewardParameters
from skylite.errors import ConfigError, RunFailed
from skylite.rewards.built_in import BUILT_IN, DEFAULTS, built_in_function, reference_completion
from skylite.rewards.call_rewards import RewardFunction, finite_scores, reward_function
from skylite.rewards.reward_arguments import SignatureProblem
from skylite.types import Prompt
from skylite.user_functions import REWARD, UserCodeFailed, is_program, load_function, user_code


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
        reward_function(built_in_function(spec, parameters))
        if spec in BUILT_IN
        else _users_function(spec, sha256)
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
