"""What a plan says about settings that surprise: the scale of LoRA, few held-out problems."""

from __future__ import annotations

import pytest

from skylite.config.train import TrainConfig
from skylite.rollout.plan import held_out_note, settings_notes
from tests.unit.data_cases import prompt


@pytest.mark.parametrize(
    ("lora", "scale"),
    [
        ({"rank": 32, "alpha": 32}, "scaled by 1 (alpha / rank)"),
        ({"rank": 8, "alpha": 32}, "scaled by 4 (alpha / rank)"),
        ({"rank": 64, "alpha": 32}, "scaled by 0.5 (alpha / rank)"),
        ({"rank": 64, "alpha": 32, "use_rslora": True}, "scaled by 4 (alpha / sqrt(rank))"),
    ],
)
def test_the_scale_of_the_update_is_printed(lora: dict[str, object], scale: str) -> None:
    notes = [*map(str, settings_notes(TrainConfig.model_validate({"lora": lora})))]
    assert [scale in note for note in notes].count(True) == 1


@pytest.mark.parametrize(("count", "points"), [(1, 40), (10, 26), (49, 13)])
def test_too_few_held_out_problems_are_a_warning_with_their_interval(count: int, points: int) -> None:
    note = str(held_out_note([prompt(id=str(i)) for i in range(count)]))
    assert note.startswith(f"warning: {count} held-out problem(s) are too few")
    assert f"+-{points} points" in note


def test_enough_none_or_unscored_held_out_problems_are_no_warning() -> None:
    assert held_out_note([]) is None
    assert held_out_note([prompt(id=str(i)) for i in range(50)]) is None
    assert held_out_note([prompt(id="a", answer="")]) is None, (
        "a reward has no interval before it is measured"
    )
