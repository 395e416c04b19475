"""An OpenAI-compatible server that records the calls of episodes as token ids.

Each trajectory has its own key. A request becomes token ids once: where it continues a recorded call, the
sampled ids are kept and only the new messages are rendered. So the trainer learns from the very ids that the
engine was given and sampled. The server listens on 127.0.0.1 and on a Unix socket, for this user only.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from skylite.config.train import TrainConfig
from skylite.engine.connections import HEADER_BYTES
from skylite.engine.interface import Sampling
from skylite.environments.chat_request import ApiError, ChatMessage, ChatRequest, parse_request
from skylite.environments.parse_reply import parse_reply
from skylite.environments.renderer import Renderer
from skylite.environments.trajectory_log import AnsweredRequest, TrajectoryLog, told_since_reply
from skylite.errors import SkyliteError
from skylite.processes.http_server import serving
from skylite.processes.own_peers import OwnPeersProtocol
from skylite.types import Call, EncodedPrompt, End
from skylite.untrusted_text import plain

logger = logging.getLogger(__name__)
MAX_BODY_BYTES = 16 << 20
LONG_REPLY = 1 << 16
"""Characters from which on a reply is parsed in a thread: other requests and Ctrl-C do not wait for it."""
MAX_CONNECTIONS = 4096
"""More get status 503."""


@dataclass(slots=True, kw_only=True)
class OpenAIServer:
    """The server and the trajectories that are running."""

    config: TrainConfig
    renderer: Renderer
    stop_token_ids: tuple[int, ...]
    stops: Sequence[str]
    """Texts of the stop tokens."""
    tool_format: str
    socket_path: Path
    base_url: str = ""
    """For clients; set once the server listens."""
    _trajectories: dict[str, TrajectoryLog] = field(default_factory=dict)

    def open(self, log: TrajectoryLog) -> str:
        """Start a trajectory. Returns its key."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._trajectories[key] = log
        return key

    def close(self, key: str) -> None:
        """End a trajectory: later requests with its key get status 401."""
        self._trajectories.pop(key, None)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve while the block runs."""
        with _sockets(self.socket_path) as (tcp, unix):
            routes = [
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/models", self._models),
            ]
            app = Starlette(routes=routes, exception_handlers={404: _no_such_path, 405: _no_such_path})
            self.base_url = f"http://127.0.0.1:{tcp.getsockname()[1]}/v1"
            async with serving(
                app,
                [tcp, unix],
                timeout_keep_alive=600,
                http=OwnPeersProtocol,
                h11_max_incomplete_event_size=HEADER_BYTES,
                limit_concurrency=MAX_CONNECTIONS,
            ):
                yield

    async def _models(self, request: Request) -> Response:
        try:
            log = self._trajectory(request)
        except ApiError as error:
            return JSONResponse(error.body(), status_code=error.status)
        model = {"id": log.model, "object": "model", "created": 0, "owned_by": "skylite"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Request) -> Response:
        try:
            log = self._trajectory(request)
            parsed = parse_request(await _body(request))
            answered = await _unless_disconnected(request, self._answer(log, parsed))
        except ApiError as error:
            return JSONResponse(error.body(), status_code=error.status)
        except SkyliteError as error:
            log.fail(error)
            return JSONResponse(ApiError(500, "engine_failed", error.what).body(), status_code=500)
        if answered is None:
            return Response(status_code=499)  # nobody reads it
        log.record(answered)
        if parsed.stream:
            events = reply_events(answered, log.model, with_usage=parsed.wants_usage)
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse(reply_body(answered, log.model))

    def _trajectory(self, request: Request) -> TrajectoryLog:
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        log = self._trajectories.get(key.strip()) if kind.lower() == "bearer" else None
        if log is None:
            raise ApiError(401, "invalid_api_key", "This key belongs to no running trajectory.")
        return log

    async def _answer(self, log: TrajectoryLog, request: ChatRequest) -> AnsweredRequest:
        limits, rollout = self.config.env, self.config.rollout
        if log.num_started >= limits.max_turns:
            raise _ended(
                log, "turns", f"The trajectory has used its {limits.max_turns} turns (env.max_turns)."
            )
        log.num_started += 1
        number = log.num_started
        log.notes.update(request.fixed_sampling)
        messages, tools = request.chat(), request.tool_schemas()
        ids, thinks = await self._prompt(log, messages, tools, request.chat_template_kwargs)
        room = limits.max_tokens - len(ids)
        if room < 1 or (not log.calls and len(ids) > rollout.max_prompt_tokens):
            raise _ended(
                log, "tokens", f"The prompt has {len(ids)} tokens, and env.max_tokens={limits.max_tokens} "
                f"and rollout.max_prompt_tokens={rollout.max_prompt_tokens} leave no room for a reply.",
            )  # fmt: skip
        max_tokens = min(room, rollout.max_completion_tokens, request.limit or room)
        call = await self._sample(log, ids, max_tokens, request.stop_texts)
        text = _before(await self.renderer.text(call.completion_token_ids), request.stop_texts)
        parse = partial(parse_reply, text, self.tool_format, self.stops, has_tools=bool(tools), thinks=thinks)
        parsed = parse() if len(text) < LONG_REPLY else await asyncio.to_thread(parse)
        return AnsweredRequest(
            number=number,
            messages=messages,
            tools=tools,
            arguments=request.chat_template_kwargs,
            reply=parsed.message(number),
            call=replace(call, observed=told_since_reply(messages)),
        )

    async def _prompt(
        self,
        log: TrajectoryLog,
        messages: list[ChatMessage],
        tools: list[dict[str, Any]] | None,
        arguments: dict[str, Any],
    ) -> tuple[list[int], bool]:
        """The engine's input, and whether it opens a reasoning block.

        It is a recorded call and what follows it, or the conversation rendered again.
        """
        config = self.config
        earlier = log.continued(messages, tools, arguments) if config.env.history == "sampled" else None
        arguments = {**config.data.template_args, **arguments}
        if earlier is None:
            rendered = await self.renderer.prompt(messages, tools, arguments)
            return rendered.ids, rendered.opens_thinking
        call = earlier.call
        ended = call.completion_token_ids[-1] in self.stop_token_ids  # and not at a text of rollout.stop
        end = await self.renderer.prompt(messages, tools, arguments, len(earlier.messages), ended=ended)
        before = [*call.prompt_token_ids, *call.completion_token_ids] if end.follows else []
        return [*before, *end.ids], end.opens_thinking

    async def _sample(
        self, log: TrajectoryLog, ids: list[int], max_tokens: int, stop: tuple[str, ...]
    ) -> Call:
        rollout = self.config.rollout
        sampling = Sampling(
            temperature=log.temperature,
            top_p=rollout.top_p if log.temperature else 1.0,
            top_k=rollout.top_k if log.temperature else 0,
            max_tokens=max_tokens,
            stop_token_ids=self.stop_token_ids,
            stop=(*rollout.stop, *stop),
            seed=_call_seed(log, ids),
        )
        return (await log.engine.generate(log.model, EncodedPrompt(ids), 1, sampling, log.version))[0]


async def _no_such_path(request: Request, error: Exception) -> Response:
    text = f"There is no {request.method} {plain(request.url.path)[:200]}, only POST /v1/chat/completions."
    return JSONResponse(ApiError(404, "not_found", text).body(), status_code=404)


def _before(text: str, stops: Sequence[str]) -> str:
    """The text before the first of `stops`. The last token may have brought more than the stop."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def _ended(log: TrajectoryLog, end: End, message: str) -> ApiError:
    """Note the limit that a request met."""
    if log.end == "stop":
        log.end = end
    return ApiError(400, "context_length_exceeded" if end == "tokens" else "turn_limit", message)


def _call_seed(log: TrajectoryLog, ids: Sequence[int]) -> int:
    """A seed that does not depend on the order in which parallel calls of an episode arrive."""
    text = f"{log.seed}/{log.num_same_prompts(ids)}/{','.join(map(str, ids))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, "request_too_large", f"The request has more than {MAX_BODY_BYTES} bytes.")
    return bytes(body)


async def _unless_disconnected(
    request: Request, answer: Coroutine[Any, Any, AnsweredRequest]
) -> AnsweredRequest | None:
    """The answer; None if the client goes away first, which cancels it: what nobody reads is not recorded."""
    task = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(request.receive())  # the body is read: all that can come is the end
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        failed = task.done() and task.exception() is not None
        return None if gone.done() and not failed else task.result()
    finally:
        task.cancel()
        gone.cancel()


@contextlib.contextmanager
def _sockets(path: Path) -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
        tcp.bind(("127.0.0.1", 0))
        unix.bind(str(path))
        try:
            yield tcp, unix
        finally:
            path.unlink(missing_ok=True)


def reply_body(answered: AnsweredRequest, model: str) -> dict[str, Any]:
    """An answered request as one object in OpenAI's form."""
    message, reason = answered.reply, _finish_reason(answered)
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
    head = _head(answered, model, "chat.completion")
    return {**head, "choices": [choice], "usage": _usage(answered.call)}


def reply_events(answered: AnsweredRequest, model: str, *, with_usage: bool) -> Iterator[str]:
    """The same as server-sent events. Everything is sampled before the first one."""
    message, head = answered.reply, _head(answered, model, "chat.completion.chunk")

    def event(choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps({**head, 'choices': choices, **more})}\n\n"

    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
    for index, call in enumerate(message.get("tool_calls", ())):
        deltas.append({"tool_calls": [{"index": index, **call}]})
    for delta in deltas:
        yield event([{"index": 0, "delta": delta, "finish_reason": None}])
    yield event([{"index": 0, "delta": {}, "finish_reason": _finish_reason(answered)}])
    if with_usage:
        yield event([], usage=_usage(answered.call))
    yield "data: [DONE]\n\n"


def _head(answered: AnsweredRequest, model: str, kind: str) -> dict[str, Any]:
    """`created` is always 0: the same episode gets the same replies."""
    return {"id": f"chatcmpl-{answered.number}", "object": kind, "created": 0, "model": model}


def _finish_reason(answered: AnsweredRequest) -> str:
    return "tool_calls" if answered.reply.get("tool_calls") else answered.call.finish_reason


def _usage(call: Call) -> dict[str, int]:
    prompt, completion = len(call.prompt_token_ids), len(call.completion_token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
