"""The episodes' server over HTTP: OpenAI's form of requests, replies and errors, and what it records."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from skylite.environments import openai_server
from skylite.environments.episodes_source import Episodes
from skylite.environments.openai_server import OpenAIServer, _unless_disconnected
from skylite.environments.parse_reply import ParsedReply, parse_reply
from skylite.environments.trajectory_log import TrajectoryLog
from skylite.errors import EngineFailed
from tests.unit.environment_cases import ScriptedEngine, environment, to_text

NOTHING = "async def episode(task, chat): return 0.0"
HELLO = [{"role": "user", "content": "hello"}]
Visit = Callable[[Episodes], Awaitable[None]]


def visit(folder: Path, body: Visit, **env: Any) -> None:
    """Run `body` while an environment serves."""

    async def run() -> None:
        async with environment(folder, NOTHING, **env) as running:
            await body(running)

    asyncio.run(run())


def open_log(server: OpenAIServer, engine: ScriptedEngine, seed: int = 1) -> tuple[TrajectoryLog, str]:
    served: Any = engine
    log = TrajectoryLog(
        name="p0", model="policy-v000003", version=3, engine=served, seed=seed, temperature=1.0
    )
    return log, server.open(log)


async def post(server: OpenAIServer, key: str, body: Any, **options: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        url = f"{server.base_url}/chat/completions"
        return await client.post(url, content=content, headers={"Authorization": f"Bearer {key}"}, **options)


def test_an_openai_client_works_as_with_openai(tmp_path: Path) -> None:
    async def body(running: Episodes) -> None:
        server, engine = running.server, ScriptedEngine(lambda p: "good day")
        log, key = open_log(server, engine)
        client: Any = openai.AsyncOpenAI(base_url=server.base_url, api_key=key)
        assert [m.id async for m in await client.models.list()] == ["policy-v000003"]
        reply = await client.chat.completions.create(model="gpt-4o", messages=HELLO, max_tokens=40)
        assert reply.choices[0].message.content == "good day"
        assert (reply.model, reply.choices[0].finish_reason) == ("policy-v000003", "stop")
        assert reply.usage is not None
        assert reply.usage.completion_tokens == len(log.calls[0].call.completion_token_ids)
        stream = await client.chat.completions.create(
            model="x",
            messages=HELLO,
            stream=True,
            stream_options={"include_usage": True},
        )
        parts = [chunk async for chunk in stream]
        assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == "good day"
        assert [p.choices[0].finish_reason for p in parts if p.choices][-1] == "stop"
        assert parts[-1].usage is not None
        assert len(log.calls) == 2
        await client.close()

    visit(tmp_path, body)


def test_ctrl_c_is_heard_while_a_long_reply_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = threading.Event()

    def slow(*args: Any, **options: Any) -> ParsedReply:
        os.kill(os.getpid(), signal.SIGINT)
        assert heard.wait(10), "the event loop waits for the parser"
        return parse_reply(*args, **options)

    async def body(running: Episodes) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, heard.set)
        _, key = open_log(running.server, ScriptedEngine(lambda p: "good day"))
        reply = await post(running.server, key, {"model": "x", "messages": HELLO})
        assert reply.status_code == 200, reply.text

    monkeypatch.setattr(openai_server, "LONG_REPLY", 4)
    monkeypatch.setattr(openai_server, "parse_reply", slow)
    visit(tmp_path, body)


@pytest.mark.parametrize("stop", ["Observation:", ["nothing", "Observation:"]])
def test_a_stop_text_ends_the_reply_and_stays_in_what_is_trained(tmp_path: Path, stop: Any) -> None:
    """Agents in ReAct's form stop the model where the tool's answer follows."""

    async def body(running: Episodes) -> None:
        server = running.server
        engine = ScriptedEngine(lambda p: "Action: add\nObservation: I make this up")
        log, key = open_log(server, engine)
        client: Any = openai.AsyncOpenAI(base_url=server.base_url, api_key=key)
        reply = await client.chat.completions.create(model="x", messages=HELLO, stop=stop)
        message = reply.choices[0].message
        assert (message.content, reply.choices[0].finish_reason) == ("Action: add", "stop")
        first = log.calls[0].call
        assert to_text(first.completion_token_ids) == "Action: add\nObservation:"
        told = {"role": "user", "content": " 5"}
        await client.chat.completions.create(
            model="x", messages=[*HELLO, {"role": "assistant", "content": message.content}, told]
        )
        known = [*first.prompt_token_ids, *first.completion_token_ids]
        assert log.calls[1].call.prompt_token_ids[: len(known)] == known
        assert engine.samplings[1].stop == ()
        await client.close()

    visit(tmp_path, body)


def test_the_unix_socket_serves_too(tmp_path: Path) -> None:
    async def body(running: Episodes) -> None:
        server = running.server
        _, key = open_log(server, ScriptedEngine())
        transport = httpx.AsyncHTTPTransport(uds=str(server.socket_path))
        async with httpx.AsyncClient(transport=transport) as client:
            reply = await client.get("http://x/v1/models", headers={"Authorization": f"Bearer {key}"})
        assert reply.status_code == 200
        assert server.socket_path.parent.stat().st_mode & 0o777 == 0o700

    visit(tmp_path, body)


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"n": 2}, 400, "n=2"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, 400, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400,
         "image_url"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty"),
        ({"logprobs": True}, 400, "logprobs"),
        ({"tools": [{"type": "retrieval"}]}, 400, "tools"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"audio": {}}, 400, "audio"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"stop": ""}, 400, "stop"),
        ({"stop": [5]}, 400, "stop"),
        ({"reasoning_effort": "low"}, 400, "reasoning_effort"),
        (b"{" * 5000, 400, "JSON"),
        (b"", 400, "JSON"),
        (b"[1]", 400, ""),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_offered_is_refused_in_openais_form(
    shared: SharedServer, change: Any, status: int, words: str
) -> None:
    request = change if isinstance(change, bytes) else {"model": "m", "messages": HELLO, **change}
    reply, log = shared.post(request)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]
    assert log.calls == []


def test_a_huge_limit_and_other_sampling_are_replaced_and_noted(shared: SharedServer) -> None:
    reply, log = shared.post({"messages": HELLO, "max_tokens": 10**9, "temperature": 0.1, "top_p": 0.5})
    assert reply.status_code == 200
    assert log.notes == {"temperature", "top_p"}
    assert shared.engine.samplings[-1].temperature == 1.0
    assert shared.engine.samplings[-1].max_tokens == 64


@pytest.mark.parametrize("key", ["sk-guess", "Bearer"])
def test_a_wrong_key_is_refused(shared: SharedServer, key: str) -> None:
    assert shared.post({"messages": HELLO}, key=key)[0].status_code == 401


def test_a_key_ends_with_its_trajectory(shared: SharedServer) -> None:
    reply, log = shared.post({"messages": HELLO}, close_first=True)
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    assert log.calls == []


def test_a_body_that_is_too_large_is_refused(shared: SharedServer) -> None:
    huge = json.dumps({"messages": [{"role": "user", "content": "x" * (17 << 20)}]}).encode()
    assert shared.post(huge)[0].status_code == 413


def test_a_prompt_without_room_ends_the_trajectory(shared: SharedServer) -> None:
    reply, log = shared.post({"messages": [{"role": "user", "content": "x" * 5000}]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert log.end == "tokens"


class SharedServer:
    """One server for many tests, in an event loop of its own."""

    def __init__(self, folder: Path) -> None:
        self.engine = ScriptedEngine()
        self._runner = asyncio.Runner()
        self._context = environment(folder, NOTHING)
        self._running = self._runner.run(self._context.__aenter__())

    def post(
        self, body: Any, key: str | None = None, *, close_first: bool = False
    ) -> tuple[httpx.Response, TrajectoryLog]:
        server = self._running.server
        log, own = open_log(server, self.engine)
        if close_first:
            server.close(own)
        reply = self._runner.run(post(server, own if key is None else key, body))
        server.close(own)
        return reply, log

    def close(self) -> None:
        self._runner.run(self._context.__aexit__(None, None, None))
        self._runner.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    server = SharedServer(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


def test_a_reply_that_nobody_reads_is_not_recorded(tmp_path: Path) -> None:
    async def body(running: Episodes) -> None:
        engine = ScriptedEngine(delay_s=3.0)
        log, key = open_log(running.server, engine)
        with pytest.raises(httpx.ReadTimeout):
            await post(running.server, key, {"messages": HELLO}, timeout=0.5)
        await asyncio.sleep(4)
        assert (len(engine.prompts), len(engine.replies), log.calls) == (1, 0, [])

    visit(tmp_path, body)


def test_a_reply_that_is_ready_when_its_reader_goes_is_not_recorded() -> None:
    async def both(failure: EngineFailed | None) -> Any:
        async def gone() -> dict[str, str]:
            return {"type": "http.disconnect"}

        async def answer() -> Any:
            if failure is not None:
                raise failure
            return "a call", "a reply"

        request: Any = SimpleNamespace(receive=gone)
        return await _unless_disconnected(request, answer())

    assert asyncio.run(both(None)) is None
    with pytest.raises(EngineFailed, match="broke"):  # an engine's failure is never lost
        asyncio.run(both(EngineFailed("engine 0 broke.")))


def test_a_failed_engine_fails_the_trajectory(tmp_path: Path) -> None:
    async def body(running: Episodes) -> None:
        def fail(prompt: str) -> str:
            raise EngineFailed("engine-0 is gone.")

        log, key = open_log(running.server, ScriptedEngine(fail))
        reply = await post(running.server, key, {"messages": HELLO})
        assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
        assert isinstance(log.failure, EngineFailed)
        assert log.failed.is_set()

    visit(tmp_path, body)


def test_parallel_calls_get_seeds_of_their_prompts(tmp_path: Path) -> None:
    """The order of arrival does not matter; a repeated prompt gets another seed."""

    async def body(running: Episodes) -> None:
        found = []
        for order in ((0, 1, 2), (2, 0, 1)):
            engine = ScriptedEngine()
            _, key = open_log(running.server, engine, seed=5)
            for i in order:
                await post(running.server, key, {"messages": [{"role": "user", "content": str(i)}]})
            await post(running.server, key, {"messages": [{"role": "user", "content": "0"}]})
            found.append(
                sorted((to_text(p), s.seed) for p, s in zip(engine.prompts, engine.samplings, strict=True))
            )
        assert found[0] == found[1]
        assert len({seed for _, seed in found[0]}) == 4

    visit(tmp_path, body)


def test_rewritten_history_makes_a_branch(tmp_path: Path) -> None:
    async def body(running: Episodes) -> None:
        engine = ScriptedEngine(lambda p: "first answer")
        log, key = open_log(running.server, engine)
        await post(running.server, key, {"messages": HELLO})
        changed = {"role": "assistant", "content": "a summary"}
        await post(running.server, key, {"messages": [*HELLO, changed, {"role": "user", "content": "on"}]})
        first, second = (c.call for c in log.calls)
        assert "a summary<|im_end|>" in to_text(second.prompt_token_ids)
        assert "first answer" not in to_text(second.prompt_token_ids)
        same = {"role": "assistant", "content": "first answer"}
        await post(running.server, key, {"messages": [*HELLO, same, {"role": "user", "content": "on"}]})
        third, known = log.calls[2].call, first.prompt_token_ids + first.completion_token_ids
        assert third.prompt_token_ids[: len(known)] == known

    visit(tmp_path, body)
