"""What the service does for its clients: sessions, policies with their requests in order, saved things.

Consumes: requests, which app.py reads. Waits for: the trainer and the engines. Produces: futures with
answers. Unblocks: nobody; a client asks for each answer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from skylite.config.lora import LoraConfig
from skylite.errors import ConfigError, SkyliteError, convert_os_errors
from skylite.run.run_dir import adapter_name, published_versions
from skylite.service import requests as r
from skylite.service.errors import Rejected
from skylite.service.futures import Answer, Future, Futures, answer
from skylite.service.plan import Base
from skylite.service.samplers import Samplers
from skylite.service.saved import KINDS, Saved, SavedPolicies, SavedPolicy, size_of
from skylite.service.trainer_link import TrainerLink
from skylite.service.wire import ForwardBackward, write_scored
from skylite.verbs import Scored

logger = logging.getLogger(__name__)
ALPHA = 32.0
"""Tinker's, for every rank."""
KEPT_UNNAMED = 8
"""Unnamed adapters of a policy that can be sampled from, the newest: a loop publishes one each step."""
MOST_WAITING = 4096
"""Requests of a policy that wait for their turn, or for an earlier one that has not come."""
MOST_WAITING_BYTES = 1 << 30
"""Of all clients."""
TIDY_S = 5.0
LINK_S = 3600.0
"""For the URL of a download."""


@dataclass(slots=True)
class Session:
    """A client, from its first request to its end or its silence."""

    owner: str
    seen: float
    models: dict[int, str] = field(default_factory=dict)
    """Number of a training client -> the future that creates it."""
    samplers: dict[int, str] = field(default_factory=dict)
    """Number of a sampling client -> its sampling session."""


@dataclass(slots=True)
class Sampler:
    """A sampling session."""

    owner: str
    session: str
    path: str | None
    """tinker:// path; None: of the base, or unnamed."""
    version: int | None
    """Of the published adapter. None: the base."""
    clones: int = 0


@dataclass(slots=True, eq=False)
class Policy:
    """A training client: its requests are carried out in the order of their numbers."""

    session: str
    record: SavedPolicy
    next: int = 1
    waiting: dict[int, tuple[Future, Callable[[], Awaitable[Answer]], int]] = field(default_factory=dict)
    """By number: the future, the work, and the request's bytes."""
    names: dict[int, str] = field(default_factory=dict)
    """Number -> its future. A request that comes again gets the same one."""
    unnamed: deque[int] = field(default_factory=deque)
    """Versions of unnamed adapters."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    worker: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class Front:
    """The state of a service."""

    base: Base
    trainer: TrainerLink
    samplers: Samplers
    saved: SavedPolicies
    most_policies: int
    session_timeout_s: float
    sessions: dict[str, Session] = field(default_factory=dict)
    policies: dict[str, Policy] = field(default_factory=dict)
    sampling: dict[str, Sampler] = field(default_factory=dict)
    futures: Futures = field(default_factory=Futures)
    links: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Secret of a download -> the adapter's version, and when the link ends."""
    ended: deque[str] = field(default_factory=lambda: deque(maxlen=1000))
    """Sessions, so that their clients learn it."""
    version: int = 0
    """Of the newest adapter."""
    waiting_bytes: int = 0
    _gone: list[int] = field(default_factory=list)
    """Versions to delete once no request uses them."""

    def __post_init__(self) -> None:
        found = {adapter.version for adapter in published_versions(self.base.run.default_adapters)}
        self.version = max(found, default=0)
        self._gone += sorted(found - self.saved.versions())  # unnamed ones of an earlier service

    # Sessions

    def create_session(self, owner: str) -> str:
        name = secrets.token_hex(8)
        self.sessions[name] = Session(owner, time.monotonic())
        return name

    def session(self, name: str, owner: str) -> Session:
        """The session, which lives on. Raises Rejected."""
        found = self.sessions.get(name)
        if found is None or found.owner != owner:
            if name in self.ended:
                raise Rejected("This session has ended.", 410)
            raise Rejected("You have no such session.", 404)
        found.seen = time.monotonic()
        return found

    async def end_session(self, name: str) -> None:
        """Forget its policies, unnamed adapters and futures. What it saved stays."""
        del self.sessions[name]
        self.ended.append(name)
        self.futures.forget(name)
        for key in [key for key, sampler in self.sampling.items() if sampler.session == name]:
            del self.sampling[key]
        for key in [key for key, policy in self.policies.items() if policy.session == name]:
            await self._end_policy(key)

    async def tidy(self) -> None:
        """End silent sessions and delete what is over, for as long as the service runs."""
        while True:
            await asyncio.sleep(min(TIDY_S, self.session_timeout_s / 4))
            try:
                await self._tidy_once(time.monotonic())
            except SkyliteError as error:  # such as a full disk: it may have room the next time
                logger.warning(f"not everything could be tidied up: {error}")

    async def _tidy_once(self, now: float) -> None:
        for name, session in list(self.sessions.items()):
            if now - session.seen > self.session_timeout_s:
                await self.end_session(name)
        self.futures.forget()
        self.links = {key: link for key, link in self.links.items() if link[1] > now}
        for policy, key in self.saved.expired():
            self.delete(policy, key)
        gone, self._gone = self._gone, []
        self._gone += [v for v in gone if not await self.samplers.forget(v)]

    # Policies

    def create_policy(self, request: r.CreateModel, owner: str) -> str:
        """A future of the new policy's id."""
        session, lora = self.session(request.session_id, owner), request.lora_config
        self.check_model(request.base_model)
        check_optimizer(request.optimizer_config)
        if lora is None:
            raise Rejected("lora_config is missing: this service trains LoRA adapters alone.")
        seed = secrets.randbelow(2**31) if lora.seed is None else lora.seed
        own = self._lora(lora.rank, attention=lora.train_attn, mlp=lora.train_mlp)
        record = SavedPolicy(
            owner=owner,
            fingerprint=self.base.run_config.resolved.model.fingerprint,
            lora=own,
            train_attn=lora.train_attn,
            train_mlp=lora.train_mlp,
            seed=seed,
        )
        return self._new_policy(session, request.session_id, request.model_seq_id, record, None)

    def create_from_state(self, request: r.LoadWeights, owner: str) -> str:
        """A future of the new policy, with the LoRA configuration of the state."""
        assert request.session_id is not None
        assert request.model_seq_id is not None
        session = self.session(request.session_id, owner)
        if request.base_model is not None:
            self.check_model(request.base_model)
        check_optimizer(request.optimizer_config or r.Optimizer())
        state, record, _ = self.saved.find(request.path, owner, "weights")
        self._same_base(record, request.path)
        rank = self._lora(record.lora.rank, attention=record.train_attn, mlp=record.train_mlp).rank
        own = record.model_copy(update={"saved": {}, "lora": record.lora.model_copy(update={"rank": rank})})

        async def load(policy: str) -> Answer:
            path = self.saved.state_path(state, request.path.rpartition("/")[2])
            await self.trainer.command("load", policy=policy, path=str(path), optimizer=request.optimizer)
            return {"type": "load_weights", "path": request.path, "model_id": policy}

        return self._new_policy(session, request.session_id, request.model_seq_id, own, load)

    def policy(self, name: str, owner: str) -> Policy:
        """Raises Rejected."""
        found = self.policies.get(name)
        if found is None or found.record.owner != owner:
            raise Rejected("You have no such model. Its session may have ended.", 404)
        self.session(found.session, owner)
        return found

    def in_turn(
        self, name: str, number: int, owner: str, work: Callable[[], Awaitable[Answer]], size: int = 0
    ) -> str:
        """The future of a policy's request, which is carried out after those with lower numbers."""
        policy = self.policy(name, owner)
        if number in policy.names:
            return policy.names[number]
        if number < policy.next:
            raise Rejected(f"The request with seq_id {number} has been answered already.")
        if len(policy.waiting) >= MOST_WAITING or self.waiting_bytes + size > MOST_WAITING_BYTES:
            raise Rejected("Too many requests wait. Try again later.", 429)
        future = policy.names[number] = self.futures.create(owner, policy.session)
        policy.waiting[number] = (self.futures.by_id[future], work, size)
        self.waiting_bytes += size
        policy.arrived.set()
        return future

    # Verbs in turn

    def forward_backward(self, request: ForwardBackward, owner: str, size: int) -> str:
        async def work() -> Answer:
            data, loss, settings = await asyncio.to_thread(
                request.checked, self.base.vocabulary, self.base.max_tokens
            )
            done = await self.trainer.command(
                "forward_backward",
                policy=request.policy,
                data=[datum.to_message() for datum in data],
                loss=loss,
                settings=settings,
                backward=request.backward,
            )
            scored = Scored(logprobs=done["logprobs"], loss=done["loss"])
            return await asyncio.to_thread(write_scored, scored, [datum.width for datum in data])

        return self.in_turn(request.policy, request.number, owner, work, size)

    def optim_step(self, request: r.OptimStep, owner: str) -> str:
        async def work() -> Answer:
            params = request.adam_params.model_dump(exclude={"type"})
            norm = await self.trainer.command("optim_step", policy=request.model_id, params=params)
            return {"metrics": {"grad_norm": norm}}

        return self.in_turn(request.model_id, request.seq_id, owner, work)

    def save_state(self, request: r.SaveWeights, owner: str) -> str:
        policy, record = request.model_id, self.policy(request.model_id, owner).record

        async def work() -> Answer:
            name = request.path or f"{request.seq_id:06d}"
            path, key = self.saved.state_path(policy, name), f"weights/{name}"
            if key in record.saved and not request.overwrite:
                raise Rejected(f"The state {name!r} exists. Choose another name, or set overwrite.")
            with convert_os_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            await self.trainer.command("save", policy=policy, path=str(path))
            size = await asyncio.to_thread(size_of, path)
            return {
                "type": "save_weights",
                "path": self._add(policy, record, key, request.ttl_seconds, size=size),
            }

        return self.in_turn(policy, request.seq_id, owner, work)

    def load_state(self, request: r.LoadWeights, owner: str) -> str:
        assert request.model_id is not None
        assert request.seq_id is not None
        policy, record = request.model_id, self.policy(request.model_id, owner).record

        async def work() -> Answer:
            state, of_state, _ = self.saved.find(request.path, owner, "weights")
            self._same_base(of_state, request.path)
            if of_state.lora != record.lora:
                raise Rejected(
                    f"{request.path} has rank {of_state.lora.rank} or other modules than this model, of rank "
                    f"{record.lora.rank}."
                )
            path = self.saved.state_path(state, request.path.rpartition("/")[2])
            await self.trainer.command("load", policy=policy, path=str(path), optimizer=request.optimizer)
            return {"type": "load_weights", "path": request.path, "model_id": policy}

        return self.in_turn(policy, request.seq_id, owner, work)

    def save_for_sampler(self, request: r.SaveForSampler, owner: str) -> str:
        name, policy = request.model_id, self.policy(request.model_id, owner)

        async def work() -> Answer:
            if request.path is not None:
                path = await self._publish(
                    name, policy.record, f"sampler_weights/{request.path}", request.ttl_seconds
                )
                return {"type": "save_weights_for_sampler", "path": path}
            number = request.sampling_session_seq_id
            if number is None:
                raise Rejected("Neither path nor sampling_session_seq_id is there.")
            version = await self._publish_version(name)
            policy.unnamed.append(version)
            while len(policy.unnamed) > KEPT_UNNAMED:
                self._gone.append(policy.unnamed.popleft())
            sampler = Sampler(owner, policy.session, None, version)
            return {
                "type": "save_weights_for_sampler",
                "sampling_session_id": self._add_sampler(policy.session, number, sampler),
            }

        return self.in_turn(name, request.seq_id, owner, work)

    def save_external(self, request: r.SaveExternal, owner: str) -> str:
        name, record = request.model_id, self.policy(request.model_id, owner).record

        async def work() -> Answer:
            path = await self._publish(name, record, f"external_weights/{request.path}", request.ttl_seconds)
            return {"type": "save_weights_external", "path": path}

        return self.in_turn(name, request.seq_id, owner, work)

    # Sampling

    def create_sampler(self, request: r.CreateSamplingSession, owner: str) -> str:
        session = self.session(request.session_id, owner)
        if request.sampling_session_seq_id in session.samplers:
            return session.samplers[request.sampling_session_seq_id]
        sampler = self._sampler_of(request.base_model, request.model_path, request.session_id, owner)
        return self._add_sampler(request.session_id, request.sampling_session_seq_id, sampler)

    def sampler(self, name: str, owner: str) -> Sampler:
        """Raises Rejected."""
        found = self.sampling.get(name)
        if found is None or found.owner != owner:
            raise Rejected("You have no such sampling session. Its session may have ended.", 404)
        self.session(found.session, owner)
        return found

    def sample(self, request: r.SampleRequest, owner: str) -> dict[str, Any]:
        """The future of the completions, and their ids."""
        if request.sampling_session_id is None:
            raise Rejected("sampling_session_id is missing. Create a sampling client first.")
        sampler = self.sampler(request.sampling_session_id, owner)
        name = self.futures.create(owner, sampler.session)
        self.futures.by_id[name].is_sample = True
        self.futures.start(name, lambda: self.samplers.sample(sampler.version, request))
        ids = [f"{name}:{index}" for index in range(request.num_samples)]
        return {"request_id": name, "sample_sequence_ids": ids}

    # Saved things

    def checkpoints(self, policy: str, owner: str) -> list[dict[str, Any]]:
        """As the API lists them. Raises Rejected."""
        record = self.record(policy, owner)
        return [self._checkpoint(policy, key, saved) for key, saved in record.saved.items()]

    def record(self, policy: str, owner: str) -> SavedPolicy:
        """Of a policy that lives or has saved something. Raises Rejected."""
        live = self.policies.get(policy)
        record = self.saved.by_id.get(policy) or (live.record if live is not None else None)
        if record is None or record.owner != owner:
            raise Rejected("You have no such model.", 404)
        return record

    def delete(self, policy: str, key: str) -> None:
        """Delete a saved thing."""
        saved = self.saved.remove(policy, key)
        if saved.version is not None:
            self._gone.append(saved.version)

    def own_key(self, policy: str, key: str, owner: str) -> Saved:
        """A saved thing of this user. Raises Rejected."""
        found = self.record(policy, owner).saved.get(key)
        if found is None:
            raise Rejected(f"You have saved nothing at tinker://{policy}/{key[:200]}.", 404)
        return found

    def download_links(self, policy: str, key: str, owner: str) -> tuple[dict[str, str], datetime]:
        """File -> the end of its URL, and when the URLs end. Raises Rejected."""
        saved = self.own_key(policy, key, owner)
        if saved.version is None or not key.startswith("external_weights/"):
            raise Rejected("Only what save_weights_external has written can be downloaded.")
        secret = secrets.token_urlsafe(24)
        self.links[secret] = (saved.version, time.monotonic() + LINK_S)
        files = {name: f"{secret}/{name}" for name in ("adapter_config.json", "adapter_model.safetensors")}
        return files, datetime.fromtimestamp(time.time() + LINK_S, UTC)

    # Inside

    def check_model(self, name: str) -> None:
        """Raise Rejected unless it is the base of this service."""
        if name != self.base.model:
            raise Rejected(
                f"The model {name[:200]!r} is not loaded here. This service has {self.base.model!r}.", 404
            )

    def _new_policy(
        self,
        session: Session,
        session_id: str,
        number: int,
        record: SavedPolicy,
        then: Callable[[str], Awaitable[Answer]] | None,
    ) -> str:
        if number in session.models:
            return session.models[number]
        if len(self.policies) >= self.most_policies:
            raise Rejected(
                f"The service holds {len(self.policies)} models, its limit (--policies). End a session first."
            )
        name = f"{session_id}:train:{number}"
        if name in self.saved.by_id or name in self.policies:
            raise Rejected(f"The model {name} exists.")
        policy = self.policies[name] = Policy(session_id, record)
        session.models[number] = future = self.futures.create(record.owner, session_id)

        async def create() -> Answer:
            try:
                lora = record.lora.model_dump(include={"rank", "alpha", "target_modules"})
                await self.trainer.command("add", policy=name, lora=lora, seed=record.seed)
                done = {"type": "create_model", "model_id": name} if then is None else await then(name)
            except Rejected:
                await self._end_policy(name)
                raise
            policy.worker = asyncio.create_task(self._work(policy))
            return done

        self.futures.start(future, create)
        return future

    async def _work(self, policy: Policy) -> None:
        """Carry out the policy's requests one after the other."""
        while True:
            while policy.next not in policy.waiting:
                policy.arrived.clear()
                await policy.arrived.wait()
            future, work, size = policy.waiting.pop(policy.next)
            try:
                await answer(future, work)
            finally:
                self.waiting_bytes -= size
            policy.next += 1
            policy.names.pop(policy.next - MOST_WAITING, None)

    async def _end_policy(self, name: str) -> None:
        policy = self.policies.pop(name, None)
        if policy is None:
            return
        if policy.worker is not None:
            policy.worker.cancel()
        self.waiting_bytes -= sum(size for _, _, size in policy.waiting.values())
        self._gone += policy.unnamed
        try:
            await self.trainer.command("remove", policy=name)
        except Rejected:
            return  # it was never added

    def _lora(self, rank: int, *, attention: bool, mlp: bool) -> LoraConfig:
        try:
            own = self.base.lora(rank, attention=attention, mlp=mlp)
        except ConfigError as error:
            raise Rejected(str(error)) from None
        return own.model_copy(update={"alpha": ALPHA})

    def _same_base(self, record: SavedPolicy, path: str) -> None:
        if record.fingerprint != self.base.run_config.resolved.model.fingerprint:
            raise Rejected(f"{path} was trained on another base than this service has.")

    async def _publish(self, policy: str, record: SavedPolicy, key: str, ttl: int | None) -> str:
        """Publish the policy under a name. Returns its tinker:// path."""
        if key in record.saved:
            raise Rejected(f"{key} exists. Choose another name.")
        version = await self._publish_version(policy)
        size = size_of(self.base.run.default_adapters / adapter_name(version))
        return self._add(policy, record, key, ttl, version=version, size=size)

    async def _publish_version(self, policy: str) -> int:
        self.version += 1
        version = self.version
        await self.trainer.command("publish", policy=policy, version=version)
        return version

    def _add(
        self,
        policy: str,
        record: SavedPolicy,
        key: str,
        ttl: int | None,
        *,
        size: int,
        version: int | None = None,
    ) -> str:
        now = time.time()
        saved = Saved(time=now, expires=now + ttl if ttl else None, version=version, size_bytes=size)
        return self.saved.add(policy, record, key, saved)

    def _add_sampler(self, session: str, number: int, sampler: Sampler) -> str:
        name = f"{session}:sample:{number}"
        self.sampling[name] = sampler
        if session in self.sessions:
            self.sessions[session].samplers[number] = name
        return name

    def _sampler_of(self, model: str | None, path: str | None, session: str, owner: str) -> Sampler:
        if path is not None:
            _, record, saved = self.saved.find(path, owner, "sampler_weights")
            self._same_base(record, path)
            return Sampler(owner, session, path, saved.version)
        if model is None:
            raise Rejected("Neither base_model nor model_path is there.")
        self.check_model(model)
        return Sampler(owner, session, None, None)

    def _checkpoint(self, policy: str, key: str, saved: Saved) -> dict[str, Any]:
        return {
            "checkpoint_id": key,
            "checkpoint_type": KINDS[key.partition("/")[0]],
            "time": iso(saved.time),
            "tinker_path": f"tinker://{policy}/{key}",
            "size_bytes": saved.size_bytes,
            "expires_at": None if saved.expires is None else iso(saved.expires),
        }


def iso(seconds: float) -> str:
    """A time of the clock as text."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def check_optimizer(optimizer: r.Optimizer) -> None:
    """Raise Rejected for another optimizer than AdamW."""
    if optimizer.type != "adamw":
        raise Rejected(f"The optimizer {optimizer.type[:100]!r} is not offered here. Use adamw.")
