"""Successive halving of a sweep: at each rung the worse half of the policies leaves.

A rung is every N-th step but the last. A policy that has reached one waits, outside of the trainer, until its
place is certain whatever the scores that are still missing: so who stays does not depend on who was first.

Consumes: the held-out score of each policy at a rung. Waits for: nothing. Produces: who leaves, and
rungs.json. Unblocks: the policies that wait at a rung.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skylite.errors import ConfigError
from skylite.rollout.plan import RunPlan
from skylite.run.files import write_json
from skylite.run.sweep_dir import SweepDir

FLAG = "--halve-every"
COMPARED = ("eval", "reward", "env", "num_steps")
"""Settings with which held-out scores at the same step can be compared only if all policies share them."""


@dataclass(slots=True)
class Halving:
    """Who has reached which rung with which score, and who may still come."""

    sweep: SweepDir
    every: int
    """Steps between two rungs; 0: no rungs."""
    num_steps: int
    combinations: Mapping[str, str]
    """Policy -> its settings without the seed: the seeds of one combination are judged together."""
    active: set[str]
    """Policies that still train, or wait: those that may reach a rung."""
    scores: dict[int, dict[str, float]] = field(default_factory=dict)
    """Rung -> policy -> its held-out score when it first reached it."""

    @property
    def rungs(self) -> range:
        return range(self.every, self.num_steps, self.every) if self.every else range(0)

    def has(self, name: str, rung: int) -> bool:
        """Whether the policy has reached the rung."""
        return name in self.scores.get(rung, {})

    def record(self, name: str, rung: int, score: float) -> None:
        """Note a score on disk before it counts: a resumed sweep judges by the same numbers."""
        self.scores.setdefault(rung, {})[name] = score
        write_json(self.sweep.rungs_path, self.scores)

    def verdict(self, name: str, rung: int) -> str | None:
        """Why the policy leaves at a rung that it has reached; "" if it stays; None while that is open.

        A combination leaves if at least half of those at the rung, itself counted, have a higher mean score.
        Equal scores leave together or not at all. Later scores cannot change a verdict.
        """
        scores = self.scores[rung]
        seeds: dict[str, list[float]] = {}
        for policy, score in scores.items():
            seeds.setdefault(self.combinations[policy], []).append(score)
        missing = {self.combinations[policy] for policy in self.active - scores.keys()}
        means = {c: statistics.fmean(values) for c, values in seeds.items() if c not in missing}
        own = self.combinations[name]
        if own in missing:
            return None
        count = len(seeds.keys() | missing)
        half = math.ceil(count / 2)
        better = sum(mean > means[own] for mean in means.values())
        if better >= half:
            mean = f"mean of {len(seeds[own])} seeds" if len(seeds[own]) > 1 else "score"
            return (
                f"held-out {mean} {means[own]:.4g} at step {rung}; {better} of {count} were higher ({FLAG})"
            )
        return "" if better + len(missing) < half else None


def combinations(policies: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Policy -> what tells its settings from those of others, apart from the seed."""
    return {
        name: json.dumps({key: value for key, value in settings.items() if key != "seed"}, sort_keys=True)
        for name, settings in policies.items()
    }


def check_halving(every: int, plans: Mapping[str, RunPlan], combinations: Mapping[str, str]) -> None:
    """Raise ConfigError unless all policies get comparable held-out scores at every rung."""
    first, *others = plans.values()
    config = first.config
    if len(set(combinations.values())) < 2:
        raise ConfigError(
            f"{FLAG} {every} compares settings, and the policies of this sweep differ only in their seed.",
            f"Vary a setting with --grid, or remove {FLAG}.",
        )
    if every >= config.num_steps:
        raise ConfigError(
            f"{FLAG} {every} halves never: the policies train {config.num_steps} steps.",
            "Give fewer steps than that.",
        )
    if not first.held_out or not config.eval.every or every % config.eval.every:
        raise ConfigError(
            f"{FLAG} {every} needs held-out scores at step {every}, {2 * every} and so on, and has none: "
            f"eval.every={config.eval.every}, {len(first.held_out)} held-out rows.",
            f"Set eval.every={every}" + ("." if first.held_out else ", and eval.limit above 0."),
        )
    for plan in others:
        differing = [name for name in COMPARED if getattr(plan.config, name) != getattr(config, name)]
        if not differing and plan.held_out != first.held_out:
            differing = ["data"]
        if differing:
            raise ConfigError(
                f"{FLAG} {every} compares held-out scores at the same steps, and the policies differ in "
                f"{' and '.join(differing)}.",
                f"Remove {FLAG}, or sweep these values apart.",
            )


def read_rungs(sweep: SweepDir) -> dict[int, dict[str, float]]:
    """The scores that the policies of a sweep have reached rungs with. Raises ConfigError."""
    if not sweep.rungs_path.exists():
        return {}
    body, policies = sweep.shared.read_json(sweep.rungs_path), sweep.policies()
    try:
        return {
            int(rung): {name: float(score) for name, score in scores.items() if name in policies}
            for rung, scores in body.items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{sweep.rungs_path} has no scores of policies: {type(error).__name__} {error}.",
            "The sweep is damaged; start a new one.",
        ) from None
