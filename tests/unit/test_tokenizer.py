"""The tokenizer runs in a process of its own: the parent must stay small and start quickly."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from skylite.data.chat_tokenizer import NO_TEMPLATE, ChatTemplate, ChatTokenizer, load_tokenizer
from skylite.data.chat_tokenizer_in_sandbox import PLAIN_TEMPLATE
from skylite.types import Message
from tests.tiny_models import make_tiny_model

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
from skylite.data.chat_tokenizer import load_tokenizer
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
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    shutil.copytree(tiny_llama, blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    tokenizer = load_tokenizer(snapshot)
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


def mistral_model(folder: Path, *, tekken_only: bool) -> Path:
    """A tiny Mistral with tekken.json, which mistral-common (a dependency of vLLM) brings."""
    make_tiny_model(folder, "mistral")
    spec = find_spec("mistral_common")
    assert spec is not None
    data = Path(str(spec.origin)).parent / "data"
    shutil.copyfile(next(data.glob("tekken_*.json")), folder / "tekken.json")
    for file in folder.glob("tokenizer*") if tekken_only else ():
        file.unlink()
    return folder


def test_a_mistral_model_uses_its_chat_template_and_not_tekken_json(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(mistral_model(tmp_path / "both", tekken_only=False))
    plain = make_tiny_model(tmp_path / "plain", "mistral")
    other = load_tokenizer(plain)
    try:
        assert tokenizer.note == ""
        assert tokenizer.encode_chats(CHATS) == other.encode_chats(CHATS)
    finally:
        tokenizer.close()
        other.close()


def test_a_model_with_nothing_but_tekken_json_takes_the_users_chat_template(tmp_path: Path) -> None:
    folder = mistral_model(tmp_path / "tekken", tekken_only=True)
    for file in folder.glob("chat_template*"):
        file.unlink()
    for template, text, note in (
        ("{{ messages[0]['content'] }}!", "1 + 1?!", ""),
        (None, "Question: 1 + 1?\nAnswer:", NO_TEMPLATE),
    ):
        tokenizer = load_tokenizer(folder, ChatTemplate(text=template))
        try:
            assert tokenizer.note == note
            (ids,) = tokenizer.encode_chats([[{"role": "user", "content": "1 + 1?"}]])
            assert ids == tokenizer.encode_texts([text])[0]
        finally:
            tokenizer.close()
