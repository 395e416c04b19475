"""Whether ranks and engines get a network of their own, and what happens where they cannot.

Ranks trust every process that connects to them: gloo takes it for a rank. On the loopback interface every
user of the machine can connect. In a network namespace only the processes of one child can (reaper.py).
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import psutil

from skylite.config.train import TrainConfig
from skylite.errors import ConfigError
from skylite.processes.hosts import check_interface

REAPER = Path(__file__).with_name("reaper.py")
FIRST_PERSON = 1000
"""Lower numbers belong to the machine's own services, which root installed."""
REMEDY = (
    "Let root allow user namespaces (sysctl kernel.unprivileged_userns_clone=1 or "
    "kernel.apparmor_restrict_unprivileged_userns=0). "
)


@functools.cache
def why_shared() -> str:
    """Why this machine gives a child no network of its own; empty if it does."""
    command = [sys.executable, "-I", "-S", str(REAPER), "own-network"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else tried.stderr.strip().rpartition("\n")[2] or "it cannot be tried"


def other_people() -> list[int] | None:
    """Ids of the other users who have processes here. None if this user cannot see them (hidepid)."""
    found = {p.info["uids"].effective for p in psutil.process_iter(["uids"]) if p.info["uids"]}
    if os.geteuid() != 0 and not os.path.exists("/proc/1"):
        return None
    return sorted(uid for uid in found if uid >= FIRST_PERSON and uid != os.geteuid())


def check_network(config: TrainConfig, *, ranks: bool = True, isolated: bool = True) -> None:
    """Raise ConfigError if processes that trust each other would share the loopback with other people.

    `ranks`: whether trainer ranks start, too. `isolated`: whether the child may have a network of its own.
    """
    trainer = config.trainer
    if ranks and trainer.interface is not None:
        check_interface(trainer.interface)
    counts = {
        "trainer.num_ranks": trainer.num_ranks if ranks and trainer.hosts == 1 else 1,
        "engine.tensor_parallel": config.engine.tensor_parallel,
    }
    several = " and ".join(f"{name}={value}" for name, value in counts.items() if value > 1)
    if not several or config.shared_network:
        return
    reason = why_shared() if isolated else "a server for clients needs the machine's own"
    if not reason or (people := other_people()) == []:
        return
    who = f"the users with ids {', '.join(map(str, people[:5]))} have" if people else "other users may have"
    raise ConfigError(
        f"{several} starts processes that trust whatever connects to them over the loopback interface; "
        f"{who} processes on this machine, and skylite has no network of its own here ({reason}).",
        f"{REMEDY if isolated else ''}To trust those users: --set shared_network=true. Or use one process.",
    )
