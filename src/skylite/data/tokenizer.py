"""Prompts to token ids, once, with the chat template of the model. Completions are never re-tokenised."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skylite.errors import DataError, ModelError
from skylite.foreign_text import parse_json
from skylite.types import Message, Prompt

PLAIN_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}Question: {{ m['content'] }}\nAnswer:"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }}\n\n"
    "{% else %}{{ m['content'] }}\n\n{% endif %}{% endfor %}"
)
"""For base models without a chat template."""


@dataclass(frozen=True, slots=True)
class ChatTokenizer:
    """A tokenizer, its chat template and the tokens that end a turn."""

    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    note: str
    """A note when PLAIN_TEMPLATE is used, else empty."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the turns, followed by the generation prompt."""
        ids: list[int] = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Token ids of plain text, without special tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


def load_tokenizer(model_path: Path) -> ChatTokenizer:
    """The tokenizer of a model folder. Raises ModelError without a tokenizer or an end-of-turn token."""
    with _without_torch():
        from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model_path), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"The tokenizer in {model_path} cannot be loaded: {error}.",
            "Give a model folder that contains its tokenizer files.",
        ) from None
    note = ""
    if not tokenizer.chat_template:
        tokenizer.chat_template = PLAIN_TEMPLATE
        note = "the model has no chat template, so prompts are plain 'Question: ... Answer:' text"
    stops = _stop_token_ids(model_path, tokenizer.eos_token_id)
    if not stops:
        raise ModelError(
            f"{model_path} defines no end-of-turn token.", "Set eos_token_id in its generation_config.json."
        )
    return ChatTokenizer(tokenizer, stops, note)


@contextmanager
def _without_torch() -> Iterator[None]:
    """Import transformers as if torch were not installed: buys 5 CPU seconds and 330 MB at start.

    transformers then offers no models in this process. Does nothing if either is imported already.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    quiet = "TRANSFORMERS_NO_ADVISORY_WARNINGS"  # hides the warning that models are not available
    before = os.environ.get(quiet)
    os.environ[quiet] = "1"
    sys.modules["torch"] = None  # type: ignore[assignment]  # None makes the import fail
    try:
        yield
    finally:
        del sys.modules["torch"]
        if before is None:
            del os.environ[quiet]
        else:
            os.environ[quiet] = before


def encode_prompts(
    tokenizer: ChatTokenizer, prompts: Sequence[Prompt], max_prompt_tokens: int
) -> dict[str, list[int]]:
    """Prompt id -> token ids. Raises DataError for a prompt over `max_prompt_tokens`."""
    encoded = {}
    for prompt in prompts:
        ids = tokenizer.encode_chat(prompt.messages)
        if len(ids) > max_prompt_tokens:
            raise DataError(
                f"Prompt {prompt.id} has {len(ids)} tokens, "
                f"over rollout.max_prompt_tokens={max_prompt_tokens}.",
                "Raise the limit, or prepare the data set without that row.",
            )
        encoded[prompt.id] = ids
    return encoded


def _stop_token_ids(model_path: Path, eos_token_id: int | None) -> tuple[int, ...]:
    """The EOS token of the tokenizer and those of generation_config.json, which the engine does not read."""
    stops = set() if eos_token_id is None else {eos_token_id}
    path = model_path / "generation_config.json"
    if path.exists():
        named = parse_json(path.read_text(encoding="utf-8")).get("eos_token_id")
        stops |= set(named if isinstance(named, list) else [] if named is None else [named])
    return tuple(sorted(stops))
