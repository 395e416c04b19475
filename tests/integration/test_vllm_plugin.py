"""LoRA on a vLLM CPU server: mixed batches, versions, the prefix cache."""

from __future__ import annotations

import json
import shutil
import threading
from itertools import combinations
from pathlib import Path

import httpx
import pytest

from tests.engines import (
    EMBEDDING_AND_HEAD,
    MAX_LORA_RANK,
    TARGET_MODULES,
    Answer,
    Ask,
    EngineServer,
    running_server,
)
from tests.integration.adapter_versions import DIFFERENT, PROMPT, gap, publish, same

pytestmark = pytest.mark.vllm


def mixed_and_alone(server: EngineServer, models: list[str]) -> tuple[list[Answer], list[Answer]]:
    """Answers to several requests of every model: (all at once and interleaved, one by one)."""
    asks = [Ask(model, [*PROMPT[: 40 + 7 * i]], max_tokens=64) for i in range(4) for model in models]
    alone = [server.ask(ask) for ask in asks]
    return server.ask_together(asks), alone


def test_mixed_batch_gives_each_request_what_it_gets_alone(server: EngineServer, tmp_path: Path) -> None:
    """Base, version 1 and version 2 in one batch, of different ranks."""
    one, two = (
        publish(server, tmp_path, seed=1, rank=4),
        publish(server, tmp_path, seed=2, rank=MAX_LORA_RANK),
    )
    mixed, alone = mixed_and_alone(server, [server.base, one.name, two.name])
    assert all(same(m, a) for m, a in zip(mixed, alone, strict=True)), [
        gap(m, a) for m, a in zip(mixed, alone, strict=True)
    ]
    base, first, second = alone[:3]
    assert min(gap(base, first), gap(base, second), gap(first, second)) > DIFFERENT


def test_embedding_and_head_adapters_in_a_mixed_batch(tiny_llama: Path, tmp_path: Path) -> None:
    """A server with LoRA on every layer. The second adapter changes only the embedding and the LM head."""
    with running_server(tiny_llama, target_modules=[*TARGET_MODULES, *EMBEDDING_AND_HEAD]) as server:
        one = publish(server, tmp_path, seed=1)
        two = publish(server, tmp_path, seed=2, target_modules=EMBEDDING_AND_HEAD)
        three = publish(server, tmp_path, seed=3, target_modules=EMBEDDING_AND_HEAD[1:])
        answers = [server.ask(Ask(name, PROMPT)) for name in (server.base, one.name, two.name, three.name)]
        assert min(gap(one, other) for one, other in combinations(answers, 2)) > DIFFERENT
        mixed, alone = mixed_and_alone(server, [server.base, one.name, two.name])
    assert all(same(m, a) for m, a in zip(mixed, alone, strict=True)), [
        gap(m, a) for m, a in zip(mixed, alone, strict=True)
    ]


def test_no_completion_uses_the_kv_cache_of_an_older_version(server: EngineServer, tmp_path: Path) -> None:
    """A prompt that version 1 cached gets the same answer from version 2 as with an empty cache."""
    one, two = publish(server, tmp_path, seed=1), publish(server, tmp_path, seed=2)
    first = server.ask(Ask(one.name, PROMPT))
    assert server.unload(one.name).status_code == httpx.codes.OK
    second = server.ask(Ask(two.name, PROMPT))
    shutil.copytree(two.path, tmp_path / "copy")
    assert server.load("copy-of-two", tmp_path / "copy").status_code == httpx.codes.OK
    fresh = server.ask(Ask("copy-of-two", PROMPT, salt="nothing shares this"))
    assert same(second, fresh)
    assert gap(first, second) > DIFFERENT


def test_running_request_keeps_its_version_across_a_load(server: EngineServer, tmp_path: Path) -> None:
    """A long request of version 1 runs while version 2 is loaded and used."""
    one = publish(server, tmp_path, seed=1)
    ask = Ask(one.name, PROMPT, max_tokens=500)
    alone = server.ask(ask)
    started, ended = threading.Event(), threading.Event()
    sampled: list[tuple[int, float]] = []

    def stream() -> None:
        body = {
            "model": ask.model,
            "prompt": ask.prompt,
            "max_tokens": ask.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        body |= {"logprobs": 0, "return_token_ids": True, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line.removeprefix("data: "))["choices"][0]
                    sampled.extend(
                        zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
                    )
                    started.set()
        ended.set()

    thread = threading.Thread(target=stream)
    thread.start()
    assert started.wait(60)
    two = publish(server, tmp_path, seed=2)
    other = server.ask(Ask(two.name, PROMPT, max_tokens=8))
    assert not ended.is_set(), "the request ended before version 2 was loaded; make it longer"
    thread.join()
    tokens, logprobs = zip(*sampled, strict=True)
    assert same(Answer(list(tokens), list(logprobs)), alone)
    assert gap(Answer(alone.token_ids[:8], alone.logprobs[:8]), other) > DIFFERENT
