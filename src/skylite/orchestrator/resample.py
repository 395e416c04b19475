"""DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): groups without a gradient are replaced, within a bound, by other prompts'."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from skylite.types import RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledStep:
    """What a step sampled."""

    groups: Sequence[RolloutGroup]
    """The step's own: they go to the trainer."""
    left_out: Sequence[RolloutGroup] = ()
    """Replaced by others, or sampled for nothing: each has equal rewards."""
    missing: int = 0
    """How many of `groups` should have been replaced and could not be; the trainer drops them."""
    stored: bool = False
    """Read from the step's rollout file, which is there already (a resumed run)."""

    @property
    def equal_frac(self) -> float:
        """Share of equal groups among all that were sampled."""
        groups = [*self.groups, *self.left_out]
        return sum(g.is_equal for g in groups) / len(groups)


async def replace_equal_groups(
    first: Sequence[RolloutGroup], sample_more: Callable[[int, int], Awaitable[Sequence[RolloutGroup]]], max_rounds: int
) -> SampledStep:
    """Replace the equal groups of `first`, in their places, by those of new prompts.

    Args:
        sample_more: (round 1.., how many) -> groups of that many new prompts; fewer, or none, when there are no more prompts.
    """
    groups, left_out = list(first), []
    for round_number in range(1, max_rounds + 1):
        places = [i for i, group in enumerate(groups) if group.is_equal]
        if not places:
            break
        fresh = await sample_more(round_number, len(places))
        if not fresh:
            break
        left_out += [g for g in fresh if g.is_equal]
        for place, group in zip(places, (g for g in fresh if not g.is_equal), strict=False):
            left_out.append(groups[place])
            groups[place] = group
    return SampledStep(groups=groups, left_out=left_out, missing=sum(g.is_equal for g in groups))
