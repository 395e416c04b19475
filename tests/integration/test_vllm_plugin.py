"""LoRA on a real vLLM CPU server: mixed batches, versions, the prefix cache, bad adapters; and which logprobs it gives."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, count
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from skylite.engine.client import Sampling, VllmClient
from skylite.engine.engine import Engine
from skylite.types import Sample
from tests.engines import (
    MAX_LORA_RANK,
    TARGET_MODULES,
    Answer,
    Ask,
    EngineServer,
    running_server,
    write_random_adapter,
)

pytestmark = pytest.mark.vllm

EMBEDDING_AND_HEAD = ["embed_tokens", "lm_head"]
FLOAT_NOISE = 1e-4
DIFFERENT = 1e-2
PROMPT = list(
    b"Natalia sold clips to 48 of her friends in April, and then she sold half as many in May. How many in all?"
)
_NUMBERS = count()


MAX_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Version:
    """A loaded adapter."""

    name: str
    path: Path


def publish(
    server: EngineServer,
    folder: Path,
    *,
    seed: int,
    rank: int = 4,
    target_modules: list[str] = TARGET_MODULES,
) -> Version:
    """Write a random adapter and load it under a name that this session has not used."""
    path = write_random_adapter(
        folder / f"seed{seed}", server.model_path, seed=seed, rank=rank, target_modules=target_modules
    )
    version = Version(f"policy-{next(_NUMBERS)}", path)
    assert server.load(version.name, version.path).status_code == httpx.codes.OK
    return version


@pytest.fixture
def server(vllm_server: EngineServer) -> Iterator[EngineServer]:
    """The shared server, without adapters before and after."""
    yield vllm_server
    for model in vllm_server.http.get("/v1/models").json()["data"]:
        if model["id"] != vllm_server.base:
            vllm_server.unload(model["id"])


@pytest.fixture(scope="module")
def stock_server(tiny_llama: Path) -> Iterator[EngineServer]:
    """The same server with vLLM's own LoRA kernels."""
    with running_server(tiny_llama, cpu_lora="stock") as stock:
        yield stock


def gap(one: Answer, other: Answer) -> float:
    """Largest difference of two answers' logprobs up to the first token that differs."""
    pairs = zip(one.token_ids, other.token_ids, one.logprobs, other.logprobs, strict=True)
    worst = 0.0
    for token, other_token, logprob, other_logprob in pairs:
        worst = max(worst, abs(logprob - other_logprob))
        if token != other_token:
            break
    return worst


def same(one: Answer, other: Answer) -> bool:
    return one.token_ids == other.token_ids and gap(one, other) < FLOAT_NOISE


def mixed_and_alone(server: EngineServer, models: list[str]) -> tuple[list[Answer], list[Answer]]:
    """Answers to several requests of every model, asked one by one and then all at once in interleaved order."""
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


def test_stock_kernels_give_base_requests_an_adapters_answer(
    stock_server: EngineServer, tmp_path: Path
) -> None:
    """The fault that the plugin is there for. When this fails, vLLM is mended and the plugin is for speed alone.

    Several rounds, because whether a base request meets an adapter's in a step is up to the server's timing.
    """
    one, two = publish(stock_server, tmp_path, seed=1), publish(stock_server, tmp_path, seed=2)
    wrong_base = False
    for _ in range(MAX_ROUNDS):
        mixed, alone = mixed_and_alone(stock_server, [stock_server.base, one.name, two.name])
        wrong = [gap(m, a) > DIFFERENT for m, a in zip(mixed, alone, strict=True)]
        assert not any(wrong[1::3] + wrong[2::3])
        wrong_base = wrong_base or any(wrong[0::3])
        if wrong_base:
            break
    assert wrong_base, "no base request was changed by the adapters it shared batches with"


def test_plugin_and_stock_kernels_agree_on_one_adapter(
    server: EngineServer, stock_server: EngineServer, tmp_path: Path
) -> None:
    ours, theirs = (
        publish(server, tmp_path / "ours", seed=3),
        publish(stock_server, tmp_path / "theirs", seed=3),
    )
    assert same(server.ask(Ask(ours.name, PROMPT)), stock_server.ask(Ask(theirs.name, PROMPT)))


def test_embedding_and_head_adapters_in_a_mixed_batch(tiny_llama: Path, tmp_path: Path) -> None:
    """A server that reserves LoRA for every layer. The second adapter changes nothing but the embedding and the head."""
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


def test_nothing_is_served_from_an_older_versions_cache(server: EngineServer, tmp_path: Path) -> None:
    """Version 2 must answer a prompt, cached under version 1, exactly as version 2's weights do with an empty cache."""
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


def rank_too_large(folder: Path, model: Path) -> Path:
    return write_random_adapter(folder, model, rank=2 * MAX_LORA_RANK)


def truncated(folder: Path, model: Path) -> Path:
    weights = write_random_adapter(folder, model) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    return folder


def missing_folder(folder: Path, model: Path) -> Path:
    return folder


def missing_weights(folder: Path, model: Path) -> Path:
    (write_random_adapter(folder, model) / "adapter_model.safetensors").unlink()
    return folder


def wrong_shapes(folder: Path, model: Path) -> Path:
    weights = write_random_adapter(folder, model) / "adapter_model.safetensors"
    save_file(
        {
            name: tensor.repeat(1, 2) if "lora_A" in name else tensor
            for name, tensor in load_file(weights).items()
        },
        weights,
    )
    return folder


def unknown_modules(folder: Path, model: Path) -> Path:
    weights = write_random_adapter(folder, model) / "adapter_model.safetensors"
    save_file(
        {name.replace("q_proj", "query"): tensor for name, tensor in load_file(weights).items()}, weights
    )
    return folder


@pytest.mark.parametrize(
    "damage", [rank_too_large, truncated, missing_folder, missing_weights, wrong_shapes, unknown_modules]
)
def test_bad_adapter_is_refused_and_the_engine_serves_on(
    server: EngineServer, tmp_path: Path, damage
) -> None:
    good = publish(server, tmp_path, seed=1)
    before = [server.ask(Ask(name, PROMPT)) for name in (server.base, good.name)]
    bad = f"bad-{damage.__name__}"
    assert server.load(bad, damage(tmp_path / "bad", server.model_path)).is_error
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        server.ask(Ask(bad, PROMPT))
    after = server.ask_together(
        [Ask(name, PROMPT, salt=damage.__name__) for name in (server.base, good.name)]
    )
    assert all(same(b, a) for b, a in zip(before, after, strict=True))
    assert gap(*after) > DIFFERENT


def sampled(server: EngineServer, sampling: Sampling) -> list[Sample]:
    """Eight completions of the base, through the client that runs use."""

    async def ask() -> list[Sample]:
        client = Engine(VllmClient("vllm-test", server.uds))
        try:
            return await client.generate(server.base, PROMPT, 8, sampling, version=0)
        finally:
            await client.aclose()

    return asyncio.run(ask())


def logits_of(model_path: Path, completion: Sample) -> torch.Tensor:
    """[C, vocabulary] that the completion's tokens were drawn from, as transformers computes them."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([PROMPT + completion.completion_token_ids])).logits[
            0, len(PROMPT) - 1 : -1
        ]
    return logits


def cut(logits: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """-inf but for the fewest likeliest of the `top_k` likeliest tokens that hold `top_p` of those together."""
    kept = torch.full_like(logits, -torch.inf)
    for row, out in zip(logits, kept, strict=True):
        values, tokens = row.topk(top_k)
        held = torch.softmax(values, dim=0).cumsum(dim=0)
        count = int((held < top_p).sum()) + 1
        out[tokens[:count]] = values[:count]
    return kept


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 1.0, 0), (0.7, 0.8, 5)])
def test_logprobs_are_those_of_the_distribution_tokens_were_drawn_from(
    server: EngineServer, temperature: float, top_p: float, top_k: int
) -> None:
    """After temperature, top-k and top-p, renormalised: what an importance weight must be computed with."""
    sampling = Sampling(
        temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=32, stop_token_ids=(), seed=5
    )
    raw_gap = 0.0
    for completion in sampled(server, sampling):
        logits, tokens = (
            logits_of(server.model_path, completion),
            torch.tensor(completion.completion_token_ids)[:, None],
        )
        drawn_from = logits / temperature if top_k == 0 else cut(logits / temperature, top_p, top_k)
        logprobs = torch.tensor(completion.rollout_logprobs)
        torch.testing.assert_close(
            logprobs, torch.log_softmax(drawn_from, dim=1).gather(1, tokens)[:, 0], atol=FLOAT_NOISE, rtol=0
        )
        raw_gap = max(
            raw_gap, float((logprobs - torch.log_softmax(logits, dim=1).gather(1, tokens)[:, 0]).abs().max())
        )
    assert (raw_gap > DIFFERENT) == (temperature != 1), "the raw logprobs would have passed too"


def test_the_canarys_logprobs_know_no_temperature(server: EngineServer) -> None:
    """prompt_logprobs, on the same server, stay those of the model at temperature 1."""

    async def ask() -> list[float]:
        client = VllmClient("vllm-test", server.uds)
        try:
            return await client.prompt_logprobs(server.base, PROMPT)
        finally:
            await client.aclose()

    model = AutoModelForCausalLM.from_pretrained(server.model_path, dtype=torch.float32)
    with torch.no_grad():
        table = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0, :-1], dim=1)
    expected = table.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(asyncio.run(ask())), expected, atol=FLOAT_NOISE, rtol=0)
