"""Two machines on this one: network namespaces with names of their own, joined by a cable. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator

import psutil
import pytest

needs_two_hosts = pytest.mark.skipif(
    os.geteuid() != 0
    or shutil.which("ip") is None
    or subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode != 0,
    reason="only root can make two network namespaces, with `ip` and `unshare`",
)


class TwoHosts:
    """Commands that start a program on host 0 or 1. Each sees `lo` and its end of the cable."""

    def __init__(self) -> None:
        mark = uuid.uuid4().hex[:6]
        self.names = [f"skylite-{mark}-{host}" for host in range(2)]
        self.interfaces = [f"sky{mark}{host}" for host in range(2)]

    def command(self, host: int) -> list[str]:
        """Before the words of a program."""
        set_name = f'hostname {self.names[host]}; exec "$0" "$@"'
        return ["ip", "netns", "exec", self.names[host], "unshare", "--uts", "sh", "-c", set_name]

    def addresses(self, host: int) -> str:
        return run("ip", "-n", self.names[host], "-brief", "address").stdout


@contextlib.contextmanager
def ends_with_block(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """The process, which is gone after the block, with all below it."""
    try:
        yield process
    finally:
        below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for one in (process, *below):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    hosts = TwoHosts()
    first, second = hosts.interfaces
    try:
        for name in hosts.names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", first, "type", "veth", "peer", "name", second)
        for host, (name, interface) in enumerate(zip(hosts.names, hosts.interfaces, strict=True), 1):
            run("ip", "link", "set", interface, "netns", name)
            run("ip", "-n", name, "address", "add", f"10.77.0.{host}/24", "dev", interface)
            run("ip", "-n", name, "link", "set", interface, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield hosts
    finally:
        for name in hosts.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
