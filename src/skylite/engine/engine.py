"""One engine as the run sees it: requests survive a lost reply and a restart, groups are whole, and it is noticed when it wait_for_hang."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from skylite.engine.client import Sampling, VllmClient
from skylite.errors import EngineDead, EngineFailed, RunFailed
from skylite.run.run_dir import AdapterVersion
from skylite.types import Sample

T = TypeVar("T")

BACKOFF_S = (0.5, 1.0, 2.0, 4.0)
"""Waits between the attempts of a request. Together longer than the 5 s in which vLLM's server notices that its engine is dead."""
PROGRESS_POLL_S = 1.0
"""Between two looks at an engine's progress."""


class Engine:
    """A vLLM server with its adapters. While it is down (`pause`) requests wait; `resume` lets them go on, to the new server."""

    def __init__(self, client: VllmClient, backoff_s: Sequence[float] = BACKOFF_S) -> None:
        self.name = client.name
        self.adapters: dict[str, AdapterVersion] = {}
        """What is loaded, and has to be again after a restart."""
        self._client = client
        self._backoff_s = backoff_s
        self._up = asyncio.Event()
        self._up.set()
        self._in_flight = 0

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def pause(self) -> None:
        """From now on requests wait; those in flight fail with their connection and then wait too."""
        self._up.clear()

    async def resume(self, client: VllmClient) -> None:
        """Go on with another server, which has every adapter of `adapters`."""
        old, self._client = self._client, client
        self._up.set()
        await old.aclose()

    async def generate(
        self, model: str, prompt_token_ids: Sequence[int], n: int, sampling: Sampling, version: int
    ) -> list[Sample]:
        """`n` completions of one prompt. Those that a reply lacks are asked for again, each with its own seed.

        Raises RunFailed when some stay missing, SyncFailed when the reply is another model's, EngineFailed after the last attempt.
        """
        found = await self._sample(model, prompt_token_ids, n, sampling, version)
        for _ in self._backoff_s:
            for index in set(range(n)) - set(found):
                # Sample i of a request has seed + i, so this is the completion that the whole request would have held.
                one = await self._sample(
                    model, prompt_token_ids, 1, replace(sampling, seed=sampling.seed + index), version
                )
                if 0 in one:
                    found[index] = one[0]
        if len(found) < n:
            raise RunFailed(
                f"{self.name} gave {len(found)} of {n} completions of a prompt, however often it was asked for the rest."
            )
        return [found[index] for index in range(n)]

    async def prompt_logprobs(self, model: str, token_ids: Sequence[int]) -> list[float]:
        """[L - 1] natural-log probabilities of tokens 1.. of the sequence, given those before."""
        return await self._with_retries(lambda client: client.prompt_logprobs(model, token_ids))

    async def load_adapter(self, adapter: AdapterVersion) -> None:
        """Load a version under its own name. Raises SyncFailed when it is refused."""
        attempts = 0

        async def load(client: VllmClient) -> None:
            nonlocal attempts
            attempts += 1
            if attempts > 1:
                await client.unload_adapter(
                    adapter.name
                )  # the attempt before may have loaded it and lost its reply
            await client.load_adapter(adapter)
            self.adapters[adapter.name] = adapter

        await self._with_retries(load)

    async def unload_adapter(self, name: str) -> None:
        """Forget a name no request uses any more."""
        self.adapters.pop(name, None)
        await self._with_retries(lambda client: client.unload_adapter(name))

    async def wait_for_hang(self, stall_timeout_s: float) -> EngineFailed:
        """Return, with the reason, once the engine does not work: it says so, does not answer, or makes no token while asked for some.

        /health alone does not tell: it stays 200 when the engine behind it wait_for_hang. Tokens are counted over all requests by /metrics, so
        one that only waits for its turn is not taken for a hang, and nothing is added to a token's cost as streaming would.
        """
        clock = asyncio.get_running_loop().time
        tokens, since = -1.0, clock()
        failure: EngineFailed | None = None
        while clock() - since <= stall_timeout_s:
            await asyncio.sleep(min(PROGRESS_POLL_S, stall_timeout_s / 4))
            try:
                now, failure = await self._client.token_count(), None
            except EngineDead as error:
                return error
            except EngineFailed as error:
                failure = error
                continue
            if now != tokens or self._in_flight == 0:
                tokens, since = now, clock()
        return failure or EngineFailed(
            f"{self.name} made no token for {stall_timeout_s:g} s while {self._in_flight} requests waited and /health said it is fine."
        )

    async def _sample(
        self, model: str, prompt_token_ids: Sequence[int], n: int, sampling: Sampling, version: int
    ) -> dict[int, Sample]:
        return await self._with_retries(
            lambda client: client.sample(model, prompt_token_ids, n, sampling, version)
        )

    async def _with_retries(self, request: Callable[[VllmClient], Awaitable[T]]) -> T:
        """The answer, by as many attempts as there are waits, and one more. What failed in a server that is gone by then does not count."""
        waits = list(self._backoff_s)
        while True:
            await self._up.wait()
            client = self._client
            self._in_flight += 1
            try:
                return await request(client)
            except EngineFailed:
                counts = self._up.is_set() and client is self._client
                if counts and not waits:
                    raise
            finally:
                self._in_flight -= 1
            if counts:
                await asyncio.sleep(waits.pop(0))
