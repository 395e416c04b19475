"""Engines that skylite does not start: those of engine.urls, each checked, watched and, if lost, replaced.

A lost engine's requests go to the others. It is asked again and again, and taken back once it has loaded the
run's adapters and passed their canaries.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from skylite.config.lora import LoraConfig
from skylite.config.train import RunConfig
from skylite.data.chat_tokenizer import ChatTokenizer
from skylite.engine.connections import Address, api_key
from skylite.engine.engine_pool import LeftOut
from skylite.engine.interface import Engine, EngineSpec, Launcher, Sampling, ServerFacts
from skylite.engine.probe_adapter import probe_adapter
from skylite.engine.pushed_adapters import PushingEngine, pushed
from skylite.engine.retrying_engine import BACKOFF_S, RetryingEngine
from skylite.engine.start_engines import engine_spec
from skylite.engine.watchdog import Verify, wait_for_hang
from skylite.errors import EngineFailed, RunFailed, SkyliteError
from skylite.run.run_dir import AdapterVersion
from skylite.types import Call, EncodedPrompt

logger = logging.getLogger(__name__)
RETRY_S = 5.0
"""Between attempts to take an engine back."""
UNLOAD_S = 5.0
CUT_SHORT_S = (0.5, 1.0)
"""Waits before a load that was cut short is undone again."""
OnChange = Callable[[int, bool], None]
"""Gets the number of an engine, and whether it serves."""


def url_specs(run_config: RunConfig, target_modules: list[str]) -> list[EngineSpec]:
    """What a run needs of each engine of engine.urls. Raises ConfigError without their keys."""
    engine = run_config.config.engine
    key = api_key("engine.key_env", engine.key_env, "engines of engine.urls")
    push_key = api_key("engine.push_key_env", engine.push_key_env, "receivers of engine.push_urls")
    receivers = [Address.parse(url, push_key, engine.ca_file) for url in engine.push_urls]
    return [
        replace(
            engine_spec(run_config, target_modules, index, Path()),
            name=f"engine-{index} at {url}",
            address=Address.parse(url, key, engine.ca_file),
            receiver=receivers[index] if receivers else None,
        )
        for index, url in enumerate(engine.urls)
    ]


async def check_url_engine(
    launcher: Launcher,
    spec: EngineSpec,
    adapters: Path,
    lora: LoraConfig,
    tokenizer: ChatTokenizer | None = None,
) -> ServerFacts:
    """Check that the server can serve a run with its adapters in this folder. Raises SkyliteError."""
    with probe_adapter(adapters, spec.model_path, lora) as probe:
        if spec.receiver is None:
            return await launcher.check_server(spec, lora, probe, tokenizer)
        async with pushed(spec.name, spec.receiver, probe) as there:
            return await launcher.check_server(spec, lora, there, tokenizer)


@dataclass(slots=True, kw_only=True)
class UrlEngines:
    """All engines of a run, and which of them serve."""

    launcher: Launcher
    run_config: RunConfig
    verify: Verify
    left_out: LeftOut
    on_change: OnChange
    engines: dict[str, RetryingEngine] = field(default_factory=dict)
    """By name."""

    async def check(self, spec: EngineSpec) -> ServerFacts:
        """`check_url_engine`, in the run's folder of adapters."""
        adapters = self.run_config.resolved.identity.lora_sync_path
        return await check_url_engine(self.launcher, spec, adapters, self.run_config.config.lora)

    def connect(self, spec: EngineSpec) -> Engine:
        """A client of the engine, which gets its adapters by the receiver, if it has one."""
        client = self.launcher.connect(spec)
        return client if spec.receiver is None else PushingEngine(client, spec.receiver)

    def leave_out(self, name: str, reason: str) -> str:
        """Count an engine out. Returns how many are left, in words; raises RunFailed if these are too few."""
        self.left_out.reasons[name] = reason
        self.left_out.since_canary.add(name)
        least, total = self.run_config.config.engine.min_engines, len(self.run_config.config.engine.urls)
        serving = total - len(self.left_out.reasons)
        if serving < least:
            raise RunFailed(
                f"{serving} of {total} engines serve, fewer than engine.min_engines={least}: "
                f"{' '.join(self.left_out.reasons.values())}",
                "Start them again, and continue with --resume; at other addresses with --set "
                "'engine.urls=[\"URL\", ...]'.",
            )
        return f"{serving} of {total} engines"

    def another(self) -> RetryingEngine:
        """The serving engine with the fewest requests. Raises EngineFailed without any."""
        serving = [e for name, e in self.engines.items() if name not in self.left_out.reasons]
        if not serving:
            raise EngineFailed("No engine of engine.urls serves.")
        return min(serving, key=lambda engine: engine.in_flight)

    async def unload_all(self) -> None:
        """Unload the run's adapters at its end, as far as the engines answer within UNLOAD_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(UNLOAD_S):
                held = [(e, name) for e in self.engines.values() for name in e.may_hold]
                # A load that the run's end cancelled may be done only after its unload.
                cut_short = [(e, name) for e, name in held if name not in e.adapters]
                await _unload(held)
                for wait_s in CUT_SHORT_S if cut_short else ():
                    await asyncio.sleep(wait_s)
                    await _unload(cut_short)


async def _unload(names: Sequence[tuple[RetryingEngine, str]]) -> None:
    await asyncio.gather(*(engine.unload_adapter(name) for engine, name in names), return_exceptions=True)


class Absent:
    """In the place of an engine that is left out: others sample, and it loads adapters when it is back."""

    def __init__(self, name: str, engines: UrlEngines) -> None:
        self.name, self._engines = name, engines

    async def is_ready(self) -> bool:
        return False

    async def progress(self) -> float:
        return 0.0

    async def generate(
        self, model: str, prompt: EncodedPrompt, n: int, sampling: Sampling, version: int
    ) -> Sequence[Call | None]:
        return await self._engines.another().generate(model, prompt, n, sampling, version)

    async def score(self, model: str, prompt: EncodedPrompt) -> list[float]:
        return await self._engines.another().score(model, prompt)

    async def top_tokens(
        self, model: str, token_ids: Sequence[int], count: int
    ) -> list[list[tuple[int, float]]]:
        return await self._engines.another().top_tokens(model, token_ids, count)

    async def load_adapter(self, adapter: AdapterVersion) -> None:
        """Nothing; RetryingEngine notes it."""

    async def unload_adapter(self, name: str) -> None:
        """Nothing."""

    async def sleep(self) -> None:
        """Nothing."""

    async def wake(self) -> None:
        """Nothing."""

    async def aclose(self) -> None:
        """Nothing."""


class UrlWatchdog:
    """One engine, in and out of the run. watchdog.Watchdog does the same for a process that it restarts."""

    def __init__(
        self,
        spec: EngineSpec,
        index: int,
        engines: UrlEngines,
        retry_s: float = RETRY_S,
        backoff_s: Sequence[float] = BACKOFF_S,
    ) -> None:
        self.spec = spec
        self._index, self._engines, self._retry_s, self._backoff_s = index, engines, retry_s, backoff_s
        self._config, self._left_out = engines.run_config.config.engine, engines.left_out.reasons
        self._failed: asyncio.Future[EngineFailed] | None = None
        """Of a request, after its retries. None while the engine is left out."""
        self._held = set[str]()
        """Adapters that the server may hold from before it was left out."""

    async def wait_ready(self) -> RetryingEngine:
        """The engine, or others in its place. Raises RunFailed if too few serve."""
        nobody = Absent(self.spec.name, self._engines)
        engine = RetryingEngine(nobody, self._backoff_s, self._on_failure)
        self._engines.engines[self.spec.name] = engine
        try:
            await self._take(engine)
        except SkyliteError as error:
            self._leave_out(error)
        return engine

    async def keep_alive(self, engine: RetryingEngine) -> NoReturn:
        """Leave the engine out when it fails, and take it back. Raises RunFailed if too few serve."""
        while True:
            if self.spec.name not in self._left_out:
                error = await self._wait_for_failure(engine)
                engine.pause()
                self._held = set(engine.adapters)
                self._leave_out(error)
                await engine.resume(Absent(self.spec.name, self._engines))
            await asyncio.sleep(self._retry_s)
            await self._try_to_take(engine)

    def _on_failure(self, error: EngineFailed) -> None:
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(error)

    async def _wait_for_failure(self, engine: RetryingEngine) -> EngineFailed:
        """The reason, once requests fail again and again, or the engine hangs or has been restarted."""
        assert self._failed is not None, "it serves"
        hang = asyncio.ensure_future(wait_for_hang(engine, self._config.stall_timeout_s))
        try:
            await asyncio.wait({hang, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            return self._failed.result() if self._failed.done() else hang.result()
        finally:
            hang.cancel()

    def _leave_out(self, error: SkyliteError) -> None:
        self._failed = None
        self._engines.on_change(self._index, False)
        left = self._engines.leave_out(self.spec.name, error.what)
        logger.warning(f"{error.what} It is left out until it is back; {left} do its work.")

    async def _answers(self) -> bool:
        client = self._engines.launcher.connect(self.spec)
        try:
            return await client.is_ready()
        finally:
            await client.aclose()

    async def _try_to_take(self, engine: RetryingEngine) -> None:
        try:
            if not await self._answers():
                return
            await self._take(engine)
        except SkyliteError as error:
            if self._left_out[self.spec.name] != error.what:
                self._left_out[self.spec.name] = error.what
                logger.warning(f"{error} It stays left out.")
            return
        self._engines.on_change(self._index, True)
        logger.info(
            f"{self.spec.name} is back, with {len(engine.adapters)} adapter(s) loaded and verified: it "
            "samples again"
        )

    async def _take(self, engine: RetryingEngine) -> None:
        """Check the server, give it the run's adapters, verify these, and let it do its work.

        Raises SkyliteError; the engine stays as it was then.
        """
        timeout_s = self._config.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                facts = await self._engines.check(self.spec)
                client = self._engines.connect(replace(self.spec, base_name=facts.base_name))
                try:
                    await self._reload(client, engine)
                except BaseException:
                    await client.aclose()
                    raise
        except TimeoutError:
            raise EngineFailed(
                f"{self.spec.name} was not ready within {timeout_s:g} s (engine.start_timeout_s)."
            ) from None
        # No await up to the new client: what the run loads from now on goes to it.
        self._failed = asyncio.get_running_loop().create_future()
        self._left_out.pop(self.spec.name, None)
        await engine.resume(client)

    async def _reload(self, client: Engine, engine: RetryingEngine) -> None:
        """Load and verify the run's adapters, and those that the run loads meanwhile; unload others of it."""
        held, loaded = set(self._held), set[str]()
        while (surplus := held - engine.adapters.keys()) or engine.adapters.keys() - loaded:
            for name in surplus:
                await client.unload_adapter(name)
            held -= surplus
            for adapter in [a for name, a in engine.adapters.items() if name not in loaded]:
                await client.unload_adapter(adapter.name)  # it may hold it from before
                await client.load_adapter(adapter)
                held.add(adapter.name)
                loaded.add(adapter.name)
                await self._engines.verify(client, adapter)
