"""The reward of a completion: the weighted sum of one or more reward functions, its components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from skylite.rewards import RewardFn, load_reward, score
from skylite.types import Prompt, Score

OTHER_METRICS = ("mean", "std", "right_frac", "penalty_mean", "sampled_mean")
"""`reward/...` metrics of the total. A component, whose metric is `reward/NAME`, has none of these names."""


@dataclass(frozen=True, slots=True)
class Component:
    """One reward function of the sum."""

    name: str
    function: RewardFn
    weight: float


def load_components(
    specs: Sequence[str],
    weights: Sequence[float] = (),
    example: Prompt | None = None,
    programs: Mapping[str, str] | None = None,
) -> tuple[Component, ...]:
    """The functions behind the specs, in their order. Raises ConfigError.

    `weights`: empty means 1 for each. `example`: as for `load_reward`. `programs`: spec -> sha256 that the
    file must have; a spec that is not in it may have any content.
    """
    rows = zip(component_names(specs), specs, weights or [1.0] * len(specs), strict=True)
    hashes = programs or {}
    return tuple(
        Component(name, load_reward(spec, example, hashes.get(spec)), weight) for name, spec, weight in rows
    )


def score_components(components: Sequence[Component], prompt: Prompt, completion: str) -> Score:
    """The weighted sum, and each function's unweighted score by name. NaN or infinite if a score is.

    Raises RunFailed, which names function and prompt, if a function raises or does not return a number.
    """
    scores = {c.name: score(c.name, c.function, prompt, completion) for c in components}
    return Score(reward=sum(c.weight * scores[c.name] for c in components), components=scores)


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
