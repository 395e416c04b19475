"""The reward of a completion: the weighted sum of one or more reward functions, its components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from skylite.config.rollout import RewardParameters
from skylite.rewards import load_reward
from skylite.rewards.built_in import DEFAULTS
from skylite.rewards.call_rewards import RewardFunction, score
from skylite.rewards.reward_arguments import Item
from skylite.types import Prompt, Score

OTHER_METRICS = ("mean", "std", "right_frac", "partial_frac", "tokens_corr", "penalty_mean", "sampled_mean")
"""`reward/...` metrics of the total. A component, whose metric is `reward/NAME`, has none of these names."""


@dataclass(frozen=True, slots=True)
class Component:
    """One reward function of the sum."""

    name: str
    function: RewardFunction
    weight: float


def load_components(
    specs: Sequence[str],
    weights: Sequence[float] = (),
    example: Prompt | None = None,
    programs: Mapping[str, str] | None = None,
    parameters: RewardParameters = DEFAULTS,
) -> tuple[Component, ...]:
    """The functions behind the specs, in their order. Raises ConfigError.

    `weights`: empty means 1 for each. `example`, `parameters`: as for `load_reward`. `programs`: spec ->
    sha256 that the file must have; a spec that is not in it may have any content.
    """
    rows = zip(component_names(specs), specs, weights or [1.0] * len(specs), strict=True)
    hashes = programs or {}
    return tuple(
        Component(name, load_reward(spec, parameters, example, hashes.get(spec)), weight)
        for name, spec, weight in rows
    )


def score_components(components: Sequence[Component], items: Sequence[Item]) -> list[Score]:
    """For each item the weighted sum, and each function's unweighted score by name. NaN if a score is.

    Raises RunFailed, which names function and prompt, if a function raises or does not return numbers.
    """
    columns = {c.name: score(c.name, c.function, items) for c in components}
    rows = [{name: values[i] for name, values in columns.items()} for i in range(len(items))]
    return [Score(reward=sum(c.weight * row[c.name] for c in components), components=row) for row in rows]


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
