"""How often checkpoints are written, by what they cost."""

from __future__ import annotations

import pytest

from skylite.trainer.checkpoint import CheckpointInterval


def checkpointed(every: int | None, step_s: float, cost_s: float, steps: int = 40) -> list[int]:
    """The steps with a checkpoint, in a run with such steps and checkpoints."""
    interval, found = CheckpointInterval(every), []
    for step in range(1, steps + 1):
        interval.step_ended(step_s)
        if interval.is_due(step):
            found.append(step)
            interval.written(cost_s)
    return found


@pytest.mark.parametrize(
    ("step_s", "cost_s", "apart"),
    [(60, 1.2, 1), (60, 0.1, 1), (60, 1.21, 2), (1, 0.2, 10), (10, 1.5, 8)],
)
def test_checkpoints_cost_at_most_two_percent(step_s: float, cost_s: float, apart: int) -> None:
    found = checkpointed(None, step_s, cost_s)
    assert found == list(range(1, 41, apart)), "the first step always has one: nothing else would save it"
    assert apart == 1 or cost_s / (apart * step_s) <= 0.02 < cost_s / ((apart - 1) * step_s)


def test_the_setting_wins() -> None:
    assert checkpointed(7, 60, 0.1) == [7, 14, 21, 28, 35]


def test_it_follows_what_is_measured_later() -> None:
    """Steps may become shorter; a disk may become slow."""
    interval = CheckpointInterval(None)
    interval.step_ended(100)
    interval.written(1)
    assert interval.steps == 1
    for _ in range(5):
        interval.step_ended(5)
    assert interval.steps == 10
    for _ in range(5):
        interval.written(0.1)
    assert interval.steps == 1


def test_a_first_step_that_waited_for_the_start_measures_nothing() -> None:
    interval = CheckpointInterval(None)
    interval.step_ended(None)
    assert interval.is_due(1)
    interval.written(0.25)
    assert interval.steps == 1
    assert not interval.is_measured
    interval.step_ended(1.25)
    assert interval.is_measured
    assert interval.steps == 10
    assert not interval.is_due(2)
    assert str(interval).startswith("checkpoints every 10 steps: one takes 0.25 s, a step 1.25 s")
