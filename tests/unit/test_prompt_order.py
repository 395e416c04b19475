from __future__ import annotations

import pytest

from skylite.data.prompt_order import prompts_for_round, prompts_for_step
from skylite.errors import DataError
from tests.unit.data_cases import prompt

PROMPTS = [prompt(id=str(i)) for i in range(12)]


def ids(step: int, per_step: int, seed: int = 0, count: int = 12) -> list[str]:
    return [p.id for p in prompts_for_step(PROMPTS[:count], step, per_step, seed)]


def test_an_epoch_is_a_permutation_and_epochs_differ() -> None:
    epochs = [[i for step in range(1 + 3 * e, 4 + 3 * e) for i in ids(step, 4)] for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(p.id for p in PROMPTS)
    assert len({tuple(e) for e in epochs}) == 3


def test_a_step_depends_only_on_seed_and_step() -> None:
    assert ids(5, 4) == ids(5, 4)
    assert ids(5, 4) != ids(6, 4)
    assert ids(5, 4, seed=0) != ids(5, 4, seed=1)


def test_no_step_repeats_a_prompt_at_the_end_of_an_epoch() -> None:
    for step in range(1, 30):
        assert len(set(ids(step, 5))) == 5
    assert len({i for step in range(1, 30) for i in ids(step, 5)}) == 12


def test_fewer_prompts_than_a_step_needs() -> None:
    with pytest.raises(DataError, match="takes 4 distinct prompts, but the data set has 3"):
        ids(1, 4, count=3)


def test_resampling_rounds_use_every_other_prompt_once() -> None:
    rounds = [[p.id for p in prompts_for_round(PROMPTS, 2, r, 5, seed=0)] for r in (1, 2, 3)]
    assert [len(r) for r in rounds] == [5, 2, 0]
    assert sorted(ids(2, 5) + rounds[0] + rounds[1]) == sorted(p.id for p in PROMPTS)


def test_a_round_depends_only_on_seed_step_and_round() -> None:
    def first(step: int, seed: int) -> list[str]:
        return [p.id for p in prompts_for_round(PROMPTS, step, 1, 4, seed)]

    assert first(1, 0) == first(1, 0)
    assert first(1, 0) != first(1, 1)
    orders: dict[frozenset[str], set[tuple[str, ...]]] = {}
    for step in range(1, 60):
        rest = tuple(p.id for p in prompts_for_round(PROMPTS[:5], step, 1, 3, 0))
        orders.setdefault(frozenset(rest), set()).add(rest)
    assert any(len(found) > 1 for found in orders.values()), (
        "every step that leaves the same prompts takes them in the same order"
    )
