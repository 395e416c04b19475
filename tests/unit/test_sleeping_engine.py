"""Engines that lend memory to the trainer: requests wait, vLLM's routes, the plan of bytes, bad settings."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from skylite.cli.plan import checked_setup, plan_config
from skylite.config.provenance import from_command_line
from skylite.config.train import TrainConfig
from skylite.engine.interface import Launcher
from skylite.engine.retrying_engine import RetryingEngine
from skylite.engine.vllm.launcher import SLEEP_MIDDLEWARE, VllmLauncher
from skylite.engine.vllm.plugin.sleep import SLEEP, WAKE, SleepRoutes
from skylite.engine.watchdog import wait_for_hang
from skylite.errors import ConfigError, DoesNotFit, EngineFailed
from skylite.model.lent_weights import LentWeights
from skylite.model.policy import base_tensors, load_policy
from skylite.model.process_group import Dist
from skylite.model.quantised_weights import QuantisedWeight
from skylite.resources.gpu_fit import GIB, best_fit, described_gpus, with_settings
from skylite.resources.gpu_memory_plan import plan_memory
from skylite.resources.gpu_placement import assign_gpus
from tests.decisions import resolved
from tests.quantised_models import FORMATS, quantise_model
from tests.tiny_models import make_tiny_model
from tests.unit.doc_scripts import script
from tests.unit.engine_cases import SPEC
from tests.unit.test_gpu_fit import fit

GPU = replace(SPEC, device="cuda", dtype="bfloat16", gpus=(0,), kv_cache_bytes=1 << 30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shapes of Qwen2.5-7B."""
    folder = tmp_path_factory.mktemp("shapes")
    script("generate_gpu_fit").write_shapes(folder, "7B")
    return folder / "7B"


class Recorder:
    """A server that notes what it is asked, and fails the verbs in `failing` once."""

    name = "engine-0"

    def __init__(self, *failing: str) -> None:
        self.asked: list[str] = []
        self.failing = list(failing)

    async def _ask(self, verb: str) -> None:
        self.asked.append(verb)
        if verb in self.failing:
            self.failing.remove(verb)
            raise EngineFailed(f"it does not {verb}")

    async def sleep(self) -> None:
        await self._ask("sleep")

    async def wake(self) -> None:
        await self._ask("wake")

    async def unload_adapter(self, name: str) -> None:
        await self._ask(f"unload {name}")

    async def progress(self) -> float:
        return 0.0

    async def aclose(self) -> None: ...


def test_requests_wait_while_the_engine_sleeps() -> None:
    async def run() -> list[str]:
        client = Recorder()
        engine = RetryingEngine(client)  # type: ignore[arg-type]
        await engine.sleep()
        unloading = asyncio.ensure_future(engine.unload_adapter("v1"))
        needed = asyncio.ensure_future(engine.until_needed())
        await asyncio.sleep(0.05)
        assert not unloading.done()
        assert not needed.done()
        await engine.wake()
        await asyncio.gather(unloading, needed)
        return client.asked

    assert asyncio.run(run()) == ["sleep", "wake", "unload v1"]


@pytest.mark.parametrize("verb", ["sleep", "wake"])
def test_a_server_that_does_not_sleep_or_wake_is_replaced(verb: str) -> None:
    """What memory it holds then, nobody knows."""

    async def run() -> None:
        old, new = Recorder(verb), Recorder()
        engine = RetryingEngine(old)  # type: ignore[arg-type]

        async def turn() -> None:
            await engine.sleep()
            await engine.wake()

        taking = asyncio.ensure_future(turn())
        assert (await asyncio.wait_for(wait_for_hang(engine, 0.4), 5)).what == f"it does not {verb}"
        await engine.resume(new)  # type: ignore[arg-type]
        await asyncio.wait_for(taking, 5)
        assert new.asked == (["sleep", "wake"] if verb == "sleep" else ["wake"])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait_for_hang(engine, 0.4), 1)

    asyncio.run(run())


def test_a_long_sleep_is_no_hang() -> None:
    """vLLM copies a large model's weights for minutes, and generates nothing."""

    class Slow(Recorder):
        async def sleep(self) -> None:
            await asyncio.sleep(1.0)

    async def run() -> None:
        engine = RetryingEngine(Slow())  # type: ignore[arg-type]
        watching = asyncio.ensure_future(wait_for_hang(engine, 0.3))
        await engine.sleep()
        assert not watching.done()
        watching.cancel()

    asyncio.run(run())


class AsyncLlm:
    """What the middleware calls of vLLM's AsyncLLM."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def pause_generation(self, **how: Any) -> None:
        self.calls.append(("pause", how))

    async def release_kv_cache_memory(self) -> None:
        self.calls.append("release")

    async def sleep(self, **how: Any) -> None:
        self.calls.append(("sleep", how))

    async def wake_up(self) -> bool:
        if "release" not in self.calls:
            raise RuntimeError("CUDA out of memory")
        self.calls.append("wake")
        return True


def test_the_routes_of_vllm() -> None:
    """Sleep by what is lent, wake, the words of a failure; all else is passed on."""
    llm, passed = AsyncLlm(), list[str]()

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["app"] = SimpleNamespace(state=SimpleNamespace(engine_client=llm))
        await SleepRoutes(inner)(scope, receive, send)

    async def ask() -> list[tuple[int, str]]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as http:
            replies = [
                await http.post(WAKE),
                await http.post(SLEEP, json={"lends": "kv_cache"}),
                await http.post(WAKE),
                await http.post(SLEEP, json={"lends": "weights"}),
                await http.post(SLEEP, json={"lends": None}),
                await http.get(SLEEP),
                await http.post("/v1/completions"),
            ]
            return [(reply.status_code, reply.text) for reply in replies]

    first, *others = asyncio.run(ask())
    assert (first[0], json.loads(first[1])) == (500, {"error": "RuntimeError: CUDA out of memory"})
    assert [status for status, _ in others] == [200, 200, 200, 500, 200, 200]
    pause = ("pause", {"mode": "abort", "clear_cache": True})
    assert llm.calls == [pause, "release", "wake", ("sleep", {"level": 1, "mode": "abort"})]
    assert passed == [SLEEP, "/v1/completions"]


def test_the_flags_of_a_server_that_sleeps() -> None:
    awake, asleep = (VllmLauncher().command(replace(GPU, lends=lends)) for lends in (None, "kv_cache"))
    assert "--enable-sleep-mode" not in awake
    assert SLEEP_MIDDLEWARE not in awake
    assert asleep[asleep.index("--middleware") + 1] == SLEEP_MIDDLEWARE
    assert "--enable-sleep-mode" in asleep
    assert VllmLauncher().environment(replace(GPU, lends="weights"))["VLLM_SERVER_DEV_MODE"] == "0"


def test_weights_leave_and_come_back_with_their_bits(tmp_path: Path) -> None:
    """In float32 of a bfloat16 file, so that torch allocated them. Input and output embeddings are tied."""
    folder = make_tiny_model(tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    token_ids = torch.tensor([[1, 2, 3]])
    before = model(token_ids).logits
    tensors = [*model.parameters(), *model.buffers()]
    bits, view = [t.clone() for t in tensors], next(model.parameters()).detach()[1:]
    lent = LentWeights([*tensors, view], torch.device("cpu"))
    for _ in range(2):
        lent.leave()
        lent.leave()
        assert {t.untyped_storage().nbytes() for t in tensors} == {0}
        lent.come_back()
        assert all(torch.equal(a, b) for a, b in zip(tensors, bits, strict=True))
        assert torch.equal(view, bits[0][1:])
    assert torch.equal(model(token_ids).logits, before)


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_quantised_base_leaves_and_comes_back(tmp_path: Path, form: str, dist: Dist) -> None:
    """Its matrices are read as they were, and nothing of them stays but the adapters."""
    plain = make_tiny_model(tmp_path / "plain", "qwen3")
    folder = quantise_model(plain, tmp_path / form, form)
    policy = load_policy(resolved(folder, tmp_path), TrainConfig(), dist)
    matrices = [p for p in policy.model.parameters() if isinstance(p, QuantisedWeight)]
    assert matrices
    before = [matrix.widen() for matrix in matrices]
    lent = LentWeights(base_tensors(policy), dist.device)
    lent.leave()
    movable = [t for t in base_tensors(policy) if t.untyped_storage().resizable()]
    assert movable
    assert {t.untyped_storage().nbytes() for t in movable} == {0}
    assert all(p.untyped_storage().nbytes() for p in policy.lora.values())
    lent.come_back()
    assert all(torch.equal(a.widen(), b) for a, b in zip(matrices, before, strict=True))


def test_tensors_elsewhere_stay() -> None:
    weight = torch.ones(3)
    lent = LentWeights([weight], torch.device("cuda"))
    lent.leave()
    assert weight.tolist() == [1.0, 1.0, 1.0]


def test_7b_takes_turns_on_24_gib(model: Path) -> None:
    """Both copies of the base are 14.2 GiB, so neither side fits beside the other."""
    found = fit(model, "24")
    assert found.settings == {"engine.gpu_memory_utilization": 0.85, "engine.sleep": "weights"}
    parameters = 7_615_616_512
    assert found.trainer.weights == found.engine.weights == 2 * parameters
    total, cache, trainer, engine = 24 * GIB, found.memory.kv_cache_bytes, found.trainer, found.engine
    assert cache is not None
    # The trainer computes in what a sleeping engine leaves ...
    assert found.memory.trainer_bytes == total - engine.activations - engine.process - trainer.process
    # ... and waits without its base beside an engine that is awake, within its share.
    assert engine.before_kv() + cache <= 0.85 * total
    assert engine.before_kv() + cache + trainer.adapter + trainer.process <= total
    parts = found.parts(0)
    taken = sum(size for name, size in parts.items() if name != "free" and "in turns" not in name)
    sampling = 2 * parameters + engine.lora_slots + cache
    computing = trainer.total(2048) - trainer.adapter - trainer.process
    assert parts["free"] == total - taken - max(sampling, computing)


def test_an_engine_that_lends_only_its_cache(model: Path) -> None:
    asleep = fit(model, "80", "placement=shared", "engine.sleep=kv_cache")
    awake = fit(model, "80", "placement=shared")
    assert asleep.memory.kv_cache_bytes == awake.memory.kv_cache_bytes
    lent = (asleep.memory.trainer_bytes or 0) - (awake.memory.trainer_bytes or 0)
    assert lent == awake.memory.kv_cache_bytes


def test_a_trainer_that_cannot_even_wait_is_refused(model: Path) -> None:
    typed = from_command_line(("engine.sleep=weights", "engine.gpu_memory_utilization=0.95"))
    config, _ = plan_config(None, typed, 2048)
    found = best_fit(config, checked_setup(config, model), described_gpus("24"))
    assert isinstance(found, DoesNotFit)
    assert "A waiting trainer needs 3.1 GiB, and engines that are awake leave" in found.what


def test_gpus_of_their_own_are_not_lent(model: Path) -> None:
    typed = from_command_line(("engine.sleep=weights", "placement=explicit"))
    config, _ = plan_config(None, typed, 2048)
    gpus = described_gpus("2x80")
    setup = replace(checked_setup(config, model), placement=assign_gpus(config, gpus))
    with pytest.raises(ConfigError, match="with this placement no GPU has both"):
        plan_memory(config, setup)
    shared = replace(setup, placement=assign_gpus(config, gpus[:1]))
    assert plan_memory(config, shared)[0].trainer_bytes


def test_the_machine_holds_what_takes_turns(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's copy, up to twice as large as it is pinned, and the trainer's."""
    settings = ("engine.sleep=weights", "engine.gpu_memory_utilization=0.85", "trainer.checkpointing=full")
    config, _ = plan_config(None, from_command_line(settings), 2048)
    setup, gpus = checked_setup(config, model), described_gpus("24")
    here = replace(assign_gpus(config, gpus), free_bytes={0: 24 * GIB})
    engine = setup.engine(config)
    needed = 2 * (engine.weights + engine.lora_slots) + engine.weights
    monkeypatch.setattr("skylite.resources.gpu_memory_plan.available_memory", lambda: needed)
    assert plan_memory(config, replace(setup, placement=here))[0].trainer_bytes
    monkeypatch.setattr("skylite.resources.gpu_memory_plan.available_memory", lambda: needed - 1)
    with pytest.raises(DoesNotFit, match=r"keeps up to 4\d\.\d GiB of weights in the machine's memory"):
        plan_memory(config, replace(setup, placement=here))


def test_a_launcher_of_ones_own_need_not_know_of_sleep(model: Path) -> None:
    class Silent:
        name = "mine"
        memory = VllmLauncher().memory

    class Inherits(VllmLauncher):
        check_sleep = Launcher.check_sleep

    config, _ = plan_config(None, from_command_line(()), 2048)
    for launcher in (Silent(), Inherits()):
        setup = replace(checked_setup(config, model), launcher=cast(Launcher, launcher))
        found = best_fit(config, setup, described_gpus("24"))
        assert isinstance(found, DoesNotFit)
        with pytest.raises(ConfigError, match="has no check_sleep"):
            plan_memory(with_settings(config, {"engine.sleep": "kv_cache"}), setup)


def test_a_cpu_and_another_vllm_refuse_to_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="this run has no GPU"):
        VllmLauncher().check_sleep("cpu", "kv_cache")
    monkeypatch.setattr("skylite.engine.vllm.launcher.vllm_version", lambda: "0.26.0")
    with pytest.raises(ConfigError, match=re.escape("vLLM 0.26.0 does not release its KV cache alone")):
        VllmLauncher().check_sleep("cuda", "kv_cache")
    VllmLauncher().check_sleep("cuda", "weights")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"rollout": {"max_staleness": 1}}, "rollout.max_staleness=1 samples while the trainer computes"),
        ({"placement": "split"}, "placement=split gives them GPUs of their own"),
        ({"engine": {"policies": 2}}, "the policies of a sweep"),
        ({"engine": {"urls": ["http://127.0.0.1:1"]}}, "the engines of engine.urls may have other users"),
        ({"algorithm": {"name": "sft"}}, "algorithm.name=sft has no engine"),
    ],
)
def test_what_needs_engines_awake_is_refused(settings: dict[str, Any], why: str) -> None:
    engine = {**settings.get("engine", {}), "sleep": "kv_cache"}
    with pytest.raises(ValueError, match=re.escape(why)):
        TrainConfig.model_validate({**settings, "engine": engine})
    TrainConfig.model_validate({**settings, "engine": {**engine, "sleep": "auto"}})
