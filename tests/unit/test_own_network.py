"""Ranks and engines have a network of their own; where they cannot, several ranks are refused."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skylite import doctor
from skylite.config.train import TrainConfig
from skylite.errors import ConfigError
from skylite.processes import own_network
from skylite.processes.child import Child, ProcessSpec, kill, start
from skylite.processes.own_network import check_network, other_people, why_shared
from skylite.processes.reaper import enter_own_network
from tests.other_user import OTHER, as_other_user, as_root

isolates = pytest.mark.skipif(bool(why_shared()), reason=f"no network namespace here: {why_shared()}")
LISTEN = """
import os, socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
unix = socket.socket(socket.AF_UNIX)
unix.bind(sys.argv[1])
unix.listen()
socket.create_connection(server.getsockname()).close()
print(server.getsockname()[1], flush=True)
time.sleep(600)
"""


@contextmanager
def listening(tmp_path: Path, *, own: bool) -> Iterator[tuple[Child, int]]:
    """A child that listens on a port of the loopback interface, as a rank does."""
    log = tmp_path / "log"
    argv = [sys.executable, "-u", "-c", LISTEN, str(tmp_path / "unix")]
    child = start(ProcessSpec(name="rank", argv=argv, env={}, log_path=log, own_network=own))
    try:
        deadline = time.monotonic() + 20
        while not log.read_text().endswith("\n"):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield child, int(log.read_text())
    finally:
        kill(child)


def connects(port: int) -> bool:
    with socket.socket() as stranger:
        return stranger.connect_ex(("127.0.0.1", port)) != errno.ECONNREFUSED


@isolates
def test_a_stranger_reaches_no_port_of_a_child_with_its_own_network(tmp_path: Path) -> None:
    with listening(tmp_path, own=False) as (_, port):
        assert connects(port), "the fault: every process of the machine can connect"
    (tmp_path / "unix").unlink()
    (tmp_path / "log").unlink()
    with listening(tmp_path, own=True) as (_, port):
        assert not connects(port)
        with socket.socket(socket.AF_UNIX) as client:  # as the parent reaches an engine
            client.connect(str(tmp_path / "unix"))


@as_root
def test_a_user_without_roots_rights_gets_one_too() -> None:
    """In a user namespace, with the number it has, and without new rights after a new program starts."""

    def enter() -> None:
        try:
            enter_own_network()
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOSPC):
                os._exit(77)
            raise
        assert os.getuid() == OTHER
        assert socket.if_nameindex() == [(1, "lo")]
        server, client = socket.socket(), socket.socket()
        server.bind(("127.0.0.1", 0))
        server.listen()
        client.connect(server.getsockname())

    if (code := as_other_user(enter)) == 77:
        pytest.skip("this machine gives users no user namespaces")
    assert code == 0


def config(**sections: object) -> TrainConfig:
    return TrainConfig.model_validate(sections)


@contextmanager
def somebody_else() -> Iterator[None]:
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setgid(OTHER)
        os.setuid(OTHER)
        time.sleep(600)
        os._exit(0)
    try:
        deadline = time.monotonic() + 10
        while os.stat(f"/proc/{pid}").st_uid != OTHER and time.monotonic() < deadline:
            time.sleep(0.01)
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@as_root
def test_several_ranks_are_refused_where_somebody_else_could_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_network, "why_shared", lambda: "no network namespace: Operation not permitted")
    ranks, tensor_parallel = config(trainer={"num_ranks": 2}), config(engine={"tensor_parallel": 2})
    with somebody_else():
        assert OTHER in (other_people() or [])
        for several in (ranks, tensor_parallel):
            with pytest.raises(ConfigError, match=f"user.*{OTHER}.*shared_network=true"):
                check_network(several)
        check_network(config())
        check_network(ranks, ranks=False)
        check_network(config(trainer={"num_ranks": 2}, shared_network=True))
    monkeypatch.setattr(own_network, "other_people", lambda: [])
    check_network(ranks)
    monkeypatch.setattr(own_network, "other_people", lambda: None)
    with pytest.raises(ConfigError, match="other users may have"):
        check_network(ranks)


def test_a_server_with_several_gpus_is_never_isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_network, "why_shared", lambda: "")
    monkeypatch.setattr(own_network, "other_people", lambda: [OTHER])
    several = config(engine={"tensor_parallel": 2})
    check_network(several)
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel=2"):
        check_network(several, ranks=False, isolated=False)


@pytest.mark.parametrize(
    ("reason", "people", "level"), [("", [OTHER], "ok"), ("x", [], "note"), ("x", [OTHER], "note")]
)
def test_doctor_shows_what_is_active(
    reason: str, people: list[int], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "why_shared", lambda: reason)
    monkeypatch.setattr(doctor, "other_people", lambda: people)
    assert doctor.check_network().level == level
