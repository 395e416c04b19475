"""The checks of `skylite doctor`, one function each: what is wrong with this machine, and what fixes it."""

from __future__ import annotations

import os
import platform
import resource
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from skylite import DISTRIBUTION
from skylite.config.train import TrainConfig
from skylite.engine.connections import open_files
from skylite.engine.launchers import load_launcher
from skylite.errors import SkyliteError, error_line
from skylite.optional_packages import requirements
from skylite.processes.gpus import VISIBLE, check_cuda, describe, visible_gpus, why_no_gpu
from skylite.processes.hardware import (
    SHARED_MEMORY,
    available_memory,
    c_compiler,
    cpu_cores,
    missing_for_triton,
    total_memory,
)
from skylite.processes.own_network import REMEDY, other_people, why_shared
from skylite.run.files import format_bytes, free_bytes
from skylite.sandbox.confine import landlock_version
from skylite.sandbox.sandbox import require_sandbox

Level = Literal["ok", "note", "bad"]
GIB = 1 << 30
LEAST_MEMORY, GOOD_MEMORY = 2 * GIB, 6 * GIB
"""Free memory that the smallest run needs, and that the default run on a CPU needs."""
LEAST_DISK, GOOD_DISK = 2 * GIB, 10 * GIB
LEAST_SHM = GIB // 4
"""Containers have 64 MiB unless told otherwise; torch and engines hand data over there."""
HUB_TIMEOUT_S = 3.0
THREADS, THREADS_PER_CORE = 128, 16
"""A run on two cores starts 91 threads (benchmarks/NOTES.md). Pools of one thread per core grow with them."""
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `skylite doctor`."""

    check: str
    """What was checked, such as "disk"."""
    level: Level
    """bad: a run fails, or may fail. note: worth knowing."""
    text: str
    fix: str = ""
    """The command that fixes it, or the step to take where no command can. Empty only for ok."""


Check = Callable[[], Finding | Iterable[Finding]]


def machine_checks() -> list[tuple[str, Check]]:
    """Name and function of every check, the quick ones first."""
    return [
        ("packages", check_packages),
        ("engine", check_engine),
        ("gpu", check_gpus),
        ("triton", check_triton),
        ("memory", check_memory),
        ("shared memory", check_shared_memory),
        ("disk", check_disks),
        ("limits", check_limits),
        ("sandbox", check_sandbox),
        ("isolation", check_network),
        ("hub", check_hub),
    ]


def results(name: str, check: Check) -> list[Finding]:
    """What a check says. A check that fails is a finding, too."""
    try:
        findings = check()
    except SkyliteError as error:
        return [bad(name, error.what, error.hint)]
    except (OSError, ValueError) as error:
        return [bad(name, f"it could not be checked: {error_line(error)}", "correct what the message names")]
    return [findings] if isinstance(findings, Finding) else list(findings)


def ok(check: str, text: str) -> Finding:
    return Finding(check, "ok", text)


def note(check: str, text: str, fix: str) -> Finding:
    return Finding(check, "note", text, fix)


def bad(check: str, text: str, fix: str) -> Finding:
    return Finding(check, "bad", text, fix)


def check_packages() -> list[Finding]:
    """Packages are as tested: what skylite needs, what is installed of the engine's, and torch for those."""
    needed = list(requirements(DISTRIBUTION))
    extra = requirements(DISTRIBUTION, "gpu" if _has_gpus() else "cpu")
    of_engine = [r for r in extra if r not in needed and _version(r.name)]
    users = [name for name in ("torchvision", *(r.name for r in of_engine)) if _version(name)]
    torch = [(name, r) for name in users for r in requirements(name) if r.name == "torch"]
    checks = [*(("skylite", r) for r in (*needed, *of_engine)), *torch]
    findings = [f for package, r in checks if (f := _check_requirement(package, r)) is not None]
    return findings or [ok("packages", f"all in the tested ranges; Python {platform.python_version()}")]


def _check_requirement(package: str, requirement: Requirement) -> Finding | None:
    """None if the installed version fits."""
    version = _version(requirement.name)
    install = f"pip install '{requirement.name}{requirement.specifier}'"
    if version is None:
        return bad("packages", f"{requirement.name} is not installed; {package} needs it", install)
    if not requirement.specifier.contains(version, prereleases=True):
        text = f"{requirement.name} {version}; {package} needs {requirement.specifier}"
        return bad("packages", text, install)
    return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_engine() -> Finding:
    """An engine is installed that runs on this device."""
    launcher, device = load_launcher(TrainConfig(), {}), "cuda" if _has_gpus() else "cpu"
    launcher.check_machine(device)
    return ok("engine", f"{launcher.name} for {device}")


def check_gpus() -> Finding:
    """The GPUs can be used by torch: driver, CUDA version, compute capability."""
    gpus = visible_gpus()
    if gpus:
        torch = check_cuda(gpus)
        text = f"{describe(gpus)}; driver {gpus[0].driver}, torch {torch.version} (CUDA {torch.cuda})"
        return ok("gpu", text)
    reason = why_no_gpu()
    if reason is None:
        return ok("gpu", "no GPU: runs use the CPU")
    if VISIBLE in os.environ:
        return note("gpu", reason.text, f"unset {VISIBLE}")
    return note("gpu", reason.text, "containers: `docker run --gpus all`; else `sudo modprobe nvidia`")


def check_triton() -> list[Finding]:
    """Triton can compile its launchers. Nothing on a machine without GPUs."""
    if not _has_gpus():
        return []
    missing = missing_for_triton()
    return [bad("triton", *missing) if missing else ok("triton", f"C compiler {c_compiler()}, Python.h")]


def _has_gpus() -> bool:
    try:
        return bool(visible_gpus())
    except SkyliteError:
        return True


def check_memory() -> Finding:
    """Enough memory is free for a run."""
    free, total = available_memory(), total_memory()
    text = f"{format_bytes(free)} of {format_bytes(total)} free, {cpu_cores()} cores"
    fix = "end other programs: `ps aux --sort=-rss | head`"
    if free < LEAST_MEMORY:
        return bad("memory", text, fix)
    if free < GOOD_MEMORY:
        return note("memory", f"{text}: little for a run on the CPU", fix)
    return ok("memory", text)


def check_shared_memory(folder: Path = SHARED_MEMORY) -> Finding:
    """Shared memory is large enough."""
    free = free_bytes(folder)
    text = f"{format_bytes(free)} free in {folder}"
    if free < LEAST_SHM:
        fix = f"containers: `docker run --shm-size=8g`; else `sudo mount -o remount,size=8G {folder}`"
        return bad("shared memory", text, fix)
    return ok("shared memory", text)


def check_disks(*folders: Path) -> list[Finding]:
    """Each disk has room: by default of runs, of the hub's cache and of temporary files."""
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache")
    findings, seen = [], set[int]()
    for folder in folders or (Path.cwd(), cache, Path(tempfile.gettempdir())):
        existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
        if (device := existing.stat().st_dev) in seen:
            continue
        seen.add(device)
        free = free_bytes(existing)
        text = f"{format_bytes(free)} free at {folder}"
        fix = f"delete what is not needed: `du -xsh {shlex.quote(str(existing))}/* | sort -h | tail`"
        if free < LEAST_DISK:
            findings.append(bad("disk", text, fix))
        elif free < GOOD_DISK:
            findings.append(note("disk", f"{text}: little", fix))
        else:
            findings.append(ok("disk", text))
    return findings


def check_limits() -> list[Finding]:
    """The limits on open files, address space, processes and threads are enough."""
    findings = []
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)  # skylite raises the soft limit itself
    needed = open_files(TrainConfig())
    if files != resource.RLIM_INFINITY and files < needed:
        fix = "containers: `docker run --ulimit nofile=65536`; else limits.conf: `* hard nofile 65536`"
        findings.append(bad("limits", f"ulimit -n is {files} at most, and a run needs {needed}", fix))
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        text = f"ulimit -v is {space >> 10} KiB; torch and engines reserve more than they use"
        fix = "`ulimit -v unlimited`, or limits.conf: `* hard as unlimited`, then log in again"
        findings.append(bad("limits", text, fix))
    threads = THREADS + THREADS_PER_CORE * cpu_cores()
    for name, limit, used, fix in (*_user_limit(), *_cgroup_limits(CGROUPS, OWN_CGROUP)):
        if limit - used < threads:
            text = f"{name} is {limit}, of which {used} are used; a run needs {threads}"
            findings.append(bad("limits", text, fix))
    return findings or [ok("limits", "open files, address space and threads")]


def _user_limit() -> Iterator[tuple[str, int, int, str]]:
    """`ulimit -u` with the threads of the user, and a fix. The kernel does not apply it to root."""
    import psutil

    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.geteuid() != 0 and soft != resource.RLIM_INFINITY:
        infos = [p.info for p in psutil.process_iter(["uids", "num_threads"])]
        used = sum(i["num_threads"] or 0 for i in infos if i["uids"] and i["uids"].real == os.getuid())
        fix = "`ulimit -u 65536`, or limits.conf: `* hard nproc 65536`, then log in again"
        yield "ulimit -u", soft, used, fix


def _cgroup_limits(groups: Path, own: Path) -> Iterator[tuple[str, int, int, str]]:
    """The same of this process's cgroup (version 2) and of those above it: pids.max."""
    lines = own.read_text(encoding="utf-8").splitlines() if own.exists() else []
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    for place in (groups / path, *(groups / path).parents):
        limit = place / "pids.max"
        text = limit.read_text(encoding="ascii").strip() if limit.exists() else "max"
        if place.is_relative_to(groups) and text != "max":
            used = int((place / "pids.current").read_text(encoding="ascii"))
            systemd = f"`sudo systemctl set-property {place.name} TasksMax=infinity`"
            yield str(limit), int(text), used, f"containers: `docker run --pids-limit=-1`; else {systemd}"


def check_sandbox() -> Finding:
    """The sandbox starts, and which of its parts this kernel and container offer."""
    try:
        require_sandbox("code of a model")
    except SkyliteError as error:
        return note("sandbox", error.what, error.hint)
    if not landlock_version():
        text = "works, but code in it can read what you can read (no Landlock)"
        return note("sandbox", text, "use Linux 5.13 or newer; in a container, allow Landlock")
    return ok("sandbox", "listed system calls only, and Landlock")


def check_network() -> Finding:
    """Ranks and engines get a network that no other user can reach."""
    reason = why_shared()
    if not reason:
        return ok("isolation", "ranks and engines run in a network of their own")
    text = f"ranks and engines share the loopback interface with every user: {reason}"
    if other_people() == []:
        return note("isolation", f"{text}; no other user has processes here now", REMEDY.strip())
    return note("isolation", f"{text}; several ranks are refused without shared_network=true", REMEDY.strip())


def check_hub() -> Finding:
    """The hub can be reached, unless the user works offline."""
    import httpx

    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "ON", "YES"):
        return note("hub", "HF_HUB_OFFLINE is set: only cached and local models work", "unset HF_HUB_OFFLINE")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        httpx.head(endpoint, timeout=HUB_TIMEOUT_S, follow_redirects=False)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        fix = "use local folders or --model smollm2-135m, or set HF_ENDPOINT or HTTPS_PROXY"
        return note("hub", f"{endpoint} cannot be reached: {error_line(error)}", fix)
    return ok("hub", f"{endpoint} answers")
