"""`skylite worker`: which start it joins, what it waits for, when it ends. It may see old files."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from skylite.config.train import RunConfig
from skylite.errors import ConfigError, RunFailed
from skylite.processes.child import ProcessSpec
from skylite.processes.hosts import TrainerStart
from skylite.rollout import join_run
from skylite.run.files import sha256_file
from skylite.run.host_places import announce, take_place
from skylite.run.own_folders import LOCK_NAME, is_locked, lock_folder
from skylite.run.run_dir import RunDir
from skylite.run.status import Phase, Status, write_status
from tests.decisions import resolved
from tests.small_run import settings


class Clock:
    """The seconds of `_next_start`, and what happens at them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: dict[float, Callable[[], None]] = {}

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 10_000, "it waits forever"
        if event := self.events.pop(self.now, None):
            event()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(join_run, "WAIT_S", 5.0)
    monkeypatch.setattr(join_run, "asyncio", SimpleNamespace(sleep=clock.sleep))
    monkeypatch.setattr(join_run, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.root.mkdir(mode=0o700)
    run.rendezvous.mkdir()
    return run


def write_config(run: RunDir, hosts: int = 2, **identity: object) -> str:
    """config.json of two machines. Returns its sha256."""
    trainer = {"hosts": hosts, "interface": "lo"} if hosts > 1 else {}
    recorded = RunConfig(
        skylite_version="test",
        config=settings(trainer=trainer),
        resolved=resolved(run.root, run.root, identity=identity),
    )
    run.config_path.write_text(recorded.model_dump_json())
    return sha256_file(run.config_path)


def write_phase(run: RunDir, phase: Phase) -> None:
    write_status(run.status_path, Status(phase=phase, step=1, num_steps=2, adapter_version=None))


def next_start(run: RunDir, joined: str = "") -> TrainerStart | Phase:
    return asyncio.run(join_run._next_start(run, joined))


def test_a_worker_waits_for_the_run_and_says_each_reason_once(
    run: RunDir, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(RunFailed, match=r"run did not start within 5 s: it has no config.json here\."):
        next_start(run)
    assert [r.message for r in caplog.records] == [
        f"waiting up to 5 s for {run.root} to start: it has no config.json here"
    ]
    start = TrainerStart("abc", False, write_config(run))
    clock.now, clock.events = 0.0, {3.0: lambda: announce(run.rendezvous, start)}
    with lock_folder(run.root):
        assert next_start(run) == start
    assert clock.now == 3
    assert [r.message.partition("start: ")[2] for r in caplog.records[1:]] == [
        "its trainer has not started on several machines"
    ]


def test_a_start_counts_only_while_its_run_lives(run: RunDir, clock: Clock) -> None:
    """Also where flock does not reach the other machine, such as NFS with nolock: two would write at once."""
    start = TrainerStart("abc", False, write_config(run))
    announce(run.rendezvous, start)
    with pytest.raises(RunFailed, match=r"no process holds .skylite.lock; .* locks are of one machine"):
        next_start(run)
    clock.now = 0.0
    with lock_folder(run.root):
        assert next_start(run) == start


def test_a_start_counts_only_with_its_own_settings(run: RunDir, clock: Clock) -> None:
    """A resume with another learning rate, whose config.json this machine does not see yet."""
    old = write_config(run)
    announce(run.rendezvous, TrainerStart("abc", True, "0" * 64))
    with lock_folder(run.root), pytest.raises(RunFailed, match="that of another start"):
        next_start(run)
    announce(run.rendezvous, TrainerStart("abc", True, old))
    clock.now = 0.0
    with lock_folder(run.root):
        assert next_start(run) == TrainerStart("abc", True, old)


def test_a_start_counts_only_with_the_adapters_that_it_copied(run: RunDir, clock: Clock) -> None:
    digest = write_config(run, warm_start=str(run.warm_start))
    announce(run.rendezvous, TrainerStart("abc", False, digest))
    with lock_folder(run.root):
        with pytest.raises(RunFailed, match="is not here"):
            next_start(run)
        run.warm_start.mkdir()
        clock.now = 0.0
        assert isinstance(next_start(run), TrainerStart)


def test_a_run_of_one_machine_is_refused_before_the_wait(run: RunDir) -> None:
    write_config(run, hosts=1)
    with pytest.raises(ConfigError, match=r"trains on one machine \(trainer.hosts=1\)"):
        asyncio.run(join_run.join_run(run, None, dict))


def test_an_old_status_does_not_end_a_live_run(run: RunDir, clock: Clock) -> None:
    digest = write_config(run)
    announce(run.rendezvous, TrainerStart("abc", False, digest))
    write_phase(run, "failed")  # of an earlier attempt
    again = TrainerStart("def", True, digest)
    clock.events[5.0] = lambda: announce(run.rendezvous, again)
    with lock_folder(run.root):
        assert next_start(run, joined="abc") == again
    assert next_start(run, joined="def") == "failed"


def test_a_run_whose_end_is_seen_late_is_not_dead(run: RunDir, clock: Clock) -> None:
    write_config(run)
    write_phase(run, "syncing")  # and its lock is free
    clock.events[60.0] = lambda: write_phase(run, "done")
    assert next_start(run, joined="abc") == "done"
    write_phase(run, "syncing")
    clock.now = 0.0
    assert next_start(run, joined="abc") == "dead"
    assert clock.now == 121


def test_a_worker_leaves_a_start_that_another_one_replaced(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have read an old start.json: the ranks of that start are gone and would wait for ten minutes."""
    write_config(run)
    recorded = RunConfig.model_validate_json(run.config_path.read_text())
    old, new = TrainerStart("abc", False), TrainerStart("def", True)
    spec = ProcessSpec(name="ranks", argv=["sleep", "60"], env={}, log_path=run.log_path("ranks"))
    monkeypatch.setattr(join_run, "trainer_process", lambda *_, **__: spec)
    announce(run.rendezvous, new)
    began = time.monotonic()
    asyncio.run(join_run._train(run, recorded, old, "lo"))
    assert time.monotonic() - began < 40
    assert take_place(run.rendezvous, old, 2) is None
    asyncio.run(join_run._train(run, recorded, old, "lo"))
    assert "2 machines (trainer.hosts) have joined" in caplog.text


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_filesystem_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """NFS version 3 without a lock daemon; Lustre without `flock`."""

    def fail(file: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    (tmp_path / LOCK_NAME).touch()
    monkeypatch.setattr(fcntl, "flock", fail)
    refusal = f"{LOCK_NAME} cannot be locked: {os.strerror(number)}"
    with pytest.raises(ConfigError, match=refusal), lock_folder(tmp_path):
        pass
    with pytest.raises(ConfigError, match=refusal):
        is_locked(tmp_path / LOCK_NAME)


def test_looking_at_a_lock_works_on_nfs_and_hinders_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS makes an exclusive flock a lock on bytes, which needs a file that is open to write."""
    flock = fcntl.flock

    def nfs(file: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", nfs)
    lock = tmp_path / LOCK_NAME
    with lock_folder(tmp_path):
        assert is_locked(lock)
    lock.touch()
    assert not is_locked(lock)
    with lock.open() as looking:
        flock(looking, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda _: looking.close())
        with lock_folder(tmp_path):
            assert is_locked(lock)
