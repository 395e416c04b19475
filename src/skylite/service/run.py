"""The processes of a service: engines, the trainer's ranks and the HTTP front, until a signal ends them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from skylite.engine.canary import DEFAULT_TOLERANCE, verify_folder
from skylite.engine.connections import HEADER_BYTES, UNIX
from skylite.engine.engine_pool import EnginePool
from skylite.engine.launchers import load_launcher
from skylite.engine.start_engines import engine_spec, engines_kept_alive
from skylite.engine.watchdog import RestartPolicy, Watchdog
from skylite.errors import ConfigError
from skylite.processes.child import ProcessSpec, Supervisor
from skylite.processes.hardware import threads_per_rank
from skylite.processes.http_server import serving
from skylite.processes.private_folders import temporary_folder
from skylite.processes.streams import private_file
from skylite.processes.torchrun import torchrun_command, trainer_env
from skylite.progress_reporting import long_work
from skylite.run.own_folders import lock_folder
from skylite.run.run_dir import RunDir
from skylite.service.app import make_app, owner_of
from skylite.service.front import Front
from skylite.service.plan import Base, write_base
from skylite.service.samplers import Samplers
from skylite.service.saved import SavedPolicies
from skylite.service.trainer_link import TrainerLink, trainer_at
from skylite.untrusted_files import read_text

logger = logging.getLogger(__name__)
TRAINER = "trainer"
KEY_FILE = "api-key"
KEY_START = "tml-"
"""Tinker's client refuses other keys."""
BACKLOG = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What clients may use."""

    policies: int
    """Training clients at once."""
    session_timeout_s: float
    """Silence after which a client counts as gone."""


async def run_service(base: Base, listener: socket.socket, keys: Mapping[str, str], limits: Limits) -> None:
    """Serve on a listening socket until SIGINT, SIGTERM or SIGHUP. Raises SkyliteError if a part fails."""
    with lock_folder(base.run.root), lock_folder(base.run.default_adapters):
        write_base(base)
        saved = SavedPolicies.read(base.run.root / "policies")
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with Supervisor() as supervisor:
            working = asyncio.ensure_future(_work(base, listener, keys, limits, saved, supervisor))
            watching = asyncio.ensure_future(supervisor.watch())
            stopping = asyncio.ensure_future(stop.wait())
            await asyncio.wait({working, watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
            failed = [task for task in (watching, working) if task.done()]
            for task in (working, watching, stopping):
                task.cancel()
            await asyncio.gather(working, watching, stopping, return_exceptions=True)
            for task in failed:
                task.result()


async def _work(
    base: Base,
    listener: socket.socket,
    keys: Mapping[str, str],
    limits: Limits,
    saved: SavedPolicies,
    supervisor: Supervisor,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        sockets = stack.enter_context(temporary_folder())
        linked = await stack.enter_async_context(trainer_at(sockets / "trainer.sock"))
        watchdogs = _start_engines(base, sockets, supervisor)
        supervisor.start(_trainer(base, sockets / "trainer.sock"))
        with long_work("the trainer loads the base"):
            trainer = await linked
        logger.info(f"trainer: {', '.join(choice.partition(';')[0] for choice in trainer.choices)}")
        engines = await stack.enter_async_context(engines_kept_alive(watchdogs, supervisor))
        front = _front(base, trainer, EnginePool(engines, _tolerance(base)), saved, limits)
        tidying = asyncio.ensure_future(front.tidy())
        stack.callback(tidying.cancel)
        options = {"http": "h11", "h11_max_incomplete_event_size": HEADER_BYTES, "backlog": BACKLOG}
        async with serving(make_app(front, keys), [listener], **options):
            logger.info(f"ready: {base.model} for Tinker's clients. Ctrl-C ends it.")
            await tidying


def _front(base: Base, trainer: TrainerLink, pool: EnginePool, saved: SavedPolicies, limits: Limits) -> Front:
    samplers = Samplers(pool, base.run.default_adapters, base.max_tokens, base.vocabulary)
    return Front(base, trainer, samplers, saved, limits.policies, limits.session_timeout_s)


def _tolerance(base: Base) -> float | None:
    config, dtype = base.run_config.config, base.run_config.resolved.placement.dtype
    return config.sync.canary_tolerance or DEFAULT_TOLERANCE[dtype]


def _start_engines(base: Base, sockets: Path, supervisor: Supervisor) -> list[Watchdog]:
    run_config = base.run_config
    restarts = RestartPolicy(
        config=run_config.config.engine,
        verify=partial(verify_folder, tolerance=_tolerance(base)),
        counts={},
    )
    launcher = load_launcher(run_config.config, run_config.resolved.trust.programs)
    specs = [
        engine_spec(run_config, base.modules, index, sockets)
        for index in range(run_config.config.engine.num_engines)
    ]
    return [Watchdog.start(launcher, spec, base.run.logs, supervisor, restarts) for spec in specs]


def _trainer(base: Base, socket_path: Path) -> ProcessSpec:
    trainer, run = base.run_config.config.trainer, base.run
    words = [str(run.root), str(socket_path)]
    return ProcessSpec(
        name=TRAINER,
        argv=torchrun_command(run.rendezvous, trainer.num_ranks, "skylite.trainer.service_worker", words),
        env=trainer_env(
            trainer.num_threads or threads_per_rank(trainer.num_ranks),
            base.run_config.resolved.placement.rank_gpus,
        ),
        log_path=run.log_path(TRAINER),
        own_network=not base.run_config.config.shared_network,
    )


@contextlib.contextmanager
def listening(address: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens on an IP address or at unix:PATH, for this user alone. Raises ConfigError."""
    try:
        if address.startswith(UNIX):
            path = Path(address.removeprefix(UNIX))
            listener = socket.socket(socket.AF_UNIX)
            before = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(before)
        else:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener, path = socket.create_server((address, port), family=family), None
    except OSError as error:
        place = address if address.startswith(UNIX) else f"{address}, port {port}"
        raise ConfigError(
            f"Nothing can listen on {place}: {os.strerror(error.errno or 0)}.",
            "Choose another --host or --port; remove the socket of a service that was killed.",
        ) from None
    try:
        yield listener
    finally:
        listener.close()
        if path is not None:
            path.unlink(missing_ok=True)


def read_keys(run: RunDir, chosen: str | None) -> tuple[dict[str, str], str]:
    """Digest of each key -> the key's place in the list, and a note for the user.

    `chosen`: keys with commas between them. None: the key in the service's folder, which the first start
    makes. Raises ConfigError for a key that Tinker's client would refuse.
    """
    if chosen:
        keys = [key.strip() for key in chosen.split(",") if key.strip()]
        note = f"{len(keys)} API key(s), as SKYLITE_API_KEY says"
    else:
        path = run.root / KEY_FILE
        if not path.exists():
            with private_file(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(f"{KEY_START}{secrets.token_urlsafe(24)}".encode())
        keys, note = [read_text(path).strip()], f"the API key is in {path}"
    for number, key in enumerate(keys, start=1):
        if not key.startswith(KEY_START) or len(key) < 16 or not key.isascii():
            raise ConfigError(
                f"API key {number} of {len(keys)} is not one that Tinker's client sends.",
                f"Give keys of at least 16 characters that begin with {KEY_START}, in SKYLITE_API_KEY.",
            )
    return {owner_of(key): str(number) for number, key in enumerate(keys, start=1)}, note
