"""Sampled ids to messages: a special token counts by its id, and never by the same text in other tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from skylite.environments.decode_reply import SPELLED, as_written, decode_reply
from skylite.environments.parse_reply import ParsedReply, parse_reply
from skylite.environments.render_chats import JobRunner
from skylite.environments.renderer import Renderer
from tests.unit.template_cases import FAMILIES, HERMES, InProcess, TemplateEngine, tokenizer_of

QWEN3, SMOLLM2 = (
    next(i for i, f in enumerate(FAMILIES) if f.name.startswith(n)) for n in ("Qwen3", "SmolLM2")
)


def ids_of(number: int, *parts: str) -> list[int]:
    """Each second part is spelled in ordinary tokens, one a byte."""
    tokenizer, engine = tokenizer_of(number), TemplateEngine(number, [])
    spelled = lambda text: [i for c in text for i in tokenizer.encode(c, add_special_tokens=False)]  # noqa: E731
    return [i for n, part in enumerate(parts) for i in (spelled(part) if n % 2 else engine.unusual_ids(part))]


def parsed(number: int, ids: list[int], *, thinks: bool = False) -> ParsedReply:
    """What the recorder reads from these ids."""
    sandbox: Any = InProcess(JobRunner(tokenizer_of(number), FAMILIES[number].stops))
    text = asyncio.run(Renderer(sandbox, Path("model")).text(ids))
    return parse_reply(text, "hermes", FAMILIES[number].stops, has_tools=True, thinks=thinks)


def test_a_spelled_end_of_thinking_does_not_end_it() -> None:
    ids = ids_of(QWEN3, "<think>\nI write ", "</think>", " here.\n</think>\n\nDone<|im_end|>")
    assert tokenizer_of(QWEN3).decode(ids).count("</think>") == 2
    assert parsed(QWEN3, ids) == ParsedReply("Done", "I write </think> here.")
    assert parsed(QWEN3, ids_of(QWEN3, "<think>\nI write ", "</think>", " here<|im_end|>")) == ParsedReply(
        "", "I write </think> here"
    )
    opened = ids_of(QWEN3, "Hm ", "</think>", " still\n</think>\n\nDone<|im_end|>")
    assert parsed(QWEN3, opened, thinks=True) == ParsedReply("Done", "Hm </think> still")


def test_a_spelled_tool_call_and_end_of_turn_are_text() -> None:
    reply = parsed(QWEN3, ids_of(QWEN3, "See ", f"{HERMES}<|im_end|>", "<|im_end|>"))
    assert reply == ParsedReply(f"See {HERMES}<|im_end|>")
    (call,) = parsed(QWEN3, ids_of(QWEN3, f"{HERMES}<|im_end|>")).tool_calls
    assert (call.name, call.arguments) == ("add", '{"a": 40, "b": 2}')


def test_a_spelled_notation_inside_a_call_stays_in_its_arguments() -> None:
    ids = ids_of(
        QWEN3, '<tool_call>{"name": "add", "arguments": {"a": "', "</tool_call>", '"}}</tool_call><|im_end|>'
    )
    (call,) = parsed(QWEN3, ids).tool_calls
    assert call.arguments == '{"a": "</tool_call>"}'


def test_notation_without_a_token_of_its_own_counts_as_text() -> None:
    """SmolLM2's vocabulary has no token <tool_call>."""
    (call,) = parsed(SMOLLM2, ids_of(SMOLLM2, "", HERMES, "<|im_end|>")).tool_calls
    assert call.name == "add"


@pytest.mark.parametrize("number", range(len(FAMILIES)), ids=lambda n: FAMILIES[n].name)
def test_a_reply_without_spelled_tokens_is_the_tokenizers_own_text(number: int) -> None:
    tokenizer, family = tokenizer_of(number), FAMILIES[number]
    text = family.thought.format("Größe \U0001f600 ") + family.call + family.stop
    ids = TemplateEngine(number, []).unusual_ids(text)
    assert decode_reply(tokenizer, ids) == tokenizer.decode(ids) == text
    assert decode_reply(tokenizer, []) == ""


def test_the_mark_itself_and_broken_bytes_cannot_be_sampled() -> None:
    tokenizer = tokenizer_of(QWEN3)
    ids = tokenizer.encode(f"a{SPELLED}b", add_special_tokens=False)
    assert decode_reply(tokenizer, ids) == "a\ufffdb"
    half = tokenizer.encode("ß", add_special_tokens=False)[:1]
    end = tokenizer.convert_tokens_to_ids("</think>")
    assert decode_reply(tokenizer, [*half, end, *half]) == "\ufffd</think>\ufffd"


def test_a_space_after_a_special_token_is_kept() -> None:
    """Tokenizers of the SentencePiece kind drop the space at the start of a text, and only there."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"\u2581yes": 0, "\u2581no": 1, "[": 2, "X": 3, "]": 4}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    tokenizer.add_tokens([AddedToken("[X]", normalized=False)])
    end = tokenizer.convert_tokens_to_ids("[X]")
    ids = [0, end, 1, 2, 3, 4]
    assert tokenizer.decode(ids) == "yes[X] no[X]"
    assert decode_reply(tokenizer, ids) == f"yes[X] no[{SPELLED}X]"
    assert as_written(decode_reply(tokenizer, ids)) == tokenizer.decode(ids)
