"""Sampled ids to messages: a special token counts by its id, and never by the same text in other tokens."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from skylite.data.chat_tokenizer_in_sandbox import SPELLED, as_written, decode_reply, run_jobs
from skylite.environments.parse_reply import ParsedReply, parse_reply
from skylite.environments.renderer import Renderer
from skylite.environments.trajectory_log import TrajectoryLog
from tests.small_run import settings
from tests.unit.template_cases import FAMILIES, HERMES, TemplateEngine, server_of, tokenizer_of

QWEN3, SMOLLM2 = (
    next(i for i, f in enumerate(FAMILIES) if f.name.startswith(n)) for n in ("Qwen3", "SmolLM2")
)


def ids_of(number: int, *parts: str) -> list[int]:
    """Each second part is spelled in ordinary tokens, one a byte."""
    tokenizer, engine = tokenizer_of(number), TemplateEngine(number, [])
    spelled = lambda text: [i for c in text for i in tokenizer.encode(c, add_special_tokens=False)]  # noqa: E731
    return [i for n, part in enumerate(parts) for i in (spelled(part) if n % 2 else engine.unusual_ids(part))]


def parsed(number: int, ids: list[int], *, thinks: bool = False) -> ParsedReply:
    """What the OpenAI server reads from these ids."""
    runner = partial(run_jobs, tokenizer_of(number), FAMILIES[number].stops)
    text = asyncio.run(Renderer(runner, Path("model")).text(ids))
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


class StrictTokenizer:
    """Takes no other arguments than transformers documents, and leaves special tokens out if told so."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return " ".join(f"<{i}>" for i in token_ids if i != 9 or not skip_special_tokens)


def test_special_tokens_are_decoded_also_where_a_tokenizer_skips_them() -> None:
    assert decode_reply(StrictTokenizer(), [1, 9]) == "<1> <9>"


def test_the_request_decides_whether_its_prompt_opens_a_reasoning_block(tmp_path: Path) -> None:
    """Qwen3.5's does, unless `chat_template_kwargs` turn thinking off: then the reply is the answer."""
    number = next(i for i, f in enumerate(FAMILIES) if f.name == "Qwen3.5")
    engine: Any = TemplateEngine(number, ["Hm.\n</think>\n\nYes<|im_end|>", "Yes<|im_end|>", "Hm.<|im_end|>"])
    env = {"episode": "x.py:f", "max_tokens": 50_000}
    config = settings(env=env, rollout={"max_prompt_tokens": 20_000, "max_completion_tokens": 500})
    server = server_of(number, config, tmp_path)
    log = TrajectoryLog(name="p0", model="m", version=1, engine=engine, seed=1, temperature=1.0)

    async def run() -> list[Any]:
        async with server.serving(), httpx.AsyncClient(trust_env=False) as client:
            headers = {"Authorization": f"Bearer {server.open(log)}"}
            url, found = f"{server.base_url}/chat/completions", []
            for thinks in (True, False, True):
                kwargs = {"enable_thinking": thinks}
                body = {"messages": [{"role": "user", "content": "Why?"}], "chat_template_kwargs": kwargs}
                message = (await client.post(url, json=body, headers=headers)).json()["choices"][0]["message"]
                found.append((message["content"], message.get("reasoning_content", "")))
            return found

    assert asyncio.run(run()) == [("Yes", "Hm."), ("Yes", ""), ("", "Hm.")]


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


TOKENS = ("[INST]", "[/INST]", "<think>", "</think>", "<|im_end|>", "</s>")
PIECES = ("\u2581yes", "\u2581no", "\u2581", *"[]<>/|_\n.", "\u2581.", "INST", "think", "im", "end", "s")


def with_decoder(name: str) -> Any:
    """A tokenizer with TOKENS, whose decoder joins spaces and bytes as `name` does."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    pieces = [*PIECES, *(f"<0x{byte:02X}>" for byte in range(256))]
    common = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    decoder = {
        "Metaspace": decoders.Metaspace(),
        "Gemma": decoders.Sequence(common),
        "Llama 2": decoders.Sequence([*common, decoders.Strip(" ", 1, 0)]),
    }[name]
    made = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    made.decoder = decoder
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in TOKENS])
    return tokenizer


@pytest.mark.parametrize("name", ["Metaspace", "Gemma", "Llama 2"])
def test_random_replies_are_the_tokenizers_own_text(name: str) -> None:
    """Also where it drops the first space, and where characters are cut between their bytes."""
    tokenizer, rng = with_decoder(name), random.Random(0)
    for _ in range(500):
        kinds = [
            range(len(PIECES)),
            range(len(PIECES), len(tokenizer)),
            range(len(tokenizer))[-len(TOKENS) :],
        ]
        ids = [rng.choice(rng.choice(kinds)) for _ in range(rng.randrange(12))]
        text = decode_reply(tokenizer, ids)
        assert as_written(text) == tokenizer.decode(ids, skip_special_tokens=False), ids
        for token in TOKENS:
            assert text.count(token) == ids.count(tokenizer.convert_tokens_to_ids(token)), ids
    spelled = [tokenizer.convert_tokens_to_ids(piece) for piece in ("[", "/", "INST", "]")]
    assert decode_reply(tokenizer, spelled) == f"[{SPELLED}/INST]"


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
