"""Which logprobs a vLLM CPU server returns: those of the distribution that it sampled from."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from skylite.engine.interface import Sampling
from skylite.engine.retrying_engine import RetryingEngine
from skylite.engine.vllm.client import VllmClient
from skylite.types import Call, EncodedPrompt
from tests.adapter_forms import SEQUENCES, publish
from tests.engines import EngineServer
from tests.integration.adapter_versions import DIFFERENT, FLOAT_NOISE, PROMPT

pytestmark = pytest.mark.vllm


def sampled(server: EngineServer, sampling: Sampling) -> list[Call]:
    """Eight completions of the base, through the client that runs use."""

    async def ask() -> list[Call]:
        client = RetryingEngine(VllmClient("vllm-test", server.address))
        try:
            return await client.generate(server.base, EncodedPrompt(PROMPT), 8, sampling, version=0)
        finally:
            await client.aclose()

    return asyncio.run(ask())


def logits_of(model_path: Path, completion: Call) -> torch.Tensor:
    """[C, vocabulary] that the completion's tokens were drawn from, as transformers computes them."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([PROMPT + completion.completion_token_ids])).logits[
            0, len(PROMPT) - 1 : -1
        ]
    return logits


def cut(logits: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """Logits with -inf for every token that top-k, then top-p would not sample."""
    kept = torch.full_like(logits, -torch.inf)
    for row, out in zip(logits, kept, strict=True):
        values, tokens = row.topk(top_k)
        held = torch.softmax(values, dim=0).cumsum(dim=0)
        count = int((held < top_p).sum()) + 1
        out[tokens[:count]] = values[:count]
    return kept


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 1.0, 0), (0.7, 0.8, 5)])
def test_logprobs_are_of_the_distribution_that_tokens_were_sampled_from(
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
        logprobs = torch.tensor(completion.sampling_logprobs)
        torch.testing.assert_close(
            logprobs, torch.log_softmax(drawn_from, dim=1).gather(1, tokens)[:, 0], atol=FLOAT_NOISE, rtol=0
        )
        raw_gap = max(
            raw_gap, float((logprobs - torch.log_softmax(logits, dim=1).gather(1, tokens)[:, 0]).abs().max())
        )
    assert (raw_gap > DIFFERENT) == (temperature != 1), "the raw logprobs would have passed too"


def test_the_canarys_logprobs_ignore_the_temperature(server: EngineServer) -> None:
    """prompt_logprobs, on the same server, stay those of the model at temperature 1."""

    async def ask() -> list[float]:
        client = VllmClient("vllm-test", server.address)
        try:
            return await client.score(server.base, EncodedPrompt(PROMPT))
        finally:
            await client.aclose()

    model = AutoModelForCausalLM.from_pretrained(server.model_path, dtype=torch.float32)
    with torch.no_grad():
        table = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0, :-1], dim=1)
    expected = table.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(asyncio.run(ask())), expected, atol=FLOAT_NOISE, rtol=0)


def test_a_stop_text_ends_the_completion_and_keeps_its_token_ids(server: EngineServer) -> None:
    """The same seed gives the same tokens up to the one that completes the text."""
    free = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=32, stop_token_ids=(), seed=5)
    for index, whole in enumerate(sampled(server, free)):
        middle = len(whole.text) // 2
        stop = whole.text[middle : middle + 2]
        short = sampled(server, dataclasses.replace(free, stop=(stop,)))[index]
        end = len(short.completion_token_ids)
        assert short.completion_token_ids == whole.completion_token_ids[:end]
        assert short.sampling_logprobs == pytest.approx(whole.sampling_logprobs[:end], abs=FLOAT_NOISE)
        assert short.text == whole.text[: whole.text.index(stop) + len(stop)]
        assert short.finish_reason == "stop"
        assert end < len(whole.completion_token_ids)


@pytest.mark.parametrize("form", ["plain", "rslora", "ranks and alphas", "one layer, by wildcard"])
def test_a_served_adapter_has_the_logprobs_of_its_trainer(
    server: EngineServer, form: str, tmp_path: Path
) -> None:
    adapter, expected = publish(form, server.model_path, tmp_path)
    assert server.load(tmp_path.name, adapter).status_code == httpx.codes.OK

    async def ask() -> list[list[float]]:
        client = RetryingEngine(VllmClient("vllm-test", server.address))
        try:
            return [await client.score(tmp_path.name, EncodedPrompt(ids)) for ids in SEQUENCES]
        finally:
            await client.aclose()

    for got, logprobs in zip(asyncio.run(ask()), expected, strict=True):
        assert got == pytest.approx(logprobs, abs=1e-5)
