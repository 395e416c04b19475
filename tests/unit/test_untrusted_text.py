"""JSON of strangers: what parses, and how deeply it may be nested."""

from __future__ import annotations

import copy
import json

import pytest

from skylite.untrusted_text import MAX_DEPTH, parse_json


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")], ids=["lists", "dicts"])
def test_nesting_up_to_the_limit_parses(opening: str, closing: str) -> None:
    def nested(levels: int) -> str:
        return opening * levels + ("1" if opening != "[" else "") + closing * levels

    value = parse_json(nested(MAX_DEPTH))
    assert copy.deepcopy(value) == value, "code may walk it recursively"
    for levels in (MAX_DEPTH + 1, 900, 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(nested(levels))
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(f'{{"a": [1, {{}}], "b": {nested(levels)}}}'.encode())


def test_wide_values_and_brackets_in_texts_are_no_nesting() -> None:
    for value in ([[i] for i in range(5000)], "[" * 5000, {"a": "{" * 5000}, 7, None, "", {}):
        assert parse_json(json.dumps(value)) == value
