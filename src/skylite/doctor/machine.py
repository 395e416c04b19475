"""Memory, disks, clock, ports and the hub."""

from __future__ import annotations

import os
import shlex
import socket
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from skylite.doctor.finding import Finding, bad, note, ok
from skylite.errors import error_line
from skylite.hub.shared_memory_copy import SHARED_MEMORY
from skylite.processes.hardware import available_memory, cpu_cores, total_memory
from skylite.processes.own_network import REMEDY, other_people, why_shared
from skylite.run.files import format_bytes, free_bytes

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
