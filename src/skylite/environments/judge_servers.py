"""The two judges: a server by its URL, and the run's own base on the run's own engine.

Consumes: questions. Waits for: the rate limit, the server or engine. Produces: replies.
Unblocks: judge.py, which reads the points.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from skylite.config.judge import JudgeConfig
from skylite.data.chat_tokenizer import ChatTokenizer
from skylite.engine.connections import Address, api_key
from skylite.engine.interface import BASE_NAME, Sampling
from skylite.environments.patient_client import Patience, PatientClient
from skylite.environments.source import Sampler
from skylite.errors import RunFailed
from skylite.types import Message, Prompt


class Reply(NamedTuple):
    """What a judge said, and what it took."""

    text: str
    prompt_tokens: int
    completion_tokens: int


class JudgeServer(Protocol):
    """Something that answers questions."""

    def take_repeated(self) -> int:
        """Requests that were sent again since the last call."""

    async def ask(self, messages: Sequence[Message], seed: int, engine: Sampler | None) -> Reply:
        """The reply. `engine`: of the run, for its base. Raises RunFailed if there is none for long."""

    async def aclose(self) -> None:
        """Close the connections."""


class HttpJudge:
    """An OpenAI-compatible server."""

    def __init__(
        self, settings: JudgeConfig, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """Raises ConfigError if the variable with the key is not set. `sleep`: tests replace it."""
        name = f"judge {settings.name}"
        how = Patience(
            name=name,
            max_concurrent=settings.max_concurrent,
            timeout_s=settings.timeout_s,
            patience_s=settings.patience_s,
            requests_per_minute=settings.requests_per_minute,
            if_silent="Start it, or raise reward.judge.patience_s. A resume asks nothing again that it has "
            "answered.",
            if_refused="Correct reward.judge.url, model, api_key_env or extra_body.",
        )
        key = api_key("reward.judge.api_key_env", settings.api_key_env, name)
        self._settings, self._client = settings, PatientClient(Address(settings.api_root, key), how, sleep)

    def take_repeated(self) -> int:
        return self._client.take_repeated()

    async def aclose(self) -> None:
        await self._client.aclose()

    async def ask(self, messages: Sequence[Message], seed: int, engine: Sampler | None) -> Reply:
        settings, extra = self._settings, self._settings.extra_body
        limit = {} if "max_completion_tokens" in extra else {"max_tokens": settings.max_tokens}
        body = {
            "model": settings.model,
            "messages": list(messages),
            "temperature": settings.temperature,
            **limit,
            **extra,
        }
        return await self._client.ask("chat/completions", body, _read_reply, "chat completion")


def _read_reply(content: Any) -> Reply:
    usage, text = content.get("usage") or {}, content["choices"][0]["message"]["content"] or ""
    counts = (int(usage.get(f"{part}_tokens") or 0) for part in ("prompt", "completion"))
    return Reply(str(text), *counts)


@dataclass(slots=True)
class BaseJudge:
    """The run's base, which its engines serve beside the adapters."""

    settings: JudgeConfig
    tokenizer: ChatTokenizer
    limit: int
    """Longest sequence that an engine takes, in tokens."""

    def take_repeated(self) -> int:
        return 0  # the run's engine repeats by itself

    async def aclose(self) -> None:
        """The run closes its engines and its tokenizer."""

    async def ask(self, messages: Sequence[Message], seed: int, engine: Sampler | None) -> Reply:
        assert engine is not None  # only a check before the run has none, and it does not ask the base
        asked = Prompt(id="judge", messages=list(messages), answer="", source="")
        (encoded,) = await asyncio.to_thread(lambda: list(self.tokenizer.encode([asked])))
        tokens = len(encoded.token_ids)
        if tokens + self.settings.max_tokens > self.limit:
            raise RunFailed(
                f"A question to the judge (the run's base) has {tokens} tokens, and the engine takes "
                f"{self.limit} with the reply of reward.judge.max_tokens={self.settings.max_tokens}.",
                "Shorten the rubric, or use a judge at a URL.",
            )
        (call,) = await engine.generate(BASE_NAME, encoded, 1, self._sampling(seed), version=0)
        return Reply(call.text, tokens, len(call.completion_token_ids))

    def _sampling(self, seed: int) -> Sampling:
        return Sampling(
            temperature=self.settings.temperature,
            top_p=1.0,
            top_k=0,
            max_tokens=self.settings.max_tokens,
            stop_token_ids=self.tokenizer.stop_token_ids,
            seed=seed,
        )
