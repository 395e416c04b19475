"""Which prompts a step trains on: a pure function of seed and step, so a resumed run needs no cursor."""

from __future__ import annotations

import random
from collections.abc import Sequence

from skylite.errors import DataError
from skylite.types import Prompt


def steps_per_epoch(num_prompts: int, per_step: int) -> int:
    """Steps of a pass over the prompts. Raises DataError when there are fewer prompts than a step takes."""
    if num_prompts < per_step:
        raise DataError(
            f"A step takes {per_step} distinct prompts, but the data set has {num_prompts}.",
            "Lower rollout.prompts_per_step, allow more data.difficulty, or prepare more rows.",
        )
    return num_prompts // per_step


def prompts_for_step(prompts: Sequence[Prompt], step: int, per_step: int, seed: int) -> list[Prompt]:
    """The `per_step` distinct prompts of a 1-based step.

    Every epoch is a fresh permutation, sampled without replacement. When per_step does not divide the number
    of prompts, the epoch drops the remainder of its permutation, so no step contains a prompt twice.
    Raises DataError when there are fewer prompts than a step takes.
    """
    epoch, position = divmod(step - 1, steps_per_epoch(len(prompts), per_step))
    order = list(range(len(prompts)))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return [prompts[i] for i in order[position * per_step : (position + 1) * per_step]]


def prompts_for_round(
    prompts: Sequence[Prompt], step: int, round_number: int, per_step: int, seed: int
) -> list[Prompt]:
    """New prompts for round 1, 2, ... of a step that replaces zero-std groups.

    Disjoint from the prompts of the step and of its other rounds. At most `per_step`; fewer, then none, when
    the data set runs out.
    """
    used = {p.id for p in prompts_for_step(prompts, step, per_step, seed)}
    rest = [p for p in prompts if p.id not in used]
    random.Random(f"{seed}/resample/{step}").shuffle(rest)
    return rest[(round_number - 1) * per_step : round_number * per_step]
