"""Engines of engine.urls in a run: lost and taken back, with no request lost and no adapter unverified."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from skylite.config.train import RunConfig
from skylite.engine.canary import verify_folder
from skylite.engine.engine_pool import EnginePool, LeftOut
from skylite.engine.start_engines import engines_kept_alive
from skylite.engine.url_engines import UrlEngines, UrlWatchdog, url_specs
from skylite.engine.vllm.launcher import VllmLauncher
from skylite.errors import RunFailed
from skylite.processes.child import Supervisor
from skylite.run.run_dir import AdapterVersion
from skylite.types import Call, EncodedPrompt
from tests.decisions import resolved
from tests.fakes.vllm_server import VllmStub, vllm_servers
from tests.logs import logged_messages
from tests.small_run import settings
from tests.unit.bad_server import SAMPLING
from tests.unit.engine_cases import publish

PROMPT = EncodedPrompt((7, 8))
V0, V1, V2 = (f"policy-v00000{i}" for i in range(3))


@dataclass(slots=True)
class Group:
    """The engines of a run under their watchdogs, and what they told it."""

    pool: EnginePool
    supervisor: Supervisor
    changes: list[tuple[int, bool]]
    every: UrlEngines

    async def sample(self, index: int, model: str) -> list[Call]:
        return await self.pool.engines[index].generate(model, PROMPT, 1, SAMPLING, 0)

    async def take(self, adapter: AdapterVersion) -> None:
        """What a step does."""
        await self.pool.load(adapter)
        await self.pool.verify(adapter)
        await self.pool.unload_before(adapter.version)

    async def until(self, *changes: tuple[int, bool]) -> None:
        """Wait for these changes, in all."""
        async with asyncio.timeout(20):
            while self.changes != list(changes):
                self.supervisor.check()
                await asyncio.sleep(0.01)


@asynccontextmanager
async def engines(root: Path, model: Path, stubs: list[VllmStub], **engine: Any) -> AsyncIterator[Group]:
    config = settings(engine={"urls": [stub.url for stub in stubs], **engine})
    run_config = RunConfig(skylite_version="1", config=config, resolved=resolved(model, root))
    changes: list[tuple[int, bool]] = []
    every = UrlEngines(
        launcher=VllmLauncher(),
        run_config=run_config,
        verify=partial(verify_folder, tolerance=0.002),
        left_out=LeftOut(),
        on_change=lambda index, is_back: changes.append((index, is_back)),
    )
    specs = url_specs(run_config, ["q_proj"])
    dogs = [UrlWatchdog(spec, i, every, 0.05, (0.05, 0.1)) for i, spec in enumerate(specs)]
    async with (
        asyncio.timeout(60),
        Supervisor() as supervisor,
        engines_kept_alive(dogs, supervisor) as ready,
    ):
        yield Group(EnginePool(ready, 0.002, left_out=every.left_out), supervisor, changes, every)
        supervisor.check()


def own(log: list[str]) -> list[str]:
    """Without the check's probe."""
    return [line for line in log if ".probe" not in line and "probe.tmp" not in line]


def test_a_killed_engines_requests_go_to_the_other_and_it_is_taken_back_verified(
    tmp_path: Path, tiny_llama: Path
) -> None:
    async def run(stubs: list[VllmStub]) -> None:
        async with engines(tmp_path, tiny_llama, stubs) as group:
            await group.take(publish(tmp_path, 0))
            await asyncio.gather(*(group.sample(i, V0) for i in (0, 1)))
            asked = [asyncio.ensure_future(group.sample(i, V0)) for i in (0, 1, 0, 1)]
            await asyncio.sleep(0.1)
            stubs[1].stop()
            answers = await asyncio.gather(*asked)
            assert [len(calls) for calls in answers] == [1, 1, 1, 1]
            await group.until((1, False))
            await group.take(publish(tmp_path, 1))
            assert len(await group.sample(1, V1)) == 1
            stubs[1].log.clear()
            stubs[1].start()
            await group.until((1, False), (1, True))
            await group.sample(1, V1)
            await group.take(publish(tmp_path, 2))

    with vllm_servers(2, sample_s=0.3) as stubs, logged_messages() as logged:
        asyncio.run(run(stubs))
    # Loaded and verified before it samples; version 0 was unloaded while it was away.
    back = [f"unload {V1}", f"load {V1}", f"score {V1}", "score base", f"sample {V1}"]
    step = [f"load {V2}", f"score {V2}", "score base", f"unload {V1}"]
    assert own(stubs[1].log) == [f"unload {V0}", *back, *step]
    left_out = next(text for text in logged if "left out" in text)
    assert left_out.startswith(f"engine-1 at {stubs[1].url} ")
    assert left_out.endswith("It is left out until it is back; 1 of 2 engines do its work.")
    assert f"engine-1 at {stubs[1].url} is back, with 1 adapter(s) loaded and verified" in "\n".join(logged)


def test_an_engine_that_was_restarted_between_two_requests_is_noticed(
    tmp_path: Path, tiny_llama: Path
) -> None:
    """It answers 404 for the adapter that it lost; nothing else tells within a second."""

    async def run(stubs: list[VllmStub]) -> None:
        async with engines(tmp_path, tiny_llama, stubs) as group:
            await group.take(publish(tmp_path, 0))
            stubs[0].stop()
            stubs[0].start()
            stubs[0].log.clear()
            assert len(await group.sample(0, V0)) == 1
            await group.until((0, False), (0, True))
            assert len(await group.sample(0, V0)) == 1

    with vllm_servers(2) as stubs:
        asyncio.run(run(stubs))
    assert own(stubs[0].log) == [f"unload {V0}", f"load {V0}", f"score {V0}", "score base", f"sample {V0}"]


def test_an_idle_engine_that_was_restarted_is_noticed_by_its_count_of_tokens(
    tmp_path: Path, tiny_llama: Path
) -> None:
    async def run(stubs: list[VllmStub]) -> None:
        async with engines(tmp_path, tiny_llama, stubs) as group:
            await group.take(publish(tmp_path, 0))
            polled = stubs[0].polls
            async with asyncio.timeout(20):
                while stubs[0].polls < polled + 2:  # the first may have been sent before the canary
                    await asyncio.sleep(0.01)
            stubs[0].stop()
            stubs[0].start()
            await group.until((0, False), (0, True))

    with vllm_servers(2) as stubs, logged_messages() as logged:
        asyncio.run(run(stubs))
    assert "was restarted: it counts fewer tokens than before" in "\n".join(logged)


def test_a_silent_engines_requests_go_to_the_other(tmp_path: Path, tiny_llama: Path) -> None:
    async def run(stubs: list[VllmStub]) -> None:
        tight = {"max_num_seqs": 1, "stall_timeout_s": 6.0}
        async with engines(tmp_path, tiny_llama, stubs, **tight) as group:
            await group.take(publish(tmp_path, 0))
            stubs[0].hangs = True
            # The second waits for the only connection.
            answers = await asyncio.gather(*(group.sample(0, V0) for _ in range(2)))
            assert [len(calls) for calls in answers] == [1, 1]
            assert group.changes == [(0, False)]
            stubs[0].hangs = False
            await group.until((0, False), (0, True))

    with vllm_servers(2) as stubs:
        asyncio.run(run(stubs))


@pytest.mark.parametrize(
    ("spoil", "mend", "words"),
    [
        (
            lambda stub: setattr(stub, "off", 0.1),
            lambda stub: setattr(stub, "off", 0.0),
            "disagree about the base model",
        ),
        (
            lambda stub: setattr(stub, "processed", False),
            lambda stub: setattr(stub, "processed", True),
            "gives logprobs from before temperature",
        ),
    ],
)
def test_an_engine_that_came_back_another_stays_out_until_it_is_right(
    tmp_path: Path, tiny_llama: Path, spoil: Callable[[Any], None], mend: Callable[[Any], None], words: str
) -> None:
    async def run(stubs: list[VllmStub], logged: list[str]) -> None:
        async with engines(tmp_path, tiny_llama, stubs) as group:
            await group.take(publish(tmp_path, 0))
            stubs[1].stop()
            await group.sample(1, V0)
            spoil(stubs[1])
            stubs[1].start()
            async with asyncio.timeout(10):
                while not any("stays left out" in text for text in logged):
                    await asyncio.sleep(0.02)
            await asyncio.sleep(0.3)
            assert group.changes == [(1, False)]
            assert [line for line in own(stubs[1].log) if "sample" in line] == []
            mend(stubs[1])
            await group.until((1, False), (1, True))

    with vllm_servers(2) as stubs, logged_messages() as logged:
        asyncio.run(run(stubs, logged))
    stays = [text for text in logged if "stays left out" in text]
    assert len(stays) == 1, "the same reason is printed once"
    assert words in stays[0]


@pytest.mark.parametrize(("count", "least"), [(1, 1), (2, 2)])
def test_too_few_engines_end_the_run_with_a_sentence(
    tmp_path: Path, tiny_llama: Path, count: int, least: int
) -> None:
    async def run(stubs: list[VllmStub]) -> None:
        async with engines(tmp_path, tiny_llama, stubs, min_engines=least) as group:
            await group.take(publish(tmp_path, 0))
            stubs[0].stop()
            asked = asyncio.ensure_future(group.sample(0, V0))
            try:
                await group.until((0, True))  # it never is
            finally:
                assert not asked.done(), "the run ends before a request fails"
                assert group.changes == [(0, False)]

    words = rf"{count - 1} of {count} engines serve, fewer than engine.min_engines={least}: engine-0 at .*"
    with vllm_servers(count) as stubs, pytest.raises(RunFailed, match=words + "--resume; at other addresses"):
        asyncio.run(run(stubs))


def test_a_run_begins_without_an_engine_that_went_away_since_the_check(
    tmp_path: Path, tiny_llama: Path
) -> None:
    async def run(stubs: list[VllmStub]) -> None:
        async with engines(tmp_path, tiny_llama, stubs) as group:
            await group.take(publish(tmp_path, 0))
            assert len(await group.sample(0, V0)) == 1
            assert group.changes == [(0, False)]

    with vllm_servers(2) as stubs:
        stubs[0].stop()
        asyncio.run(run(stubs))


def test_the_end_of_a_run_unloads_its_adapters(tmp_path: Path, tiny_llama: Path) -> None:
    async def run(stubs: list[VllmStub]) -> None:
        async with engines(tmp_path, tiny_llama, stubs) as group:
            await group.pool.load(publish(tmp_path, 0))
            await group.pool.load(publish(tmp_path, 1))
            stubs[1].load_s = 0.5
            cut_off = asyncio.ensure_future(group.pool.load(publish(tmp_path, 2)))
            async with asyncio.timeout(10):
                while f"load {V2}" not in stubs[1].log:
                    await asyncio.sleep(0.01)
                cut_off.cancel()
                stubs[0].stop()
                while len(stubs[1].adapters) < 3:
                    await asyncio.sleep(0.01)
            await group.every.unload_all()

    with vllm_servers(2) as stubs:
        asyncio.run(run(stubs))
        assert stubs[1].adapters == {}
