"""The calls of one trajectory while its episode runs, and which of them a new request continues."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from skylite.engine.client import Sampling
from skylite.environments.chat_request import ChatMessage
from skylite.types import End, Sample


class Sampler(Protocol):
    """What replies are sampled from: an engine of the run, or scripted_engine.py."""

    async def generate(
        self, model: str, prompt_token_ids: Sequence[int], n: int, sampling: Sampling, version: int
    ) -> list[Sample]:
        """`n` completions of one prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One answered request."""

    messages: Sequence[ChatMessage]
    """The request's messages."""
    reply: ChatMessage
    """What the recorder answered."""
    sample: Sample


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
    calls: list[Call] = field(default_factory=list)
    """In the order in which they were asked for."""
    num_started: int = 0
    """Requests that count against env.max_turns."""
    end: End = "stop"
    failure: Exception | None = None
    """Why the recorder could not answer; the run stops with it."""
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    notes: set[str] = field(default_factory=set)
    """What the requests asked for and did not get, such as "temperature"."""
    prompt_seeds: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Prompt -> requests with exactly this prompt so far."""

    def continued(self, messages: Sequence[ChatMessage]) -> Call | None:
        """The call with the longest conversation whose reply `messages` continue."""
        longest_first = sorted(self.calls, key=lambda c: -len(c.messages))
        return next((c for c in longest_first if _continues(messages, c)), None)

    def num_same_prompts(self, prompt_token_ids: Sequence[int]) -> int:
        """How many requests had this prompt before; counts this one."""
        key = tuple(prompt_token_ids)
        self.prompt_seeds[key] = self.prompt_seeds.get(key, 0) + 1
        return self.prompt_seeds[key] - 1

    def fail(self, error: Exception) -> None:
        """Let the run stop with `error`; the first one counts."""
        self.failure = self.failure or error
        self.failed.set()


def _continues(messages: Sequence[ChatMessage], call: Call) -> bool:
    count = len(call.messages)
    return (
        len(messages) > count
        and _same(messages[count], call.reply)
        and all(_same(a, b) for a, b in zip(messages, call.messages, strict=False))
    )


def _same(a: ChatMessage, b: ChatMessage) -> bool:
    """Whether two messages say the same. Programs drop reasoning and the ids of tool calls."""
    return a["role"] == b["role"] and a["content"] == b["content"] and _calls(a) == _calls(b)


def _calls(message: ChatMessage) -> list[tuple[Any, Any]]:
    return [(c["function"]["name"], c["function"].get("arguments")) for c in message.get("tool_calls") or ()]


def told_since_reply(messages: Sequence[ChatMessage]) -> str:
    """The messages after the model's last reply, each as a line `role: text`."""
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    told = messages[replies[-1] + 1 :] if replies else messages
    return "\n".join(f"{message['role']}: {message['content'] or ''}" for message in told)
