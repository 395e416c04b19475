"""Machines that train together, over a folder that all of them see: how each joins a start of the trainer.

Machine 0 starts the run. Each start has a random id, which it announces in the folder; every other machine
takes one of the places by creating a file. The ranks of all machines then find each other by torch's file
store in the same folder. So no port answers a stranger except those of the ranks, on one network interface.
torchrun stays a program of one machine: its own way over several opens a TCP store on all interfaces, and
unpickles what anybody sends there.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path

from skylite.errors import RunFailed, convert_os_errors
from skylite.processes.hosts import TrainerStart
from skylite.run.files import write_json
from skylite.untrusted_files import read_text
from skylite.untrusted_text import parse_json

POLL_S = 0.2
_START = "start.json"


def announce(rendezvous: Path, start: TrainerStart) -> None:
    """Let the other machines know of a start. `rendezvous`: the run's folder for it. Raises WriteFailed."""
    write_json(rendezvous / _START, asdict(start))


def announced(rendezvous: Path) -> TrainerStart | None:
    """The start that machine 0 has announced; None before."""
    try:
        found = parse_json(read_text(rendezvous / _START))
        if not str(found["id"]).isalnum():  # it names files
            return None
        return TrainerStart(str(found["id"]), bool(found["resume"]), str(found["config"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def take_place(rendezvous: Path, start: TrainerStart, hosts: int) -> int | None:
    """The number of this machine, from 1; None if all places are taken. Raises WriteFailed."""
    for number in range(1, hosts):
        with convert_os_errors(rendezvous):
            try:
                descriptor = os.open(_place(rendezvous, start.id, number), os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                continue
        os.close(descriptor)
        return number
    return None


def wait_for_hosts(rendezvous: Path, start_id: str, hosts: int, timeout_s: float) -> None:
    """Wait until every place is taken. Raises RunFailed after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while missing := [n for n in range(1, hosts) if not _place(rendezvous, start_id, n).exists()]:
        if time.monotonic() > deadline:
            raise RunFailed(
                f"{hosts - len(missing)} of {hosts} machines (trainer.hosts) joined within {timeout_s:g} s.",
                f"Run `skylite worker --join {rendezvous.parent}` on each of the others, which must see this "
                "folder and its locks.",
            )
        time.sleep(POLL_S)


def _place(rendezvous: Path, start_id: str, number: int) -> Path:
    return rendezvous / f"{start_id}-host-{number}"
