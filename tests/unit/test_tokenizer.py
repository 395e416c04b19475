"""The tokenizer runs in a process of its own: the parent must stay small and start quickly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from skylite.data.encode_in_sandbox import PLAIN_TEMPLATE
from skylite.data.tokenizer import ChatTokenizer, load_tokenizer
from skylite.types import Message

CHATS: list[list[Message]] = [
    [{"role": "user", "content": "Natalia sold clips to 48 of her friends."}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2 + 2?"},
    ],
]
LOAD = """
import json, sys
from pathlib import Path
from skylite.data.tokenizer import load_tokenizer
tokenizer = load_tokenizer(Path(sys.argv[1]))
print(json.dumps([m for m in ("torch", "transformers") if m in sys.modules]))
"""


def expected(tokenizer: object, chats: list[list[Message]] = CHATS) -> list[list[int]]:
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)  # type: ignore[attr-defined]
        for chat in chats
    ]


@pytest.fixture(scope="module")
def loaded(tiny_llama: Path) -> ChatTokenizer:
    return load_tokenizer(tiny_llama)


def test_token_ids_are_those_of_transformers(loaded: ChatTokenizer, tiny_llama: Path) -> None:
    original = AutoTokenizer.from_pretrained(tiny_llama)
    assert loaded.encode_chats(CHATS * 200) == expected(original) * 200
    texts = ["a b", "", "#### 7"]
    assert loaded.encode_texts(texts) == [original.encode(t, add_special_tokens=False) for t in texts]
    assert original.eos_token_id in loaded.stop_token_ids


def test_the_parent_imports_neither_transformers_nor_torch(tiny_llama: Path) -> None:
    command = [sys.executable, "-c", LOAD, str(tiny_llama)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout) == []
    assert done.stderr == ""


def test_a_folder_of_links_as_in_the_hubs_cache_can_be_read(tiny_llama: Path, tmp_path: Path) -> None:
    for path in tiny_llama.iterdir():
        (tmp_path / path.name).symlink_to(path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode_chats(CHATS[:1]) == expected(AutoTokenizer.from_pretrained(tiny_llama), CHATS[:1])
    tokenizer.close()


def test_a_model_without_a_template_gets_a_plain_one(tiny_llama: Path, tmp_path: Path) -> None:
    original = AutoTokenizer.from_pretrained(tiny_llama)
    original.chat_template = None
    original.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    original.chat_template = PLAIN_TEMPLATE
    assert tokenizer.encode_chats(CHATS) == expected(original)
    assert "no chat template" in tokenizer.note
    tokenizer.close()
