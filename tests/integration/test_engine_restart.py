"""An engine that dies or hangs restarts with its adapters, and waiting requests get answers (fake engine)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from skylite.config.engine import EngineConfig
from skylite.engine.canary import verify_folder
from skylite.engine.connections import Address
from skylite.engine.engine_pool import EnginePool
from skylite.engine.interface import Sampling
from skylite.engine.retrying_engine import RetryingEngine
from skylite.engine.start_engines import engines_kept_alive
from skylite.engine.watchdog import RestartPolicy, Watchdog
from skylite.errors import ChildDied, RunFailed
from skylite.processes.child import Supervisor
from skylite.run.run_dir import AdapterVersion
from skylite.types import Call, EncodedPrompt
from tests.alive import is_alive
from tests.e2e.running import words_of
from tests.fakes.launcher import SERVER, FakeLauncher
from tests.unit.engine_cases import SPEC, publish

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=5, stop_token_ids=(), seed=40)


@dataclass(slots=True)
class Scene:
    """Engines kept alive, and how often each was restarted."""

    folder: Path
    max_restarts: int = 1
    restarts: dict[str, int] = field(default_factory=dict)

    def order(self, name: str) -> None:
        (self.folder / name).touch()

    @asynccontextmanager
    async def engines(self, supervisor: Supervisor, count: int = 1) -> AsyncIterator[list[RetryingEngine]]:
        specs = [
            replace(SPEC, name=f"engine-{i}", address=Address.of_socket(self.folder / f"{i}.sock"))
            for i in range(count)
        ]
        config = EngineConfig(stall_timeout_s=1.5, max_restarts=self.max_restarts, start_timeout_s=20)
        restarts = RestartPolicy(
            config=config,
            verify=partial(verify_folder, tolerance=0.01),
            counts=self.restarts,
        )
        logs, launcher = self.folder / "logs", FakeLauncher()
        watchdogs = [Watchdog.start(launcher, spec, logs, supervisor, restarts) for spec in specs]
        async with engines_kept_alive(watchdogs, supervisor) as engines:
            yield engines


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setenv("ENGINE_ORDERS", str(tmp_path))
    return Scene(tmp_path)


@contextmanager
def no_process_left() -> Iterator[None]:
    """No server is left that did not run before. The server that test files share does."""
    before = servers()
    yield
    assert servers() <= before


def servers() -> set[psutil.Process]:
    return {p for p in psutil.Process().children(recursive=True) if str(SERVER) in p.cmdline()}


def servers_of(folder: Path) -> list[psutil.Process]:
    """Without the processes that started them."""
    found = [(p, words_of(p)) for p in servers() if is_alive(p)]
    return [p for p, words in found if words[1:2] == [str(SERVER)] and str(folder) in words[2]]


async def load_verified(engines: list[RetryingEngine], adapter: AdapterVersion) -> None:
    everyone = EnginePool(engines, 0.01)
    await everyone.load(adapter)
    await everyone.verify(adapter)


async def sample(engine: RetryingEngine, adapter: AdapterVersion) -> list[Call]:
    return await engine.generate(adapter.name, EncodedPrompt([1, 2]), 3, SAMPLING, adapter.version)


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ("die", "engine-0 ended with exit code 7."),
        (
            "hang",
            "engine-0 generated no token for 1.5 s while 1 requests waited, and it reports no problem.",
        ),
        ("dead", "engine-0 reports that its engine is dead."),
    ],
)
def test_after_a_restart_the_adapter_is_verified_again_and_the_request_gets_the_same_answer(
    scene: Scene, order: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = publish(scene.folder, 3)

    async def run() -> tuple[list[Call], list[Call]]:
        async with Supervisor() as supervisor, scene.engines(supervisor) as engines:
            await load_verified(engines, adapter)
            before = await sample(engines[0], adapter)
            scene.order(order)
            after = await asyncio.wait_for(sample(engines[0], adapter), 30)
            supervisor.check()
            return before, after

    with no_process_left():
        before, after = asyncio.run(run())
    assert before == after
    assert scene.restarts == {"engine-0": 1}
    assert [m for m in caplog.messages if "ready" not in m] == [
        f"{reason} It restarts (1 of engine.max_restarts=1)."
    ]


def test_an_engine_that_dies_asleep_restarts_when_it_is_needed(scene: Scene) -> None:
    """Before, the trainer has the memory that its start needs."""
    adapter = publish(scene.folder, 3)

    async def run() -> None:
        async with Supervisor() as supervisor, scene.engines(supervisor) as (engine,):
            await load_verified([engine], adapter)
            before = await sample(engine, adapter)
            await engine.sleep()
            (server,) = servers_of(scene.folder)
            server.kill()
            asking = asyncio.ensure_future(sample(engine, adapter))
            await asyncio.sleep(1.0)
            supervisor.check()
            assert scene.restarts == {"engine-0": 1}, "its death was noticed"
            assert servers_of(scene.folder) == []
            assert not asking.done()
            await asyncio.wait_for(engine.wake(), 30)
            assert await asyncio.wait_for(asking, 30) == before
            supervisor.check()

    with no_process_left():
        asyncio.run(run())
    assert scene.restarts == {"engine-0": 1}


def test_an_engine_that_does_not_wake_is_replaced(scene: Scene) -> None:
    adapter = publish(scene.folder, 3)

    async def run() -> None:
        async with Supervisor() as supervisor, scene.engines(supervisor) as (engine,):
            await load_verified([engine], adapter)
            await engine.sleep()
            scene.order("refuse to wake")
            (old,) = servers_of(scene.folder)
            await asyncio.wait_for(engine.wake(), 30)
            assert servers_of(scene.folder) != [old]
            await asyncio.wait_for(sample(engine, adapter), 5)

    asyncio.run(run())
    assert scene.restarts == {"engine-0": 1}


def test_the_other_engine_keeps_sampling_during_a_restart(scene: Scene) -> None:
    adapter = publish(scene.folder, 3)

    async def run() -> None:
        async with Supervisor() as supervisor, scene.engines(supervisor, count=2) as engines:
            await load_verified(engines, adapter)
            scene.order("hang")
            waiting = asyncio.ensure_future(sample(engines[0], adapter))
            await asyncio.sleep(0.2)
            for _ in range(5):
                await asyncio.wait_for(sample(engines[1], adapter), 1.0)
            assert len(await asyncio.wait_for(waiting, 30)) == 3

    asyncio.run(run())
    assert scene.restarts == {"engine-0": 1}


def test_the_run_stops_with_a_reason_when_no_restart_is_left(scene: Scene) -> None:
    adapter = publish(scene.folder, 3)

    async def run() -> None:
        async with Supervisor() as supervisor, scene.engines(supervisor) as engines:
            await load_verified(engines, adapter)
            scene.order("refuse to start")
            scene.order("die")
            asking = asyncio.ensure_future(sample(engines[0], adapter))
            try:
                await asyncio.wait_for(supervisor.watch(), 30)
            finally:
                asking.cancel()

    with no_process_left(), pytest.raises(ChildDied, match="engine-0 ended with exit code 1") as caught:
        asyncio.run(run())
    assert caught.value.log_tail.splitlines()[-1] == "the fake engine does not start"
    assert scene.restarts == {"engine-0": 1}


def test_an_adapter_that_the_new_server_ignores_is_never_used(scene: Scene) -> None:
    adapter = publish(scene.folder, 3)

    async def run() -> None:
        async with Supervisor() as supervisor, scene.engines(supervisor) as engines:
            await load_verified(engines, adapter)
            manifest = adapter.manifest_path.read_text()
            adapter.manifest_path.write_text(manifest.replace('"weights_sha256":"', '"weights_sha256":"0'))
            scene.order("die")
            asking = asyncio.ensure_future(sample(engines[0], adapter))
            try:
                await asyncio.wait_for(supervisor.watch(), 30)
            finally:
                asking.cancel()

    with pytest.raises(Exception, match="sha256"):
        asyncio.run(run())


def test_a_server_that_ends_before_it_is_ready_is_not_restarted(scene: Scene) -> None:
    scene.order("refuse to start")

    async def run() -> None:
        async with Supervisor() as supervisor:
            entering = asyncio.ensure_future(scene.engines(supervisor).__aenter__())
            try:
                await asyncio.wait_for(supervisor.watch(), 15)
            finally:
                entering.cancel()

    with pytest.raises(RunFailed, match="exit code 1"):
        asyncio.run(run())
    assert scene.restarts == {}
