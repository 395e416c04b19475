"""Do this machine's part of a run with trainer.hosts over 1: its ranks join each start of the trainer.

Consumes: config.json, and the starts that machine 0 announces. Waits for: machine 0. Produces: what the ranks
compute; machine 0 alone writes files. Unblocks: the ranks of the other machines, which wait for these.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from skylite.config.loading import read_run_config
from skylite.config.train import RunConfig
from skylite.errors import ChildDied, ConfigError, SkyliteError
from skylite.hub.resolve import check_folder
from skylite.processes.child import Supervisor
from skylite.processes.hosts import TrainerStart, check_interface
from skylite.resources.gpu_placement import place_ranks
from skylite.rollout.trainer_process import trainer_process
from skylite.run.host_places import POLL_S, announced, take_place
from skylite.run.own_folders import require_own_folders
from skylite.run.run_dir import RunDir
from skylite.run.status import ENDED, Phase, read_status

logger = logging.getLogger(__name__)


def check_join(run: RunDir, interface: str | None) -> RunConfig:
    """The run's settings. Raises ConfigError if this machine does not see the run or the interface."""
    if not run.config_path.exists():
        raise ConfigError(
            f"{run.root} is no run on this machine: it has no config.json.",
            "Give the folder of a run that is started with trainer.hosts, and share it between the machines.",
        )
    recorded = read_run_config(run.config_path)
    trainer = recorded.config.trainer
    if trainer.hosts == 1:
        raise ConfigError(
            f"{run.root} trains on one machine (trainer.hosts=1).",
            "Start it with --set trainer.hosts=2 --set trainer.interface=NAME.",
        )
    require_own_folders(run, recorded)
    check_interface(interface or trainer.interface or "")
    return recorded


async def join_run(
    run: RunDir, recorded: RunConfig, allowed: Mapping[str, str], interface: str | None
) -> Phase:
    """Join each start of the run's trainer. Returns how the run ended.

    If this machine's ranks end early, those of the others do so, too; the run may then start again.
    `allowed`: program -> sha256 of its file, as the user allowed it. Raises ConfigError if the model or a
    program is another here, if this machine lacks GPUs, or if all machines have joined.
    """
    model, joined = recorded.resolved.model, ""
    if not model.path.is_dir() or check_folder(model.path, "").fingerprint != model.fingerprint:
        raise ConfigError(
            f"{model.path} on this machine is not the model of the run.",
            "Copy that folder from the first machine, or share it.",
        )
    recorded = place_ranks(recorded)
    logger.info(f"waiting for {run.root} to start its trainer")
    while True:
        start = announced(run.rendezvous)
        if start is not None and start.id != joined:
            joined = start.id
            _require_same_programs(read_run_config(run.config_path), allowed)
            await _train(run, recorded, start, interface)
        elif joined and (phase := _phase(run)) in ENDED:
            return phase
        await asyncio.sleep(POLL_S)


async def _train(run: RunDir, recorded: RunConfig, start: TrainerStart, interface: str | None) -> None:
    hosts = recorded.config.trainer.hosts
    if (host := take_place(run.rendezvous, start, hosts)) is None:
        raise ConfigError(
            f"All {hosts} machines of {run.root} (trainer.hosts) have joined already.",
            "Run it on as many other machines as trainer.hosts says, less one.",
        )
    spec = trainer_process(run, recorded, start, host=host, interface=interface)
    logger.info(f"machine {host + 1} of {hosts} joins {run.root}; its log is {spec.log_path}")
    try:
        async with Supervisor() as supervisor:
            supervisor.start(spec)
            await supervisor.wait_exit(spec.name)
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
