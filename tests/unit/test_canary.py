"""Which tokens the canary scores, and the limits of its rules."""

from itertools import pairwise

import pytest

from skylite.engine.canary import (
    NUM_SEQUENCES,
    canary_sequences,
)
from skylite.trainer.canary import sequences_of
from tests.unit.data_cases import prompt


@pytest.mark.parametrize(("dtype", "count"), [("float32", 2), ("bfloat16", 24)])
def test_the_canary_is_the_start_of_the_first_prompts(dtype: str, count: int) -> None:
    class Letters:
        """One token for each character."""

        def encode_texts(self, texts: list[str]) -> list[list[int]]:
            return [[ord(c) for c in text] for text in texts]

    messages = [{"role": "user", "content": "example"}, {"role": "user", "content": "q" * 40}]
    others = [prompt(messages=[{"role": "user", "content": f"{i}?"}]) for i in range(40)]
    found = canary_sequences(Letters(), [prompt(messages=messages), *others], dtype)  # type: ignore[arg-type]
    assert len(found) == count
    assert found[0] == [ord("q")] * 24
    assert found[1] == [ord(c) for c in "0?\n7"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prompts_that_begin_alike_give_distinct_sequences(dtype: str) -> None:
    """All prompts of a game are its rules. Equal sequences would repeat one rounding error."""

    class Words:
        def encode_texts(self, texts: list[str]) -> list[list[int]]:
            return [list(range(170)) for _ in texts]

    found = canary_sequences(Words(), [prompt()] * 40, dtype)  # type: ignore[arg-type]
    assert len(found) == NUM_SEQUENCES[dtype]
    assert len(set(map(tuple, found))) == len(found)
    assert found[:2] == [list(range(24)), list(range(24, 48))]


def test_version_0_is_scored_on_all_sequences_and_each_later_one_on_two_in_turn() -> None:
    assert sequences_of(0, 24) == list(range(24))
    chosen = [sequences_of(version, 24) for version in range(1, 60)]
    assert chosen[:3] == [[0, 1], [1, 2], [2, 3]]
    assert chosen[22:25] == [[22, 23], [23, 0], [0, 1]]
    assert all(before[1] == now[0] for before, now in pairwise(chosen)), "each shares one with the last"
    assert {index for pair in chosen[:23] for index in pair} == set(range(24))


def test_two_sequences_or_fewer_are_scored_in_every_version() -> None:
    assert [sequences_of(version, 2) for version in (0, 1, 2, 19)] == [[0, 1]] * 4
    assert [sequences_of(version, 1) for version in (0, 1, 2)] == [[0]] * 3


def test_a_text_of_one_token_is_no_canary() -> None:
    class Short:
        def encode_texts(self, texts: list[str]) -> list[list[int]]:
            return [[1], [1, 2]]

    assert canary_sequences(Short(), [prompt()], "float32") == [[1, 2]]  # type: ignore[arg-type]
