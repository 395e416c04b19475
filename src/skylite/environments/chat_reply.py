"""Replies of POST /v1/chat/completions in OpenAI's form: one JSON object, or a stream of chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """An answered request."""

    id: str
    model: str
    message: dict[str, Any]
    finish_reason: str
    """stop, length or tool_calls."""
    prompt_tokens: int
    completion_tokens: int
    created: int = 0
    """Always 0: the same episode gets the same replies."""

    @property
    def usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }

    def body(self) -> dict[str, Any]:
        """The reply as one object."""
        choice = {"index": 0, "message": self.message, "logprobs": None, "finish_reason": self.finish_reason}
        return {**self._head("chat.completion"), "choices": [choice], "usage": self.usage}

    def stream(self, *, with_usage: bool) -> Iterator[str]:
        """The reply as server-sent events. Everything is sampled before the first one."""
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if reasoning := self.message.get("reasoning_content"):
            deltas.append({"reasoning_content": reasoning})
        if content := self.message["content"]:
            deltas.append({"content": content})
        for index, call in enumerate(self.message.get("tool_calls", ())):
            deltas.append({"tool_calls": [{"index": index, **call}]})
        for delta in deltas:
            yield self._event([{"index": 0, "delta": delta, "finish_reason": None}])
        yield self._event([{"index": 0, "delta": {}, "finish_reason": self.finish_reason}])
        if with_usage:
            yield self._event([], usage=self.usage)
        yield "data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps({**self._head('chat.completion.chunk'), 'choices': choices, **more})}\n\n"
