"""Machines that train together: the numbers of their ranks, and the network that these use."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from skylite.config.train import TrainConfig
from skylite.errors import ConfigError
from skylite.processes.child_env import LOOPBACK_ONLY


@dataclass(frozen=True, slots=True)
class TrainerStart:
    """A start of the trainer."""

    id: str
    """Random; the ranks of all machines find each other by it."""
    resume: bool
    config: str = ""
    """sha256 of its config.json: another machine may still see an earlier one."""


def number_ranks(host: int, hosts: int) -> None:
    """Number this rank among those of all machines, in torchrun's variables."""
    local, each = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    os.environ |= {"RANK": str(host * each + local), "WORLD_SIZE": str(hosts * each)}


def interface_env(interface: str | None) -> Mapping[str, str]:
    """Where gloo and NCCL listen; None: the loopback interface."""
    return LOOPBACK_ONLY if interface is None else dict.fromkeys(LOOPBACK_ONLY, interface)


def check_interface(name: str) -> None:
    """Raise ConfigError if this machine has no such network interface."""
    names = [found for _, found in socket.if_nameindex()]
    if name not in names:
        raise ConfigError(
            f"The network interface {name} (trainer.interface) is not on this machine, which has "
            f"{', '.join(names)}.",
            "Name the one that the other machines reach (`ip address`). On another machine than the first: "
            "`skylite worker --interface NAME`.",
        )


def require_one_host(config: TrainConfig, what: str) -> None:
    """Raise ConfigError for what runs on one machine. `what`: a noun."""
    if config.trainer.hosts > 1:
        raise ConfigError(
            f"trainer.hosts={config.trainer.hosts} trains on several machines, and {what} uses one.",
            "Leave trainer.hosts and trainer.interface out.",
        )
