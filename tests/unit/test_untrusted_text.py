"""JSON of strangers: what parses, so that other code can use the value."""

from __future__ import annotations

import copy
import json

import pytest

from skylite.untrusted_text import MAX_DEPTH, MAX_DIGITS, parse_json


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


def test_integers_convert_to_floats() -> None:
    for sign in ("", "-"):
        assert abs(float(parse_json(sign + "9" * (MAX_DIGITS - 1)))) < float("inf")
        for count in (MAX_DIGITS + 1, 10_000):
            with pytest.raises(ValueError, match=rf"an integer of {count + len(sign)} digits"):
                parse_json(f'[{{"a": {sign}{"9" * count}}}]')


@pytest.mark.parametrize("escape", [r"\ud800", r"\uDFFF", r"\udc00\ud800"])
def test_half_a_character_is_refused(escape: str) -> None:
    for text in (f'"{escape}"', f'{{"{escape}": 1}}', f'[["a", "b {escape}"]]'):
        with pytest.raises(ValueError, match="surrogates not allowed"):
            parse_json(text)
        with pytest.raises(ValueError, match="surrogates not allowed"):
            parse_json(text.encode())


def test_pairs_and_escaped_backslashes_are_text() -> None:
    assert parse_json(r'"\ud83d\ude00"') == "\U0001f600"
    assert parse_json(r'["\\ud800", "\u00e9"]') == [r"\ud800", "é"]
