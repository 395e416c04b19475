"""Whether a server's tokenizer is that of the run, by vLLM's routes /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from skylite.data.chat_tokenizer import ChatTokenizer

Ask = Callable[[str, Mapping[str, Any], str], Awaitable[Any]]
"""(route, body without the model, field of the reply) -> its value."""
VOCABULARY_PART = 4096
"""Token ids of one request that compares vocabularies."""
TEXTS = (
    "The answer is 42, because 6 * 7 = 42.\n\n#### 42",
    "def f(x):\n    return {'a': [x ** 2, -0.5e-3]}  # comment\n\tif  not x:",
    "1234567890 3.14159 1,000,000 20%",
    "Où est l'élève? Größe, mañana, żółć",
    "日本語のテキスト。中文,한국어 и русский, عربى",
    "🙂👩‍🚀 ∑∫√ \u00a0 end  \r\n",
)
"""Texts that both tokenizers must read alike."""


async def tokenizer_difference(ask: Ask, tokenizer: ChatTokenizer) -> str:
    """How texts, special tokens or token ids differ, such as `reads 'a' as [3], not [4]`; "" if none do.

    The server's vocabulary may have more tokens at its end, which the policy never samples.
    """
    size, special = await asyncio.to_thread(tokenizer.vocabulary)
    texts = [*TEXTS, "".join(special)]
    own = await asyncio.to_thread(tokenizer.encode_texts, texts)
    for text, ids in zip(texts, own, strict=True):
        got = await ask("tokenize", {"prompt": text, "add_special_tokens": False}, "tokens")
        if got != ids:
            return f"reads {text[:40]!r} as {got[:8]}, not {ids[:8]}"
    for start in range(0, size, VOCABULARY_PART):
        part = list(range(start, min(start + VOCABULARY_PART, size)))
        text = await asyncio.to_thread(tokenizer.decode, part)
        if await ask("detokenize", {"tokens": part}, "prompt") != text:
            return f"has other texts for the tokens {part[0]} to {part[-1]}"
    return ""
