"""Requests to a server that may be busy or away for a while: a judge, or a teacher.

Consumes: bodies of requests. Waits for: the rate limit, the server. Produces: what its replies hold.
Unblocks: judge_servers.py and teacher_server.py.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time
from typing import Any, TypeVar

import httpx

from skylite.engine.connections import Address, Connections
from skylite.errors import EngineFailed, RunFailed
from skylite.untrusted_text import plain

T = TypeVar("T")
BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Waits between attempts, the last one from then on."""
REPEATED = (408, 409, 425, 429, 500, 502, 503, 504, 529)
"""HTTP status codes after which the same request may succeed later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """What a server is called in errors, and how long it is waited for."""

    name: str
    """Such as `judge j at http://...`."""
    max_concurrent: int
    """Requests in flight at once."""
    timeout_s: float
    """For one reply."""
    patience_s: float
    """How long a request is repeated."""
    if_silent: str
    """What to do after that."""
    if_refused: str
    """What to do if the server refuses a request."""
    requests_per_minute: float = 0.0
    """Most requests that begin in a minute. 0: no limit."""
    while_asked: Callable[[], AbstractContextManager[object]] = nullcontext
    """Surrounds each attempt."""


class PatientClient:
    """A client that repeats a request after HTTP 429, 5xx and lost connections. Close it with `aclose`."""

    def __init__(
        self, address: Address, how: Patience, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """`sleep`: tests replace it."""
        self._repeated = 0
        self._how, self._sleep = how, sleep
        self._connections = Connections(f"the {how.name}", address, how.max_concurrent)
        self._slots = asyncio.Semaphore(how.max_concurrent)
        self._not_before = 0.0
        """When the next request may begin, by the loop's clock."""

    async def aclose(self) -> None:
        await self._connections.aclose()

    def take_repeated(self) -> int:
        """Requests that were sent again since the last call."""
        repeated, self._repeated = self._repeated, 0
        return repeated

    async def ask(self, path: str, body: dict[str, Any] | None, read: Callable[[Any], T], form: str) -> T:
        """What `read` makes of the JSON that the server answers. Without a body, a GET.

        `read` may raise ValueError and the like if the reply is not a `form`; such replies are asked for
        again. Raises RunFailed if there is none for long, or if the server refuses the request.
        """
        began = _now()
        for attempt in itertools.count():
            async with self._slots:
                await self._turn()
                answer, problem, after_s = await self._send(path, body)
            if answer is not None:
                try:
                    return read(answer.json())
                except (ValueError, KeyError, IndexError, TypeError, AttributeError):
                    problem = f"it sent no {form}."
            wait_s = max(BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)], after_s)
            if _now() + wait_s > began + self._how.patience_s:
                raise RunFailed(
                    f"The {self._how.name} gave no answer in {attempt + 1} attempts: {problem}",
                    self._how.if_silent,
                )
            self._repeated += 1
            if after_s:  # the server named a time to everybody
                self._not_before = max(self._not_before, _now() + wait_s)
            else:
                await self._sleep(wait_s)
        raise AssertionError("unreachable")

    async def _turn(self) -> None:
        """Wait until a request may begin."""
        start = max(_now(), self._not_before)
        rate = self._how.requests_per_minute
        self._not_before = start + (60 / rate if rate else 0.0)
        if (wait_s := start - _now()) > 0:
            await self._sleep(wait_s)

    async def _send(self, path: str, body: dict[str, Any] | None) -> tuple[httpx.Response | None, str, float]:
        """The reply; or None, why, and the seconds that the server asks to wait. Raises RunFailed."""
        try:
            with self._how.while_asked():
                if body is None:
                    answer = await self._connections.send("GET", path)
                else:
                    answer = await self._connections.send_prompt(path, body, self._how.timeout_s)
        except EngineFailed as error:
            return None, error.what, 0.0
        if answer.status_code == httpx.codes.OK:
            return answer, "", 0.0
        text = plain(" ".join(answer.text.split())[:200])
        problem = f"HTTP {answer.status_code} {text}".rstrip(". ") + "."
        if answer.status_code not in REPEATED:
            raise RunFailed(f"The {self._how.name} refuses the request: {problem}", self._how.if_refused)
        return None, problem, _retry_after(answer.headers.get("Retry-After", ""))


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
