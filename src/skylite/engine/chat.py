"""Chats with a server over its OpenAI API, with streaming. Blocking, for one person at a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from skylite.engine.connections import KEY_VARIABLE
from skylite.errors import RunFailed
from skylite.types import Message
from skylite.untrusted_text import parse_json, plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A server, a model on it, and how answers are sampled."""

    http: httpx.Client
    model: str
    temperature: float
    max_tokens: int

    def answer(self, messages: list[Message]) -> Iterator[str]:
        """The pieces of the answer as they are sampled. Raises RunFailed."""
        body = {
            "model": self.model,
            "messages": messages,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "stream": True,
        }
        try:
            with self.http.stream("POST", "/v1/chat/completions", json=body) as reply:
                if reply.status_code != httpx.codes.OK:
                    reply.read()
                    raise RunFailed(f"The server answered {reply.status_code}: {reason(reply)}")
                for line in reply.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield piece(line.removeprefix("data: "))
        except httpx.TransportError as error:
            raise RunFailed(f"The connection to the server broke: {type(error).__name__} {error}.") from None


def served_models(http: httpx.Client, url: str) -> list[str]:
    """The names of the server's models. Raises RunFailed."""
    return [str(model["id"]) for model in _models(http, url)]


def served_adapters(http: httpx.Client, url: str) -> list[str]:
    """The names of those models that are adapters on a base. Raises RunFailed."""
    return [str(model["id"]) for model in _models(http, url) if model.get("parent")]


def longest_sequence(http: httpx.Client, url: str) -> int:
    """Tokens of the server's longest sequence; 0: it does not say. Raises RunFailed."""
    return max((int(model.get("max_model_len") or 0) for model in _models(http, url)), default=0)


def _models(http: httpx.Client, url: str) -> list[dict[str, Any]]:
    try:
        reply = http.get("/v1/models")
    except httpx.TransportError as error:
        raise RunFailed(
            f"{url} does not answer ({type(error).__name__}).", "Start it with `skylite serve RUN`."
        ) from None
    if reply.status_code == httpx.codes.UNAUTHORIZED:
        raise RunFailed(
            f"{url} refuses the API key.", f"Set {KEY_VARIABLE} to the key that `skylite serve` printed."
        )
    try:
        return [dict(model, id=str(model["id"])) for model in parse_json(reply.content)["data"]]
    except (ValueError, KeyError, TypeError):
        raise RunFailed(
            f"{url} sent no list of models ({reply.status_code}).", "Give the address of an OpenAI server."
        ) from None


def piece(data: str) -> str:
    """The text in one event of a stream; an error in it raises RunFailed."""
    try:
        event = parse_json(data)
        if "error" in event:
            raise RunFailed(f"The server stopped the answer: {plain(json.dumps(event['error'])[:300])}.")
        choices = event["choices"]
        return str(choices[0]["delta"].get("content") or "") if choices else ""
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise RunFailed(f"The server sent an event that is no answer: {plain(data[:200])}.") from None


def reason(reply: httpx.Response) -> str:
    """The message in an error reply, shortened."""
    try:
        error = parse_json(reply.content)
        error = error.get("error", error)
        return plain(str(error.get("message", error))[:400])
    except (ValueError, AttributeError):
        return plain(reply.text[:400])
