"""The two judges: a server by its URL, and the run's own base on the run's own engine.

Consumes: questions. Waits for: the rate limit, the server or engine. Produces: replies.
Unblocks: judge.py, which reads the points.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time
from typing import Any, NamedTuple, Protocol

import httpx

from skylite.config.judge import JudgeConfig
from skylite.data.chat_tokenizer import ChatTokenizer
from skylite.engine.connections import Address, Connections
from skylite.engine.interface import BASE_NAME, Sampling
from skylite.environments.source import Sampler
from skylite.errors import ConfigError, EngineFailed, RunFailed
from skylite.types import Message, Prompt
from skylite.untrusted_text import plain

BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Waits between attempts, the last one from then on."""
REPEATED = (408, 409, 425, 429, 500, 502, 503, 504, 529)
"""HTTP status codes after which the same request may succeed later."""


class Reply(NamedTuple):
    """What a judge said, and what it took."""

    text: str
    prompt_tokens: int
    completion_tokens: int


class JudgeServer(Protocol):
    """Something that answers questions."""

    repeated: int
    """Requests so far that were sent again."""

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
        self.repeated = 0
        self._settings, self._sleep = settings, sleep
        self._connections = Connections(
            f"the judge {settings.name}",
            Address(settings.api_root, api_key(settings)),
            settings.max_concurrent,
        )
        self._slots = asyncio.Semaphore(settings.max_concurrent)
        self._not_before = 0.0
        """When the next request may begin, by the loop's clock."""

    async def aclose(self) -> None:
        await self._connections.aclose()

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
        return await self._until_answered(body)

    async def _until_answered(self, body: dict[str, Any]) -> Reply:
        began = _now()
        for attempt in itertools.count():
            async with self._slots:
                await self._turn()
                reply, problem, after_s = await self._post(body)
            if reply is not None:
                return reply
            wait_s = max(BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)], after_s)
            if _now() + wait_s > began + self._settings.patience_s:
                raise RunFailed(
                    f"The judge {self._settings.name} gave no answer in {attempt + 1} attempts: {problem}",
                    "Start it, or raise reward.judge.patience_s. A resume asks nothing again that it has "
                    "answered.",
                )
            self.repeated += 1
            if after_s:  # the server named a time to everybody
                self._not_before = max(self._not_before, _now() + wait_s)
            else:
                await self._sleep(wait_s)
        raise AssertionError("unreachable")

    async def _turn(self) -> None:
        """Wait until a request may begin."""
        start = max(_now(), self._not_before)
        rate = self._settings.requests_per_minute
        self._not_before = start + (60 / rate if rate else 0.0)
        if (wait_s := start - _now()) > 0:
            await self._sleep(wait_s)

    async def _post(self, body: dict[str, Any]) -> tuple[Reply | None, str, float]:
        """The reply; or None, why, and the seconds that the server asks to wait. Raises RunFailed."""
        try:
            answer = await self._connections.send_prompt("chat/completions", body, self._settings.timeout_s)
        except EngineFailed as error:
            return None, error.what, 0.0
        if answer.status_code != httpx.codes.OK:
            text = plain(" ".join(answer.text.split())[:200])
            problem = f"HTTP {answer.status_code} {text}".rstrip(". ") + "."
            if answer.status_code not in REPEATED:
                raise RunFailed(
                    f"The judge {self._settings.name} refuses the request: {problem}",
                    "Correct reward.judge.url, model, api_key_env or extra_body.",
                )
            return None, problem, _retry_after(answer.headers.get("Retry-After", ""))
        try:
            content = answer.json()
            usage, text = content.get("usage") or {}, content["choices"][0]["message"]["content"] or ""
            counts = (int(usage.get(f"{part}_tokens") or 0) for part in ("prompt", "completion"))
            return Reply(str(text), *counts), "", 0.0
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            return None, "it sent no chat completion.", 0.0


def _now() -> float:
    return asyncio.get_running_loop().time()


def _retry_after(value: str) -> float:
    """Seconds, from seconds or a date; 0 if it is neither."""
    try:
        return max(
            0.0,
            float(value) if value.strip().isdigit() else parsedate_to_datetime(value).timestamp() - time(),
        )
    except (ValueError, TypeError, OverflowError):
        return 0.0


def api_key(settings: JudgeConfig) -> str | None:
    """The key in the variable that the settings name; None if they name none. Raises ConfigError."""
    if not settings.api_key_env:
        return None
    key = os.environ.get(settings.api_key_env, "").strip()
    if not key:
        raise ConfigError(
            f"reward.judge.api_key_env={settings.api_key_env} names a variable that is not set, so the judge "
            f"{settings.name} would get no key.",
            f"Export {settings.api_key_env}, or leave the setting out for a judge without keys.",
        )
    return key


@dataclass(slots=True)
class BaseJudge:
    """The run's base, which its engines serve beside the adapters."""

    settings: JudgeConfig
    tokenizer: ChatTokenizer
    limit: int
    """Longest sequence that an engine takes, in tokens."""
    repeated: int = 0

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
