"""A service's front with a made-up trainer and engines, reached over HTTP without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np

from skylite.config.train import RunConfig
from skylite.run.run_dir import RunDir, adapter_name
from skylite.service.app import make_app, owner_of
from skylite.service.errors import Rejected
from skylite.service.front import Front
from skylite.service.plan import Base
from skylite.service.samplers import Samplers
from skylite.service.saved import SavedPolicies
from skylite.service.wire import _CLASSES, FLOAT32, INT64
from skylite.verbs import Datum
from tests.decisions import resolved
from tests.small_run import settings

ANN, BOB = "tml-key-of-ann-000000", "tml-key-of-bob-000000"
MODEL = "owner/base"


@dataclass
class MadeUpTrainer:
    """Notes commands, and gives what the real one would in form."""

    folder: Path
    """Of adapters."""
    commands: list[dict[str, Any]] = field(default_factory=list)
    policies: set[str] = field(default_factory=set)
    delay_s: float = 0.0

    async def command(self, verb: str, **values: Any) -> Any:
        self.commands.append({"verb": verb, **values})
        await asyncio.sleep(self.delay_s)
        name = values["policy"]
        if verb == "add":
            self.policies.add(name)
        elif name not in self.policies:
            raise Rejected(f"There is no policy {name!r}.")
        if verb == "remove":
            self.policies.discard(name)
        if verb == "forward_backward":
            sizes = [len(datum["targets"]) for datum in values["data"]]
            return {"logprobs": [np.full(n, -1.0, np.float32) for n in sizes], "loss": float(sum(sizes))}
        if verb == "save":
            Path(values["path"]).mkdir(parents=True)
        if verb == "publish":
            place = self.folder / adapter_name(values["version"])
            place.mkdir(parents=True)
            for file in ("adapter_config.json", "adapter_model.safetensors", "manifest.json"):
                (place / file).write_text(file)
        return 2.5 if verb == "optim_step" else None


@dataclass
class MadeUpSamplers:
    """Answers each sample with its version."""

    forgotten: list[int] = field(default_factory=list)

    async def sample(self, version: int | None, request: Any) -> bytes:
        return f"sampled {version}".encode()

    async def forget(self, version: int) -> bool:
        self.forgotten.append(version)
        return True


@dataclass
class Service:
    front: Front
    trainer: MadeUpTrainer
    http: httpx.AsyncClient

    async def post(self, path: str, body: Any = None, key: str = ANN, **options: Any) -> httpx.Response:
        if not isinstance(body, bytes | None):
            options["json"], body = body, None
        headers = {"X-API-Key": key, **options.pop("headers", {})}
        return await self.http.post(f"/api/v1/{path}", content=body, headers=headers, **options)

    async def get(self, path: str, key: str = ANN) -> httpx.Response:
        return await self.http.get(f"/api/v1/{path}", headers={"X-API-Key": key})

    async def answer(self, reply: httpx.Response, key: str = ANN) -> Any:
        """What the future of a reply gives: JSON, or bytes."""
        assert reply.status_code == 200, reply.text
        name = reply.json()["request_id"]
        got = await self.post("retrieve_future", {"request_id": name}, key)
        assert got.status_code == 200, got.text
        is_json = got.headers["content-type"] == "application/json"
        return got.json() if is_json else got.content

    async def session(self, key: str = ANN) -> str:
        name: str = (await self.post("create_session", {"tags": [], "sdk_version": "x"}, key)).json()[
            "session_id"
        ]
        return name

    async def policy(self, session: str, number: int = 0, key: str = ANN, **lora: Any) -> str:
        body = {
            "session_id": session,
            "model_seq_id": number,
            "base_model": MODEL,
            "lora_config": {"rank": 4, **lora},
        }
        name: str = (await self.answer(await self.post("create_model", body, key), key))["model_id"]
        return name


@asynccontextmanager
async def service(folder: Path, *, timeout_s: float = 60.0, policies: int = 4) -> AsyncIterator[Service]:
    """A front for Ann and Bob, whose policies hold at most `policies`."""
    run = RunDir(folder)
    run.default_adapters.mkdir(parents=True, exist_ok=True)
    config = settings(
        model={"name": MODEL},
        lora={"rank": 8},
        rollout={"max_prompt_tokens": 20, "max_completion_tokens": 12},
    )
    run_config = RunConfig(skylite_version="test", config=config, resolved=resolved(folder, folder))
    base = Base(
        run=run,
        run_config=run_config,
        canary=[],
        vocabulary=100,
        modules=["q_proj", "up_proj"],
        attention=["q_proj"],
        others=["up_proj"],
    )
    trainer = MadeUpTrainer(run.default_adapters)
    front = Front(
        base,
        cast(Any, trainer),
        cast(Samplers, MadeUpSamplers()),
        SavedPolicies.read(folder / "policies"),
        policies,
        timeout_s,
    )
    app = make_app(front, {owner_of(ANN): "1", owner_of(BOB): "2"})
    tidying = asyncio.create_task(front.tidy())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as http:
        try:
            yield Service(front, trainer, http)
        finally:
            tidying.cancel()
            for name in list(front.sessions):
                await front.end_session(name)


def forward_backward(
    model: str,
    number: int,
    loss: str = "cross_entropy",
    tokens: tuple[int, ...] = (1, 2, 3),
    **changes: Any,
) -> bytes:
    """A request of one datum, as Tinker's client encodes it."""
    message = _CLASSES["ForwardBackwardRequest"](model_id=model, seq_id=number, loss_fn=loss)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens, np.int32).tobytes()
    inputs: dict[str, Any] = {"target_tokens": np.array(tokens, np.int64)}
    names = ("weights",) if loss == "cross_entropy" else ("logprobs", "advantages")
    inputs |= {name: np.ones(len(tokens), np.float32) for name in names}
    for key, value in {**inputs, **changes}.items():
        if value is None:
            continue
        entry = datum.loss_fn_inputs.add(key=key)
        entry.value.dtype = INT64 if value.dtype == np.int64 else FLOAT32
        entry.value.dense = value.tobytes()
        entry.value.shape.append(len(value))
    return bytes(message.SerializeToString())


def data_messages() -> list[dict[str, Any]]:
    """Six sequences as the trainer gets them, with all that a loss of samples reads."""
    rng = np.random.default_rng(1)
    return [
        Datum(
            token_ids=rng.integers(1, 250, length),
            targets=rng.integers(1, 250, length),
            inputs={
                "logprobs": (-6 + rng.normal(size=length) * 0.3).astype(np.float32),
                "advantages": rng.normal(size=length).astype(np.float32),
            },
        ).to_message()
        for length in (5, 9, 14, 14, 7, 3)
    ]
