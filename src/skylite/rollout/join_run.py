"""Do this machine's part of a run with trainer.hosts over 1: its ranks join each start of the trainer.

Consumes: config.json, and the starts that machine 0 announces. Waits for: machine 0. Produces: what the ranks
compute; machine 0 alone writes files. Unblocks: the ranks of the other machines, which wait for these.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from skylite.config.loading import read_run_config
from skylite.config.train import RunConfig, TrainerConfig
from skylite.errors import ChildDied, ConfigError, RunFailed, SkyliteError
from skylite.hub.resolve import check_folder
from skylite.processes.child import Supervisor
from skylite.processes.hosts import TrainerStart, check_interface
from skylite.resources.gpu_placement import place_ranks
from skylite.rollout.trainer_process import trainer_process
from skylite.run.files import sha256_file
from skylite.run.host_places import announced, take_place
from skylite.run.own_folders import LOCK_NAME, is_locked, require_own_folders
from skylite.run.run_dir import RunDir
from skylite.run.status import ENDED, Phase, read_status

logger = logging.getLogger(__name__)
WAIT_S: float = TrainerConfig().step_timeout_s
"""Longest wait for the run to start."""
LATE_S = 120.0
"""After this long, what another machine wrote is seen. NFS: twice acdirmax."""
POLL_S = 1.0


async def join_run(run: RunDir, interface: str | None, allow: Callable[[], Mapping[str, str]]) -> Phase:
    """Join each start of the run's trainer. Returns how the run ended.

    If this machine's ranks end early, those of the others do so, too; the run may then start again.
    `allow`: program -> sha256 of its file, as the user allowed it. Raises ConfigError if the interface, the
    model or a program is another here, or if this machine lacks GPUs. Raises RunFailed if the run does not
    start within WAIT_S.
    """
    if interface is not None:
        check_interface(interface)
    if run.config_path.exists():  # refuse before the wait what can be refused
        _check(run, interface, allow)
    joined, allowed = "", None
    while isinstance(start := await _next_start(run, joined), TrainerStart):
        recorded, joined = read_run_config(run.config_path), start.id
        if allowed is None:
            allowed = _check(run, interface, allow)
            _require_same_model(recorded)
        _require_same_programs(recorded, allowed)
        await _train(run, place_ranks(recorded), start, interface)
    return start


def _check(run: RunDir, interface: str | None, allow: Callable[[], Mapping[str, str]]) -> Mapping[str, str]:
    """What `allow` returns. Raises ConfigError if this machine must not join the run."""
    recorded = read_run_config(run.config_path)
    if recorded.config.trainer.hosts == 1:
        raise ConfigError(
            f"{run.root} trains on one machine (trainer.hosts=1).",
            "Start it with --set trainer.hosts=2 --set trainer.interface=NAME.",
        )
    require_own_folders(run, recorded)
    check_interface(interface or recorded.config.trainer.interface or "")
    return allow()


async def _next_start(run: RunDir, joined: str) -> TrainerStart | Phase:
    """The next start after `joined`, or how the run ended that this machine has joined.

    This machine may see the run's files as they were: the run has ended only once its lock is free.
    """
    began = alive = time.monotonic()
    said = ""
    while True:
        start, now = announced(run.rendezvous), time.monotonic()
        if start is not None and start.id == joined:
            start = None
        if not (missing := _why_not(run, start)) and start is not None:
            return start
        if joined:
            phase = _phase(run)
            alive = now if is_locked(run.root / LOCK_NAME) else alive
            if alive < now and (phase in ENDED or now - alive > LATE_S):
                return phase if phase in ENDED else "dead"
        elif now - began > WAIT_S:
            raise RunFailed(
                f"{run.root} did not start within {WAIT_S:g} s: {missing}.",
                "Start it on the first machine with trainer.hosts, in a folder that all machines share, with "
                "its locks.",
            )
        elif missing != said:
            logger.info(f"waiting up to {WAIT_S:g} s for {run.root} to start: {missing}")
            said = missing
        await asyncio.sleep(POLL_S)


def _why_not(run: RunDir, start: TrainerStart | None) -> str:
    """Why this machine cannot join a start yet; empty if it can."""
    if not run.config_path.exists():
        return "it has no config.json here"
    identity = read_run_config(run.config_path).resolved.identity
    if not is_locked(run.root / LOCK_NAME):
        return f"no process holds {LOCK_NAME}; it is not running, or the folder's locks are of one machine"
    if start is None:
        return "its trainer has not started on several machines"
    if sha256_file(run.config_path) != start.config:
        return "its config.json here is that of another start"
    copies = [path for path in (identity.warm_start, identity.teacher) if path is not None]
    return next((f"{path} is not here" for path in copies if not path.is_dir()), "")


def _require_same_model(recorded: RunConfig) -> None:
    model = recorded.resolved.model
    if not model.path.is_dir() or check_folder(model.path, "").fingerprint != model.fingerprint:
        raise ConfigError(
            f"{model.path} on this machine is not the model of the run.",
            "Copy that folder from the first machine, or share it.",
        )


async def _train(run: RunDir, recorded: RunConfig, start: TrainerStart, interface: str | None) -> None:
    """Compute until the ranks of this machine end, or until another start takes this one's place."""
    hosts = recorded.config.trainer.hosts
    if (host := take_place(run.rendezvous, start, hosts)) is None:
        logger.warning(
            f"{hosts} machines (trainer.hosts) have joined {run.root}: this one waits for its next start"
        )
        return
    spec = trainer_process(run, recorded, start, host=host, interface=interface)
    logger.info(f"machine {host + 1} of {hosts} joins {run.root}; its log is {spec.log_path}")
    try:
        async with Supervisor() as supervisor:
            supervisor.start(spec)
            exited = asyncio.ensure_future(supervisor.wait_exit(spec.name))
            while not exited.done() and (announced(run.rendezvous) or start).id == start.id:
                await asyncio.wait([exited], timeout=POLL_S)
            if exited.done():
                exited.result()
            exited.cancel()
    except ChildDied as error:
        logger.warning(f"{error.what} Waiting for the run to end or to start again.")


def _require_same_programs(recorded: RunConfig, allowed: Mapping[str, str]) -> None:
    programs = recorded.resolved.trust.programs
    if changed := next((spec for spec, digest in allowed.items() if programs.get(spec) != digest), None):
        raise ConfigError(
            f"{changed} on this machine is not the program that the run was started with.",
            "Copy its file from the first machine.",
        )


def _phase(run: RunDir) -> Phase:
    try:
        return read_status(run.status_path).phase
    except SkyliteError:
        return "starting"
