"""A run on two machines, which are network namespaces: its ranks share a folder, its engine needs none."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from skylite.engine.connections import KEY_VARIABLE
from tests.e2e.project import COMMAND, Project
from tests.e2e.running import DEADLINE_S, wait_for_step
from tests.fakes.vllm_server import vllm_servers
from tests.tiny_models import tiny_tokenizer
from tests.torture.ground import SETTINGS
from tests.two_hosts import TwoHosts, ends_with_block, needs_two_hosts, two_hosts

pytestmark = [pytest.mark.e2e, pytest.mark.dist, needs_two_hosts]
STEPS = 4


def train_args(project: Project, run: str, *extra: str) -> list[str]:
    chosen = (*SETTINGS, "eval.limit=0", "checkpoint.every=1", *extra)
    return project.train_args(run, STEPS, *(word for setting in chosen for word in ("--set", setting)))


@contextlib.contextmanager
def started(words: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A program. Afterwards it and its descendants are gone."""
    process = subprocess.Popen(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ
    )
    with ends_with_block(process):
        yield process


@contextlib.contextmanager
def on(host: int, hosts: TwoHosts, project: Project, *words: str) -> Iterator[subprocess.Popen[str]]:
    """skylite on a host."""
    with started([*hosts.command(host), *COMMAND, *words], project.root) as process:
        yield process


@contextlib.contextmanager
def without_the_folder(hosts: TwoHosts, project: Project, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A program on host 1, for which the project's folder is empty."""
    hide = 'mount -t tmpfs none "$0" && exec "$@"'
    command = [*hosts.command(1), "unshare", "--mount", "sh", "-c", hide, str(project.root), *words]
    with started(command, Path(__file__).parents[2]) as process:
        yield process


def ended(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    return output


def wait_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert any("ready" in line for line in process.stdout), "it ended"


def adapter(project: Project, run: str) -> dict[str, np.ndarray]:
    return load_file(project.root / run / f"adapters/policy-v{STEPS:06d}/adapter_model.safetensors")


def test_two_machines_train_what_one_does_also_after_one_was_cut_off(
    project: Project, fake_engine: None
) -> None:
    alone = project.run(*train_args(project, "one-machine", "trainer.num_ranks=2"), timeout_s=DEADLINE_S)
    assert alone.returncode == 0, alone.stderr
    with two_hosts() as hosts:
        several = ["trainer.hosts=2", f"trainer.interface={hosts.interfaces[0]}", "trainer.max_restarts=2"]
        join = ["worker", "--join", "apart", "--interface", hosts.interfaces[1]]
        with on(0, hosts, project, *train_args(project, "apart", *several)) as first:
            with on(1, hosts, project, *join):
                wait_for_step(project, first, "apart", 2)
            # The second machine is gone. The run starts again and waits until it is back.
            with on(1, hosts, project, *join) as second:
                assert "the run is done" in ended(second)
                ended(first)
    assert [m["step"] for m in project.metrics("apart")] == list(range(1, STEPS + 1))
    assert project.status("apart")["restarts"] == {"trainer": 1}
    expected, found = adapter(project, "one-machine"), adapter(project, "apart")
    assert expected.keys() == found.keys()
    gap = max(float(np.abs(expected[name] - found[name]).max()) for name in expected)
    largest = max(float(np.abs(value).max()) for value in expected.values())
    assert gap <= 1e-4 * largest, (gap, largest)


def test_an_engine_on_a_machine_without_the_folder_gets_every_adapter(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "sesame")
    flags = ("sync.rollout_mismatch=warn", f"engine.push_key_env={KEY_VARIABLE}")
    with vllm_servers(1, tokenizer=tiny_tokenizer()) as (stub,):
        here = train_args(project, "engine-here", f"engine.urls={json.dumps([stub.url])}", flags[0])
        alone = project.run(*here, timeout_s=DEADLINE_S)
        assert alone.returncode == 0, alone.stderr
    loads = [line for line in stub.log if "probe" not in line and line.startswith("load")]

    received, address = tmp_path_factory.mktemp("other-machine"), "10.77.0.2"
    urls = (f'engine.urls=["http://{address}:8000"]', f'engine.push_urls=["http://{address}:8100"]')
    receive = [*COMMAND, "receive", str(received), "--host", address]
    serve = [sys.executable, "-m", "tests.fakes.vllm_server", address, "8000"]
    with (
        two_hosts() as hosts,
        without_the_folder(hosts, project, *receive) as receiver,
        without_the_folder(hosts, project, *serve) as server,
    ):
        wait_ready(receiver)
        wait_ready(server)
        with on(0, hosts, project, *train_args(project, "engine-there", *urls, *flags)) as run:
            ended(run)
        assert server.poll() is None
        receiver.send_signal(signal.SIGINT)
        assert receiver.wait(DEADLINE_S) == 130
    assert list(received.iterdir()) == [], "the run's end deletes what it sent"
    assert len(loads) >= STEPS
    assert [m["step"] for m in project.metrics("engine-there")] == list(range(1, STEPS + 1))
    expected, found = adapter(project, "engine-here"), adapter(project, "engine-there")
    assert expected.keys() == found.keys()
    assert all(np.array_equal(expected[name], found[name]) for name in expected)


def test_what_a_second_machine_lacks_is_said_before_anything_starts(
    project: Project, fake_engine: None
) -> None:
    with two_hosts() as hosts:
        bad = ["trainer.hosts=2", "trainer.interface=eth77"]
        refused = project.run(*train_args(project, "nowhere", *bad), "--dry-run")
        assert refused.returncode == 2
        assert "eth77 (trainer.interface) is not on this machine, which has lo" in refused.stderr
        with on(1, hosts, project, "worker", "--join", "nowhere", "--interface", "eth77") as process:
            output, _ = process.communicate(timeout=60)
        assert process.returncode == 2
        assert "eth77 (trainer.interface) is not on this machine, which has lo" in output
