"""An engine for the run: retries requests, survives restarts and completes groups."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from skylite.engine.interface import Engine, Sampling
from skylite.errors import EngineFailed, RunFailed
from skylite.run.run_dir import AdapterVersion
from skylite.types import Call, EncodedPrompt

T = TypeVar("T")

BACKOFF_S = (0.5, 1.0, 2.0, 4.0)
"""Waits between attempts. Their sum exceeds the 5 s that a server may need to notice that its engine died."""


class RetryingEngine:
    """An engine across its restarts, with its adapters.

    Requests wait between `pause` and `resume`, and while it sleeps.
    """

    def __init__(
        self,
        client: Engine,
        backoff_s: Sequence[float] = BACKOFF_S,
        on_failure: Callable[[EngineFailed], None] | None = None,
    ) -> None:
        """`on_failure`: gets the error of a request's last attempt, and must lead to `resume` with another
        client or to the run's end: the request waits for it. None: the error is raised."""
        self.name = client.name
        self._on_failure = on_failure
        self.adapters: dict[str, AdapterVersion] = {}
        """Loaded adapters by name. A restarted server must load them again."""
        self.may_hold = set[str]()
        """Adapters that it was asked to load and has not unloaded, also by cancelled requests."""
        self._client = client
        self._backoff_s = backoff_s
        self._up = asyncio.Event()
        self._up.set()
        self._awake, self._needed = asyncio.Event(), asyncio.Event()
        self._awake.set()
        self._needed.set()
        self.unusable: EngineFailed | None = None
        """Why the server must be replaced although it may answer."""
        self.in_flight = 0
        """Requests that wait for their reply."""
        self.tokens_in_flight = 0
        """At most, of the groups that a run samples here now."""
        self._worked_at: float | None = None
        """When it last worked, by the loop's clock; None if nobody watches it."""
        self._lost_s = 0.0

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def lost_s(self) -> float:
        """Seconds so far in which the server did not work: it hung, or started again.

        The time since the last sign of work counts, too. If it turns out to be no hang, this falls back.
        """
        return self._lost_s + (0.0 if self._worked_at is None else _now() - self._worked_at)

    def pause(self) -> None:
        """Make requests wait. Requests in flight fail with their connection and then wait, too."""
        self._up.clear()
        if self._worked_at is None:
            self._worked_at = _now()

    async def resume(self, client: Engine) -> None:
        """Continue with another server, which must have loaded all `adapters`."""
        old, self._client, self.unusable = self._client, client, None
        self._lost_s, self._worked_at = self.lost_s(), None
        self._up.set()
        await old.aclose()

    async def generate(
        self, model: str, prompt: EncodedPrompt, n: int, sampling: Sampling, version: int
    ) -> list[Call]:
        """`n` completions of one prompt. Requests missing completions again, each with its own seed.

        Raises RunFailed if some stay missing, SyncFailed if the reply names another model, and EngineFailed
        after the last attempt.
        """
        calls = await self._generate(model, prompt, n, sampling, version)
        for _ in self._backoff_s:
            for index in [i for i in range(n) if i not in calls]:
                # Call i of a request uses seed + i, so this equals the missing completion.
                seeded = replace(sampling, seed=sampling.seed + index)
                one = await self._generate(model, prompt, 1, seeded, version)
                if 0 in one:
                    calls[index] = one[0]
        if len(calls) < n:
            raise RunFailed(
                f"{self.name} returned {len(calls)} of {n} completions of a prompt "
                f"after {len(self._backoff_s)} requests for the missing ones."
            )
        return [calls[index] for index in range(n)]

    async def score(self, model: str, prompt: EncodedPrompt) -> list[float]:
        """[L - 1] logprobs in nats of all tokens of the sequence but the first."""
        return await self._with_retries(lambda client: client.score(model, prompt))

    async def top_tokens(
        self, model: str, token_ids: Sequence[int], count: int
    ) -> list[list[tuple[int, float]]]:
        """[L - 1] the most likely tokens with their logprobs, at the place of all tokens but the first."""
        return await self._with_retries(lambda client: client.top_tokens(model, token_ids, count))

    async def load_adapter(self, adapter: AdapterVersion) -> None:
        """Load a version under its own name. Raises SyncFailed if the engine refuses it."""
        attempts = 0
        self.may_hold.add(adapter.name)

        async def load(client: Engine) -> None:
            nonlocal attempts
            attempts += 1
            if attempts > 1:
                # The last attempt may have loaded it and lost the reply.
                await client.unload_adapter(adapter.name)
            await client.load_adapter(adapter)
            self.adapters[adapter.name] = adapter

        await self._with_retries(load)

    async def unload_adapter(self, name: str) -> None:
        """Unload a version that no request uses."""
        self.adapters.pop(name, None)
        await self._with_retries(lambda client: client.unload_adapter(name))
        self.may_hold.discard(name)

    async def sleep(self) -> None:
        """Give memory back until `wake`. Other requests wait from then on."""
        await self._for_sure(lambda client: client.sleep())
        self._awake.clear()
        self._needed.clear()

    async def wake(self) -> None:
        """Take the memory again, or let a server that died meanwhile start again."""
        self._needed.set()
        await self._for_sure(lambda client: client.wake())
        self._awake.set()

    async def until_needed(self) -> None:
        """Wait while it sleeps: until then a new server finds no memory."""
        await self._needed.wait()

    async def _for_sure(self, request: Callable[[Engine], Awaitable[None]]) -> None:
        """Ask once. A server that fails may hold any part of its memory, so its watchdog replaces it."""
        while True:
            await self._up.wait()
            client = self._client
            try:
                return await request(client)  # not `asked`: no token comes meanwhile
            except EngineFailed as error:
                if client is self._client and self._up.is_set():
                    self.pause()
                    self.unusable = error

    async def is_ready(self) -> bool:
        """Whether the server answers, asked once."""
        return await self._client.is_ready()

    async def progress(self) -> float:
        """Tokens of the server so far, asked once. Raises EngineFailed."""
        return await self._client.progress()

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Count a request, which may be of another client, until the block ends: a hang is noticed then."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def note_work(self, at: float) -> None:
        """Note that the server still worked `at` this time, by the loop's clock."""
        self._worked_at = at

    async def _generate(
        self, model: str, prompt: EncodedPrompt, n: int, sampling: Sampling, version: int
    ) -> dict[int, Call]:
        """The completions that the engine did not drop, by index."""
        calls = await self._with_retries(lambda client: client.generate(model, prompt, n, sampling, version))
        return {index: call for index, call in enumerate(calls) if call is not None}

    async def _with_retries(self, request: Callable[[Engine], Awaitable[T]]) -> T:
        """The reply, after at most one retry per wait in `_backoff_s`.

        A failure does not count if the server was paused or replaced meanwhile.
        """
        waits = list(self._backoff_s)
        while True:
            await self._awake.wait()
            await self._up.wait()
            client = self._client
            try:
                with self.asked():
                    return await request(client)
            except EngineFailed as error:
                counts = self._up.is_set() and client is self._client
                if counts and not waits:
                    if self._on_failure is None:
                        raise
                    self.pause()
                    self._on_failure(error)
                    counts, waits = False, list(self._backoff_s)
            if counts:
                await asyncio.sleep(waits.pop(0))


def _now() -> float:
    return asyncio.get_running_loop().time()
