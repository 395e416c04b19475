"""Metrics of turns, against numbers that are counted by hand."""

from __future__ import annotations

import pytest

from skylite.rollout.step_metrics import turn_metrics
from skylite.types import Call, Trajectory


def trajectory(*calls: tuple[list[int], list[int]]) -> Trajectory:
    samples = [
        Call(
            prompt_token_ids=prompt,
            completion_token_ids=completion,
            sampling_logprobs=[-1.0] * len(completion),
        )
        for prompt, completion in calls
    ]
    return Trajectory(calls=tuple(samples), reward=0.0)


ONCE = trajectory(([1, 2], [3]))
CONTINUED = trajectory(([1, 2], [3, 4]), ([1, 2, 3, 4, 5, 6], [7]))
REWRITTEN = trajectory(
    ([1, 2, 3], [4, 5]),  # 1 2 3 4 5
    ([1, 2, 3, 4, 9, 6, 7], [8]),  # 4 of 7 as before; 9 in the place of 5; 6 and 7 are new
)
COMPACTED = trajectory(
    ([1, 2, 3], [4, 5]),
    ([1, 2, 3, 4, 5, 6], [7, 8]),  # continues: 5 of 6
    ([1, 9, 9], [4]),  # 1 of 3 as before; two in the place of 2 and 3, and shorter than any call
    ([1, 9, 9, 4, 5], [6]),  # continues the third: 4 of 5
)
CLOSEST = trajectory(
    ([1, 2], [3]),
    ([1, 2, 3, 4, 5, 6], [7]),
    ([1, 2, 3, 4, 8, 8, 8, 8], [9]),  # contains the first call completely: no branch
)


@pytest.mark.parametrize(
    ("trajectories", "reused", "branches", "rerendered"),
    [
        ([ONCE], 1.0, 0.0, 0.0),
        ([CONTINUED], 4 / 6, 0.0, 0.0),
        ([REWRITTEN], 4 / 7, 1.0, 1.0),
        ([COMPACTED], (5 + 1 + 4) / (6 + 3 + 5), 1.0, 2.0),
        ([CLOSEST], (3 + 4) / (6 + 8), 0.0, 0.0),
        ([CONTINUED, REWRITTEN, COMPACTED, ONCE], (4 + 4 + 10) / (6 + 7 + 14), 2 / 4, 3 / 4),
    ],
)
def test_what_calls_share_and_what_is_rendered_again(
    trajectories: list[Trajectory], reused: float, branches: float, rerendered: float
) -> None:
    metrics = turn_metrics(trajectories)
    assert metrics["turns/reused_frac"] == pytest.approx(reused)
    assert metrics["turns/branches_mean"] == branches
    assert metrics["turns/rerendered_tokens"] == rerendered
