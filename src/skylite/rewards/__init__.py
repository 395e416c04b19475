"""Reward functions: built in, or the user's as FILE.py:function.

A run's reward is the weighted sum of one or more functions, its components. All are called by the same rule
(call_rewards.py). A reference answer must score 1.0; `skylite prepare`
checks that for every row of data with reference answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from skylite.config.rollout import RewardParameters, weight_of
from skylite.errors import ConfigError, RunFailed
from skylite.rewards.built_in import BUILT_IN, DEFAULTS, reference_completion
from skylite.rewards.call_rewards import (
    Item,
    Returned,
    RewardFunction,
    SignatureProblem,
    finite_scores,
    named_scores,
    reward_function,
)
from skylite.types import Prompt, Score
from skylite.user_functions import REWARD, UserCodeFailed, is_program, load_function, user_code

OTHER_METRICS = ("mean", "std", "right_frac", "partial_frac", "tokens_corr", "penalty_mean", "sampled_mean")
"""`reward/...` metrics of the total. A component, whose metric is `reward/NAME`, has none of these names."""


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
        reward_function(BUILT_IN[spec].function(parameters))
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


@dataclass(frozen=True, slots=True)
class Component:
    """One reward function of the sum."""

    name: str
    function: RewardFunction
    weight: float
    by_name: Mapping[str, float]
    """Weights of the named numbers that it returns, see `weight_of`."""


def load_components(
    specs: Sequence[str],
    weights: Sequence[float] | Mapping[str, float] = (),
    example: Prompt | None = None,
    programs: Mapping[str, str] | None = None,
    parameters: RewardParameters = DEFAULTS,
) -> tuple[Component, ...]:
    """The functions behind the specs, in their order. Raises ConfigError.

    `weights`: of the functions, or of components by name; empty means 1 for each. `example`, `parameters`: as
    for `load_reward`. `programs`: spec -> sha256 that the file must have; a spec that is not in it may have
    any content.
    """
    by_name, of_functions = (weights, ()) if isinstance(weights, Mapping) else ({}, weights)
    ones = [1.0] * len(specs)
    rows = zip(component_names(specs), specs, of_functions or ones, strict=True)
    hashes = programs or {}
    return tuple(
        Component(name, load_reward(spec, parameters, example, hashes.get(spec)), weight, by_name)
        for name, spec, weight in rows
    )


def score_components(components: Sequence[Component], items: Sequence[Item]) -> list[Score]:
    """For each item the weighted sum, each function's unweighted scores by name, and their feedback. NaN if a
    score is.

    Raises RunFailed, which names function and prompt, if a function raises or does not return numbers, or if
    two return one name.
    """
    columns = [named_scores(c.name, c.function, items) for c in components]
    return [_sum(item, components, row) for item, *row in zip(items, *columns, strict=True)]


def _sum(item: Item, components: Sequence[Component], row: Sequence[Returned]) -> Score:
    reward, named = 0.0, dict[str, float]()
    for component, (values, _) in zip(components, row, strict=True):
        for name, value in values.items():
            if name in named or name in OTHER_METRICS:
                raise RunFailed(
                    f"The reward function {component.name} returned {name!r} for prompt {item[0].id}, a name "
                    f"that another {'metric' if name in OTHER_METRICS else 'component'} has.",
                    "Return another name.",
                )
            reward += component.weight * weight_of(name, component.by_name) * value
            named[name] = value
    feedback = "\n\n".join(text for _, text in row if text)
    return Score(reward=reward, components=named, feedback=feedback)


def component_names(specs: Sequence[str]) -> list[str]:
    """A unique name for each spec: the function's name.

    If that is taken, FILE.function; if that is taken too, the full spec.
    """
    taken = [*OTHER_METRICS, *(_function_name(spec) for spec in specs)]
    names = [
        _with_stem(spec) if taken.count(_function_name(spec)) > 1 else _function_name(spec) for spec in specs
    ]
    return [name if names.count(name) == 1 else spec for name, spec in zip(names, specs, strict=True)]


def _function_name(spec: str) -> str:
    """The name of the built-in reward or of the function."""
    return spec.rpartition(":")[2]


def _with_stem(spec: str) -> str:
    """`my_rewards.score` for my_rewards.py:score; the name of a built-in reward unchanged."""
    file, _, function = spec.rpartition(":")
    return f"{Path(file).stem}.{function}" if file else spec
