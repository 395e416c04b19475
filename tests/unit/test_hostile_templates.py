"""A chat template that never ends or takes gigabytes fails in time, and Ctrl-C is heard meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path

import pytest

from skylite.data import chat_tokenizer as tokenizers
from skylite.data.chat_tokenizer import ChatTemplate, encode_prompts, load_tokenizer
from skylite.environments.chat_request import ApiError
from skylite.environments.renderer import Renderer
from skylite.errors import ChildDied, ModelError
from skylite.sandbox.sandbox import Limits
from tests.tiny_models import make_tiny_model
from tests.unit.data_cases import prompt

LOOP = "{% for a in range(99999) %}"
ENDLESS = f"{3 * LOOP}{3 * '{% endfor %}'}x"
HUGE = (
    "{% set ns = namespace(x='x' * 1000000) %}"
    "{% for a in range(12) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
)
RAISES = "{{ raise_exception('no system turn') }}"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tokenizers, "LIMITS", Limits(memory_bytes=512 << 20, cpu_s=2, wall_s=4.0, output_bytes=1 << 20)
    )


def model_with(folder: Path, template: str) -> Path:
    make_tiny_model(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return folder


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (ENDLESS, "(used more than 2 s of CPU time|took longer than 4 s)"),
        (HUGE, "(used more than 536870912 bytes of memory|raised MemoryError)"),
        (RAISES, "raised TemplateError: no system turn"),
        ("{{ 'x y ' * 10000000 }}", "(returned more than|took longer|used more|was killed by SIGABRT)"),
        ("{{ messages[0].__class__.__mro__[1].__subclasses__() }}", "raised SecurityError"),
        ("{% for", "raised TemplateSyntaxError"),
    ],
)
def test_a_bad_template_is_a_sentence_in_time(template: str, reason: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model_with(tmp_path / "model", template))
    try:
        started = time.monotonic()
        with pytest.raises(ModelError, match=f"The chat template or tokenizer of .*model {reason}"):
            encode_prompts(tokenizer, [prompt()], 100)
        assert time.monotonic() - started < 12
    finally:
        tokenizer.close()


def test_the_event_loop_runs_while_a_template_does_and_close_ends_it(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model_with(tmp_path / "model", ENDLESS))

    async def stopped_after() -> float:
        started = time.monotonic()
        work = asyncio.ensure_future(asyncio.to_thread(encode_prompts, tokenizer, [prompt()], 100))
        await asyncio.sleep(0.3)
        tokenizer.close()
        with pytest.raises(ChildDied):
            await work
        return time.monotonic() - started

    assert asyncio.run(stopped_after()) < 3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("generation_config.json", "[1]"),
        ("generation_config.json", '{"eos_token_id": ["x"]}'),
        ("generation_config.json", '{"eos_token_id": {}}'),
        ("generation_config.json", "[" * 100000),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "[" * 100000),
        ("tokenizer_config.json", "[" * 100000),
        ("tokenizer_config.json", '{"tokenizer_class": 5}'),
    ],
)
def test_a_damaged_tokenizer_file_is_a_sentence(name: str, text: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


ONE_IS_BAD = (
    "{% if messages[0].content == 'hang' %}" + ENDLESS + "{% elif messages[0].content == 'eat' %}" + HUGE
    + "{% else %}{% for m in messages %}{{ m.content }}{% endfor %}{% endif %}"
)  # fmt: skip


@pytest.mark.parametrize(("word", "error"), [("hang", ModelError), ("eat", ApiError)])
def test_a_bad_conversation_does_not_harm_the_next(word: str, error: type[Exception], tmp_path: Path) -> None:
    make_tiny_model(tmp_path)

    async def body(renderer: Renderer) -> None:
        good = [{"role": "user", "content": "hello"}]
        before = await renderer.prompt(good, None, {})
        for _ in range(2):
            with pytest.raises(error):
                await renderer.prompt([{"role": "user", "content": word}], None, {})
            assert await renderer.prompt(good, None, {}) == before

    with contextlib.closing(load_tokenizer(tmp_path, ChatTemplate(text=ONE_IS_BAD))) as tokenizer:
        asyncio.run(body(Renderer(tokenizer.run, tmp_path)))
