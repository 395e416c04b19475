"""Generated bad vLLM replies give one error sentence. The replies are the same in every run.

Replies are truncated, slow, of wrong types or lengths, or have an error status.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from skylite.engine.vllm.client import VllmClient
from skylite.errors import RunFailed
from skylite.run.run_dir import AdapterVersion
from skylite.types import Call, EncodedPrompt
from tests.unit.bad_inputs import damaged_bytes, damaged_json
from tests.unit.bad_server import Behaviour, ask_for, choice, talk
from tests.unit.fuzzing import FACTOR, generated

counts: Counter[str] = Counter()
"""Number of replies by outcome."""
COUNTERS = "vllm:prompt_tokens_total 5\nvllm:generation_tokens_total 7\n"
STATUSES = (100, 101, 204, 206, 301, 302, 400, 401, 404, 413, 429, 500, 502, 503, 599, 999)
TIMEOUT_S = 0.3
ASKS: dict[str, tuple[Any, Callable[[VllmClient], Awaitable[Any]]]] = {
    "sample": ({"model": "m", "choices": [choice(0), choice(1)]}, ask_for(2)),
    "score": (
        {"choices": [{"prompt_logprobs": [None, {"8": {"logprob": -1.5}}, {"9": {"logprob": -2.5}}]}]},
        lambda client: client.score("m", EncodedPrompt([7, 8, 9])),
    ),
    "load": ({}, lambda client: client.load_adapter(AdapterVersion(1, Path("/nowhere")))),
    "unload": ({}, lambda client: client.unload_adapter("policy-v000001")),
    "count": (COUNTERS, lambda client: client.progress()),
}
"""By request: the body of a good reply, and the request."""


def http(body: bytes, status: int = 200, length: int | None = None) -> bytes:
    return (
        f"HTTP/1.1 {status} X\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n".encode()
        + body
    )


@st.composite
def replies(draw: st.DrawFn, good: Any) -> bytes:
    """A complete HTTP reply with something wrong in it."""
    body = good.encode() if isinstance(good, str) else json.dumps(good).encode()
    kind = draw(st.sampled_from(["body", "body", "status", "length", "bytes"]))
    if kind == "body":
        return http(draw(damaged_bytes(body) if isinstance(good, str) else damaged_json(good)))
    if kind == "status":
        return http(body, draw(st.sampled_from(STATUSES)))
    if kind == "length":
        return http(body, length=max(0, len(body) + draw(st.sampled_from([-9, -1, 1, 10**6, 10**18]))))
    return draw(damaged_bytes(http(body)))


def sends(reply: bytes, pause_s: float) -> Behaviour:
    """Send the reply in two parts with a pause between them."""

    async def behave(writer: asyncio.StreamWriter, _: int) -> None:
        writer.write(reply[: len(reply) // 2])
        await asyncio.sleep(pause_s)
        writer.write(reply[len(reply) // 2 :])

    return behave


@generated(300)
@given(
    asked=st.sampled_from(sorted(ASKS)),
    data=st.data(),
    pause_s=st.sampled_from([0.0] * 20 + [0.01, 2 * TIMEOUT_S]),
)
def test_replies(tmp_path_factory: Any, asked: str, data: st.DataObject, pause_s: float) -> None:
    good, ask = ASKS[asked]
    reply, began = data.draw(replies(good)), time.monotonic()
    try:
        answer = asyncio.run(talk(tmp_path_factory.mktemp("s"), sends(reply, pause_s), ask, TIMEOUT_S))
    except RunFailed as error:
        counts["refused" if error.what.startswith("engine-0 ") else "without words"] += 1
    else:
        assert usable(asked, answer), answer
        counts["accepted"] += 1
    assert time.monotonic() - began < 5


def usable(asked: str, answer: Any) -> bool:
    """Whether the answer has the requested form."""
    if asked == "sample":
        found: list[Call] = [call for call in answer if call is not None]
        return len(answer) == 2 and all(
            len(c.completion_token_ids) == len(c.sampling_logprobs)
            and all(map(math.isfinite, c.sampling_logprobs))
            for c in found
        )
    if asked == "score":
        return len(answer) == 2 and all(map(math.isfinite, answer))
    return answer is None or math.isfinite(answer)


def test_most_replies_were_bad() -> None:
    print(f"bad replies: {counts['refused']} refused with a reason, {counts['accepted']} accepted as valid")
    assert FACTOR < 1 or counts["refused"] >= 100
    assert counts["without words"] == 0
