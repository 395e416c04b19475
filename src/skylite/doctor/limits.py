"""Limits on what a user's processes may use: open files, processes and threads, address space."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from skylite.config.train import TrainConfig
from skylite.doctor.finding import Finding, bad, ok
from skylite.engine.vllm.connections import open_files
from skylite.processes.hardware import cpu_cores

THREADS, THREADS_PER_CORE = 128, 16
"""A run on two cores starts 91 threads (benchmarks/NOTES.md). Pools of one thread per core grow with them."""
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
SYSTEMD_UNITS = (".slice", ".scope", ".service")


@dataclass(frozen=True, slots=True)
class ThreadLimit:
    """A limit on processes. Each thread counts as one."""

    name: str
    limit: int
    used: int
    fix: str


def check_open_files() -> Finding:
    """The hard limit on open files is enough; skylite raises the soft limit itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = open_files(TrainConfig())
    if hard != resource.RLIM_INFINITY and hard < needed:
        fix = "containers: `docker run --ulimit nofile=65536`; else limits.conf: `* hard nofile 65536`"
        return bad("open files", f"ulimit -n is {hard} at most, and a run needs {needed}", fix)
    return ok("open files", f"ulimit -n {soft}, at most {'unlimited' if hard < 0 else hard}")


def check_processes(groups: Path = CGROUPS, own: Path = OWN_CGROUP) -> Finding:
    """Enough processes and threads are allowed."""
    needed = THREADS + THREADS_PER_CORE * cpu_cores()
    limits = [*_user_limit(), *_cgroup_limits(groups, own)]
    for x in limits:
        if x.limit - x.used < needed:
            text = f"{x.name} is {x.limit}, of which {x.used} are used; a run needs {needed}"
            return bad("processes", text, x.fix)
    least = min(limits, key=lambda x: x.limit, default=None)
    return ok("processes", f"{least.name} {least.limit}" if least is not None else "unlimited")


def _user_limit() -> Iterator[ThreadLimit]:
    """`ulimit -u`, which the kernel does not apply to root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.geteuid() == 0 or soft == resource.RLIM_INFINITY:
        return
    fix = "limits.conf: `* hard nproc 65536` and `* soft nproc 65536`, then log in again"
    if hard == resource.RLIM_INFINITY or hard >= 65536:
        fix = "ulimit -u 65536"
    yield ThreadLimit("ulimit -u", soft, _threads_of_user(), fix)


def _threads_of_user() -> int:
    import psutil

    processes = psutil.process_iter(["uids", "num_threads"])
    infos = [p.info for p in processes if p.info["uids"] and p.info["num_threads"]]
    return sum(info["num_threads"] for info in infos if info["uids"].real == os.getuid())


def _cgroup_limits(groups: Path, own: Path) -> Iterator[ThreadLimit]:
    """pids.max of this process's cgroup and of those above it."""
    for line in own.read_text(encoding="utf-8").splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "pids"):  # "": cgroup v2
            continue
        root = groups / controllers
        folder = root / path.lstrip("/")
        for place in [folder, *folder.parents]:
            if place.is_relative_to(root) and (place / "pids.max").exists():
                text = (place / "pids.max").read_text(encoding="ascii").strip()
                used = int((place / "pids.current").read_text(encoding="ascii"))
                if text != "max":
                    yield ThreadLimit(str(place / "pids.max"), int(text), used, _cgroup_mend(place.name))


def _cgroup_mend(unit: str) -> str:
    if unit.endswith(SYSTEMD_UNITS):
        return f"sudo systemctl set-property {unit} TasksMax=infinity"
    return "containers: `docker run --pids-limit=-1`"


def check_address_space() -> Finding:
    """Nothing limits the address space: torch and engines reserve more than they use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return ok("address space", "unlimited")
    is_raised = hard == resource.RLIM_INFINITY
    fix = "ulimit -v unlimited" if is_raised else "limits.conf: `* hard as unlimited`, then log in again"
    text = f"ulimit -v is {soft >> 10} KiB; torch and engines reserve more than they use"
    return bad("address space", text, fix)
