"""The calls of one trajectory while its episode runs, and which of them a new request continues."""

from __future__ import annotations

import asyncio
import bisect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from skylite.environments.chat_request import ChatMessage
from skylite.environments.source import Sampler
from skylite.types import Call, End
from skylite.untrusted_text import parse_json


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredRequest:
    """One answered request."""

    number: int
    """Its place in the order in which the episode asked."""
    messages: Sequence[ChatMessage]
    """The request's messages."""
    tools: Sequence[dict[str, Any]] | None
    """The tools that the chat template got."""
    arguments: dict[str, Any]
    """The request's own arguments of the chat template."""
    reply: ChatMessage
    """What the OpenAI server answered."""
    call: Call


@dataclass(slots=True, kw_only=True)
class TrajectoryLog:
    """One trajectory: what it samples from, and what it has sampled."""

    name: str
    """Prompt id and trajectory number, for errors."""
    model: str
    version: int
    engine: Sampler
    seed: int
    temperature: float
    calls: list[AnsweredRequest] = field(default_factory=list)
    """In the order in which they were asked for; `record` adds one."""
    num_started: int = 0
    """Requests that count against env.max_turns."""
    end: End = "stop"
    failure: Exception | None = None
    """Why the OpenAI server could not answer; the run stops with it."""
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    notes: set[str] = field(default_factory=set)
    """What the requests asked for and did not get, such as "temperature"."""
    prompt_seeds: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Prompt -> requests with exactly this prompt so far."""

    def record(self, call: AnsweredRequest) -> None:
        """Keep an answered call. Parallel calls may be answered in another order than they were asked."""
        bisect.insort(self.calls, call, key=lambda c: c.number)

    def continued(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[dict[str, Any]] | None,
        arguments: dict[str, Any],
    ) -> AnsweredRequest | None:
        """The call with the longest conversation whose reply `messages` continue.

        With other tools or arguments the template would have written its prompt otherwise, so it does not
        count. Of equally long ones, the call with most of the same reasoning, then the first.
        """
        shown = _canonical([tools, arguments])
        fitting = [
            c for c in self.calls if _continues(messages, c) and _canonical([c.tools, c.arguments]) == shown
        ]
        return max(fitting, key=lambda c: (len(c.messages), _num_same_reasoning(messages, c)), default=None)

    def num_same_prompts(self, prompt_token_ids: Sequence[int]) -> int:
        """How many requests had this prompt before; counts this one."""
        key = tuple(prompt_token_ids)
        self.prompt_seeds[key] = self.prompt_seeds.get(key, 0) + 1
        return self.prompt_seeds[key] - 1

    def fail(self, error: Exception) -> None:
        """Let the run stop with `error`; the first one counts."""
        self.failure = self.failure or error
        self.failed.set()


def _continues(messages: Sequence[ChatMessage], call: AnsweredRequest) -> bool:
    count = len(call.messages)
    return (
        len(messages) > count
        and _same(messages[count], call.reply)
        and all(_same(a, b) for a, b in zip(messages, call.messages, strict=False))
    )


def _same(a: ChatMessage, b: ChatMessage) -> bool:
    """Whether two messages say the same. Programs drop reasoning and the ids of tool calls."""
    if a["role"] != b["role"] or a["content"] != b["content"]:
        return False
    return not (a.get("tool_calls") or b.get("tool_calls")) or _calls(a) == _calls(b)


def _calls(message: ChatMessage) -> list[tuple[Any, Any]]:
    return [
        (c["function"]["name"], _arguments(c["function"].get("arguments", "{}")))
        for c in message.get("tool_calls") or ()
    ]


def _arguments(text: str) -> str:
    """The same text for the same JSON, which programs write with other spaces and orders of keys."""
    try:
        return _canonical(parse_json(text))
    except (ValueError, RecursionError):
        return text


def _canonical(value: Any) -> str:
    """JSON that is equal for equal values. Python's own == takes 1 for true."""
    return json.dumps(value, sort_keys=True)


def _num_same_reasoning(messages: Sequence[ChatMessage], call: AnsweredRequest) -> int:
    known = [*call.messages, call.reply]
    return sum(
        a.get("reasoning_content") == b.get("reasoning_content")
        for a, b in zip(messages, known, strict=False)
    )


def told_since_reply(messages: Sequence[ChatMessage]) -> str:
    """The messages after the model's last reply, each as a line `role: text`."""
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    told = messages[replies[-1] + 1 :] if replies else messages
    return "\n".join(f"{message['role']}: {message['content'] or ''}" for message in told)
