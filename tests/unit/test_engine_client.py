"""The client against a misbehaving server on a Unix socket: one clear error in bounded time."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from skylite.engine.interface import Sampling
from skylite.engine.retrying_engine import RetryingEngine
from skylite.errors import EngineDead, EngineFailed, RunFailed, SyncFailed
from skylite.run.run_dir import AdapterVersion
from skylite.types import Call, EncodedPrompt
from tests.unit.bad_server import SAMPLING, Behaviour, ask_for, choice, talk


def replies(value: Any, status: int = 200, more: str = "") -> Behaviour:
    """A complete HTTP reply. Text and bytes are sent unchanged, other values as JSON."""
    body = (
        value
        if isinstance(value, bytes)
        else (value if isinstance(value, str) else json.dumps(value)).encode()
    )

    async def behave(writer: asyncio.StreamWriter, _: int) -> None:
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body)

    return behave


def sampled(*choices: dict[str, Any], model: str = "m") -> Behaviour:
    return replies({"model": model, "choices": list(choices)})


async def close(writer: asyncio.StreamWriter, _: int) -> None:
    """Send nothing."""


async def half(writer: asyncio.StreamWriter, _: int) -> None:
    writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\n{"model": "m", "choi')


async def garbage(writer: asyncio.StreamWriter, _: int) -> None:
    writer.write(b"\x00\xff not http\r\n\r\n")


async def silence(writer: asyncio.StreamWriter, _: int) -> None:
    await asyncio.sleep(20)


async def drops(writer: asyncio.StreamWriter, _: int) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\n")
    for _ in range(400):
        writer.write(b" ")
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("behave", "kind", "words"),
    [
        (close, EngineFailed, "no complete reply to /v1/completions"),
        (half, EngineFailed, "no complete reply to /v1/completions"),
        (garbage, EngineFailed, "no complete reply to /v1/completions"),
        (silence, EngineFailed, "did not answer /v1/completions within 1 s"),
        (drops, EngineFailed, "did not answer /v1/completions within 1 s"),
        (replies("oops", 500), EngineFailed, "with 500: oops"),
        (replies({"error": {"message": "EngineDead"}}, 503), EngineFailed, "with 503: EngineDead"),
        (replies({"error": {"message": "no such model"}}, 404), EngineFailed, "with 404: no such model"),
        (replies(b"\xff\xfe"), EngineFailed, "malformed reply"),
        (replies(b"ab", more="Content-Encoding: gzip\r\n"), EngineFailed, "no complete reply"),
        (replies(""), EngineFailed, "malformed reply"),
        (replies("[1, 2"), EngineFailed, "malformed reply to /v1/completions: body: Invalid JSON"),
        (replies([1]), EngineFailed, "malformed reply"),
        (replies({"model": "m"}), EngineFailed, "choices: Field required"),
        (replies({"model": "m", "choices": {}}), EngineFailed, "choices: Input should be a valid array"),
        (sampled(choice(), model="base"), SyncFailed, "sampled from base instead of m"),
        (sampled(choice(), choice()), EngineFailed, r"indices \[0, 0\] for n=2"),
        (sampled(choice(2)), EngineFailed, r"indices \[2\] for n=2"),
        (sampled(choice(-1)), EngineFailed, r"indices \[-1\]"),
        (sampled(choice(prompt=[7])), EngineFailed, "another prompt than it was sent: 1 tokens instead of 2"),
        (sampled(choice(prompt=[7, 9])), EngineFailed, "another prompt .* token 1 is 9 instead of 8"),
        (sampled(choice(prompt_token_ids=None)), EngineFailed, "prompt_token_ids: Input should be a valid"),
        (sampled(choice(token_ids=[1])), EngineFailed, "1 tokens with 2 logprobs"),
        (sampled(choice(token_ids=[])), EngineFailed, "token_ids: List should have at least 1 item"),
        (sampled(choice(token_ids=["1", 2])), EngineFailed, "token_ids.0: Input should be a valid integer"),
        (
            sampled(choice(token_ids=[1] * 5, logprobs={"token_logprobs": [-1.0] * 5})),
            EngineFailed,
            "5 tokens with 5 logprobs for max_tokens=4",
        ),
        (sampled(choice(logprobs=None)), EngineFailed, "logprobs"),
        (sampled(choice(logprobs={"token_logprobs": [None, -1.0]})), EngineFailed, "token_logprobs.0"),
        (sampled(choice(logprobs={"token_logprobs": [float("nan"), -1.0]})), EngineFailed, "finite number"),
        (sampled(choice(finish_reason="repetition")), EngineFailed, "finish_reason"),
        (sampled(choice(text=5)), EngineFailed, "text"),
    ],
)
def test_a_bad_reply_gives_one_clear_error(
    tmp_path: Path, behave: Behaviour, kind: type[RunFailed], words: str
) -> None:
    began = time.monotonic()
    with pytest.raises(kind, match=words) as caught:
        asyncio.run(talk(tmp_path, behave, ask_for(2)))
    assert time.monotonic() - began < 5
    assert caught.value.what.startswith("engine-0 ")


def test_completions_that_vllm_aborted_are_left_out(tmp_path: Path) -> None:
    aborted = {"index": 0, "text": "", "token_ids": [], "logprobs": None, "finish_reason": "abort"}
    found = asyncio.run(talk(tmp_path, sampled(aborted, choice(1)), ask_for(2)))
    assert [index for index, call in enumerate(found) if call is not None] == [1]
    assert (found[1].completion_token_ids, found[1].sampling_logprobs, found[1].adapter_version) == (
        [1, 2],
        [-1.0, -2.0],
        3,
    )


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [None],
        [None, {"8": {"logprob": -1.0}}, None],
        [None, {"9": {"logprob": -1.0}}],
        [None, {"8": {"logprob": "x"}}],
    ],
)
def test_canary_logprobs_of_the_wrong_shape_are_an_error(tmp_path: Path, rows: list[Any]) -> None:
    with pytest.raises(EngineFailed, match="engine-0"):
        asyncio.run(
            talk(
                tmp_path,
                replies({"choices": [{"prompt_logprobs": rows}]}),
                lambda c: c.score("m", EncodedPrompt([7, 8])),
            )
        )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"choices": [{"prompt_logprobs": []}]}, r"0 logprobs for a prompt of 2 tokens; expected 1\.$"),
        ({"choices": []}, "choices: List should have at least 1 item"),
    ],
)
def test_a_score_without_logprobs_names_what_is_missing(tmp_path: Path, body: Any, words: str) -> None:
    with pytest.raises(EngineFailed) as caught:
        asyncio.run(talk(tmp_path, replies(body), lambda c: c.score("m", EncodedPrompt([7, 8]))))
    assert caught.match(words)


def test_a_refused_adapter_is_not_mistaken_for_a_dead_engine(tmp_path: Path) -> None:
    """vLLM answers both with status 500."""
    adapter = AdapterVersion(1, tmp_path)

    def answers(health: int) -> Behaviour:
        async def behave(writer: asyncio.StreamWriter, number: int) -> None:
            await replies({"error": {"message": "rank 64"}}, 500 if number == 0 else health)(writer, number)

        return behave

    with pytest.raises(SyncFailed, match="refused adapter policy-v000001: rank 64"):
        asyncio.run(talk(tmp_path, answers(200), lambda c: c.load_adapter(adapter)))
    with pytest.raises(EngineFailed, match="refused adapter policy-v000001: rank 64"):
        asyncio.run(talk(tmp_path, answers(503), lambda c: c.load_adapter(adapter)))


def test_a_server_that_reports_itself_dead_or_has_no_metrics(tmp_path: Path) -> None:
    with pytest.raises(EngineDead, match="503"):
        asyncio.run(talk(tmp_path, replies("", 503), lambda c: c.progress()))
    with pytest.raises(EngineFailed, match="does not count its tokens"):
        asyncio.run(talk(tmp_path, replies("nothing"), lambda c: c.progress()))
    for count in ("1e999", "NaN", "1.2.3"):
        text = f"vllm:prompt_tokens_total {count}\n"
        with pytest.raises(EngineFailed, match=f"as {count}, which is not a finite number"):
            asyncio.run(talk(tmp_path, replies(text), lambda c: c.progress()))


def test_retries_are_bounded_and_a_good_reply_after_bad_ones_counts(tmp_path: Path) -> None:
    async def attempts(good_from: int) -> tuple[int, list[Any]]:
        last = -1

        async def behave(writer: asyncio.StreamWriter, number: int) -> None:
            nonlocal last
            last = number
            await (sampled(choice(prompt=[7])) if number >= good_from else close)(writer, number)

        try:
            got = await talk(
                tmp_path,
                behave,
                lambda c: RetryingEngine(c, backoff_s=(0.01, 0.02)).generate(
                    "m", EncodedPrompt([7]), 1, SAMPLING, 3
                ),
            )
        except EngineFailed:
            got = []
        return last + 1, got

    assert asyncio.run(attempts(2))[0] == 3
    assert len(asyncio.run(attempts(2))[1]) == 1
    assert asyncio.run(attempts(9)) == (3, [])


def test_a_refusal_is_not_retried(tmp_path: Path) -> None:
    count = 0

    async def behave(writer: asyncio.StreamWriter, number: int) -> None:
        nonlocal count
        count += 1
        await replies({"error": {"message": "too long"}}, 400)(writer, number)

    with pytest.raises(RunFailed, match="too long"):
        asyncio.run(
            talk(
                tmp_path,
                behave,
                lambda c: RetryingEngine(c, backoff_s=(0.01,)).generate(
                    "m", EncodedPrompt([7]), 1, SAMPLING, 3
                ),
            )
        )
    assert count == 1


class LosingClient:
    """Loses some completions. Answers with the seed of each: vLLM uses seed + i for sample i of a request."""

    name = "engine-0"

    def __init__(self, *found: set[int]) -> None:
        self.found, self.asked = list(found), list[tuple[int, int]]()

    async def generate(
        self, model: str, prompt: EncodedPrompt, n: int, sampling: Sampling, version: int
    ) -> list[Call | None]:
        self.asked.append((n, sampling.seed))
        found = self.found.pop(0)
        calls = (
            Call(
                prompt_token_ids=list(prompt.token_ids), completion_token_ids=[sampling.seed + i],
                sampling_logprobs=[-1.0], finish_reason="stop", adapter_version=version, text="",
            )
            for i in range(n)
        )  # fmt: skip
        return [call if i in found else None for i, call in enumerate(calls)]


def test_a_completion_that_was_lost_is_sampled_again_with_its_own_seed() -> None:
    """With the first one's seed the group would hold one completion twice."""
    client = LosingClient({0, 2}, set(), {0}, {0})
    engine = RetryingEngine(client, (0.0, 0.0))  # type: ignore[arg-type]
    samples = asyncio.run(engine.generate("m", EncodedPrompt([7]), 4, SAMPLING, 3))
    assert [s.completion_token_ids for s in samples] == [[40], [41], [42], [43]]
    assert client.asked == [(4, 40), (1, 41), (1, 43), (1, 41)]


def test_a_group_with_missing_completions_fails_with_a_reason(tmp_path: Path) -> None:
    aborted = {"index": 0, "finish_reason": "abort"}
    with pytest.raises(RunFailed, match="returned 0 of 1 completions"):
        asyncio.run(
            talk(
                tmp_path,
                sampled(aborted),
                lambda c: RetryingEngine(c, backoff_s=(0.01,)).generate(
                    "m", EncodedPrompt([7]), 1, SAMPLING, 3
                ),
            )
        )
