"""Two ranks train in a network of their own, and no rank unpickles what a peer sends."""

from __future__ import annotations

import os
import shutil
import socket
import time
import uuid
from pathlib import Path

import psutil
import pytest

from skylite.processes.child import ProcessSpec, kill, log_tail, poll, start
from skylite.processes.hosts import TrainerStart
from skylite.processes.own_network import why_shared
from skylite.processes.torchrun import trainer_command, trainer_env
from skylite.run.run_dir import RunDir, adapter_name
from tests.integration.torchrun import TIMEOUT_S, weights
from tests.rows import random_samples
from tests.small_run import make_run, settings

FORBID = """
import os, traceback
import torch.distributed.distributed_c10d as c10d

def refuse(*args, **kwargs):
    with open(os.environ["OBJECTS"], "a") as stream:
        traceback.print_stack(file=stream)
    raise AssertionError("a rank sends or unpickles an object")

c10d._tensor_to_object = c10d._object_to_tensor = refuse
"""


def listening_ports(processes: list[psutil.Process]) -> list[tuple[int, int]]:
    """(network namespace, port) of every listening socket in the namespaces of the processes."""
    found = []
    for process in processes:
        try:
            space = os.stat(f"/proc/{process.pid}/ns/net").st_ino
            lines = Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]
        except OSError:
            continue
        found += [(space, int(x.split()[1].partition(":")[2], 16)) for x in lines if x.split()[3] == "0A"]
    return found


def train(run: RunDir, *, resume: bool) -> set[int]:
    """Train on two ranks in a network of their own. Returns their ports, which nobody else reached."""
    child = start(
        ProcessSpec(
            name="trainer",
            argv=trainer_command(run.root, run.rendezvous, 2, TrainerStart(uuid.uuid4().hex, resume=resume)),
            env=trainer_env(1),
            log_path=run.log_path("trainer"),
            own_network=True,
        )
    )
    ports: set[int] = set()
    own = os.stat("/proc/self/ns/net").st_ino
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while poll(child) is None:
            assert time.monotonic() < deadline, log_tail(child.spec.log_path, 20)
            ranks = psutil.Process(child.pid).children(recursive=True)
            found = [(space, port) for space, port in listening_ports(ranks) if space != own]
            for _, port in found:
                if port not in ports:
                    with socket.socket() as stranger:
                        assert stranger.connect_ex(("127.0.0.1", port)) != 0
                ports.add(port)
            time.sleep(0.05)
        assert child.process.returncode == 0, log_tail(child.spec.log_path, 30)
    finally:
        kill(child)
    return ports


@pytest.mark.dist
@pytest.mark.skipif(bool(why_shared()), reason=f"no network namespace here: {why_shared()}")
def test_two_ranks_train_where_no_stranger_can_join(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(num_steps=2, trainer={"num_ranks": 2, "num_threads": 1}, checkpoint={"every": 1})
    run = make_run(tmp_path / "run", tiny_llama, config, {1: random_samples(0), 2: random_samples(1)})
    run.rendezvous.mkdir(mode=0o700)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(FORBID)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("OBJECTS", str(tmp_path / "objects"))
    ports = train(run, resume=False)
    shutil.rmtree(run.checkpoint_path(2))  # step 2 again, from the checkpoint of step 1
    shutil.rmtree(run.default_adapters / adapter_name(2))
    run.trainer_step_path(2).unlink()
    ports |= train(run, resume=True)
    assert ports, "gloo listens, but not where others are"
    assert not (tmp_path / "objects").exists(), (tmp_path / "objects").read_text()
    assert weights(run, 2)
    assert run.checkpoint_path(2).is_dir()
