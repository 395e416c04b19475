"""When an engine is given up: hangs, and requests that fail again and again."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import Any

import pytest

from skylite.engine.retrying_engine import RetryingEngine
from skylite.engine.watchdog import wait_for_hang
from skylite.errors import EngineDead, EngineFailed
from skylite.processes.starvation import Starvation
from skylite.types import EncodedPrompt
from tests.unit.bad_server import SAMPLING


class Counter:
    """A server whose token counts, or errors, are given."""

    name = "engine-0"

    def __init__(self, *counts: float | Exception) -> None:
        self.counts = list(counts)

    async def progress(self) -> float:
        found = self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]
        if isinstance(found, Exception):
            raise found
        return found

    async def generate(self, *_: Any) -> list[Any]:
        await asyncio.sleep(60)
        return []

    async def aclose(self) -> None: ...


def watch(client: Counter, *, busy: bool, limit_s: float = 1.5) -> EngineFailed | None:
    """The reason of the hang; None if there is none within `limit_s`. A stall is 0.4 s."""

    async def run() -> EngineFailed | None:
        engine = RetryingEngine(client)  # type: ignore[arg-type]
        request = (
            asyncio.ensure_future(engine.generate("m", EncodedPrompt([7]), 1, SAMPLING, 0)) if busy else None
        )
        try:
            async with asyncio.timeout(limit_s):
                return await wait_for_hang(engine, 0.4)
        except TimeoutError:
            return None
        finally:
            if request is not None:
                request.cancel()

    return asyncio.run(run())


def test_an_engine_that_generates_nothing_while_requests_wait_hangs() -> None:
    found = watch(Counter(5.0), busy=True)
    assert found is not None
    assert "generated no token for 0.4 s while 1 requests waited" in found.what


def test_an_engine_that_generates_or_has_no_requests_does_not_hang() -> None:
    assert watch(Counter(*map(float, range(1000))), busy=True) is None
    assert watch(Counter(5.0), busy=False) is None


def test_time_without_a_core_is_no_hang() -> None:
    async def run(starved_s: float) -> EngineFailed | None:
        engine = RetryingEngine(Counter(5.0))  # type: ignore[arg-type]
        request = asyncio.ensure_future(engine.generate("m", EncodedPrompt([7]), 1, SAMPLING, 0))
        try:
            async with asyncio.timeout(1.5):
                return await wait_for_hang(engine, 0.4, lambda: starved_s)
        except TimeoutError:
            return None
        finally:
            request.cancel()

    assert asyncio.run(run(0.0)) is not None
    assert asyncio.run(run(9.0)) is None, "it waits all the time"


def test_threads_that_share_a_core_wait_for_it() -> None:
    spin = (
        "import os, threading\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nprint(flush=True)\n"
    )
    with (
        subprocess.Popen([sys.executable, "-c", spin + "while True: pass"], stdout=subprocess.PIPE) as one,
        subprocess.Popen([sys.executable, "-c", spin + "while True: pass"], stdout=subprocess.PIPE) as two,
        subprocess.Popen([sys.executable, "-c", spin + "input()"], stdin=-1, stdout=subprocess.PIPE) as idle,
    ):
        try:
            for process in (one, two, idle):
                assert process.stdout is not None
                process.stdout.readline()
            found = [Starvation(process.pid) for process in (one, idle)]
            assert [starvation.seconds() for starvation in found] == [0.0, 0.0], "nothing to compare with"
            time.sleep(1.0)
            busy, waiting = (starvation.seconds() for starvation in found)
            assert waiting < 0.1 < 0.3 < busy
        finally:
            for process in (one, two, idle):
                process.kill()
    assert Starvation(one.pid).seconds() == 0.0, "it has ended"


def test_an_engine_whose_requests_have_ended_does_not_hang() -> None:
    async def run() -> None:
        engine = RetryingEngine(Answering(5.0))  # type: ignore[arg-type]
        for _ in range(3):
            await engine.generate("m", EncodedPrompt([7]), 1, SAMPLING, 0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await wait_for_hang(engine, 0.2)

    class Answering(Counter):
        async def generate(self, *_: Any) -> list[Any]:
            return [object()]

    asyncio.run(run())


def test_an_engine_that_fails_is_lost_after_the_stall_or_at_once_if_it_is_dead() -> None:
    found = watch(Counter(EngineFailed("no answer")), busy=False)
    assert found is not None
    assert found.what == "no answer"
    assert watch(Counter(EngineFailed("x"), EngineFailed("x"), 1.0), busy=False) is None, "it answers again"
    dead = watch(Counter(EngineDead("dead")), busy=False, limit_s=0.35)
    assert isinstance(dead, EngineDead)


def test_the_waits_grow_and_the_client_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Counter):
        is_closed = False

        async def generate(self, *_: Any) -> list[Any]:
            raise EngineFailed("no answer")

        async def aclose(self) -> None:
            self.is_closed = True

    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def run() -> None:
        engine = RetryingEngine(client, (0.1, 0.2, 0.3))  # type: ignore[arg-type]
        with pytest.raises(EngineFailed, match="no answer"):
            await engine.generate("m", EncodedPrompt([7]), 1, SAMPLING, 0)
        await engine.aclose()

    client = Failing(5.0)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    asyncio.run(run())
    assert waits == [0.1, 0.2, 0.3]
    assert client.is_closed


class Jumping(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer, so that a busy machine changes no time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None = None) -> Any:
            found = select(0 if timeout else timeout)
            self.now += 0.0 if found else timeout or 0.0
            return found

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


def test_lost_time_counts_from_the_last_sign_of_work() -> None:
    """A slow moment falls back to nothing; a restart keeps the time since the engine last worked."""

    async def run() -> None:
        client = Counter(1.0, 1.0, 1.0, 2.0)
        engine = RetryingEngine(client)  # type: ignore[arg-type]
        request = asyncio.ensure_future(engine.generate("m", EncodedPrompt([7]), 1, SAMPLING, 0))
        assert engine.lost_s() == 0.0, "nobody watches it"
        watching = asyncio.ensure_future(wait_for_hang(engine, 0.8))
        await asyncio.sleep(0.7)  # polls at 0.2, 0.4 and 0.6; the next one sees the second token
        assert engine.lost_s() == pytest.approx(0.5)
        await asyncio.sleep(0.2)
        assert engine.lost_s() == pytest.approx(0.1)
        await watching
        assert asyncio.get_running_loop().time() == pytest.approx(0.8 + 0.8 + 0.2), "seen by the next poll"
        engine.pause()
        assert engine.lost_s() == pytest.approx(1.0), "the hang counts"
        await asyncio.sleep(0.3)
        await engine.resume(Counter(1.0))  # type: ignore[arg-type]
        assert (lost := engine.lost_s()) == pytest.approx(1.3)
        await asyncio.sleep(0.1)
        assert engine.lost_s() == lost
        request.cancel()

    with asyncio.Runner(loop_factory=Jumping) as runner:
        runner.run(run())
