"""Sampled token ids to text in which only the model's special tokens look like them.

A model can spell `</think>` in ordinary tokens without ending its reasoning. Where the vocabulary has the
text as one token, only that token counts: in the text of other tokens SPELLED stands after the first
character, so that no parser finds it there. A notation without a token of its own (the JSON of Llama 3's tool
calls, `<tool_call>` of SmolLM2) is ordinary text, and counts as text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

SPELLED = "\ufdd0"
"""No character of Unicode. Where a model samples it, U+FFFD replaces it, as other bytes that are no text."""


def decode_reply(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text, special tokens included, with SPELLED in what ordinary tokens spell."""
    special, spelled = special_tokens(tokenizer)
    parts, start, before = [], 0, None
    for end in [*(i for i, token in enumerate(token_ids) if token in special), len(token_ids)]:
        text = _text_after(tokenizer, before, list(token_ids[start:end])).replace(SPELLED, "\ufffd")
        parts.append(spelled.sub(lambda m: m[0][0] + SPELLED + m[0][1:], text) if spelled else text)
        if end < len(token_ids):
            before = token_ids[end]
            parts.append(special[before])
        start = end + 1
    return "".join(parts)


def as_written(text: str) -> str:
    """What the model wrote: the text without SPELLED."""
    return text.replace(SPELLED, "")


def _text_after(tokenizer: Any, before: int | None, token_ids: list[int]) -> str:
    """The text of ordinary tokens. Some tokenizers drop the space at the start of a text, but not here."""
    if not token_ids:
        return ""
    if before is None:
        return str(tokenizer.decode(token_ids, skip_special_tokens=False))
    known = tokenizer.decode([before], skip_special_tokens=False)
    return str(tokenizer.decode([before, *token_ids], skip_special_tokens=False)).removeprefix(known)


@functools.lru_cache(maxsize=4)
def special_tokens(tokenizer: Any) -> tuple[dict[int, str], re.Pattern[str] | None]:
    """Id -> text of the tokens in brackets, and a pattern of their texts. Others are runs of spaces."""
    added = {i: str(token.content) for i, token in tokenizer.added_tokens_decoder.items()}
    special = {i: text for i, text in added.items() if re.fullmatch(r"[<\[].+[>\]]", text, re.DOTALL)}
    return special, _any_of(special.values())


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
