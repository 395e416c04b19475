"""A run whose ranks are on two machines: network namespaces with a shared folder."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.e2e.project import COMMAND, Project
from tests.e2e.running import DEADLINE_S, wait_for_step
from tests.torture.ground import SETTINGS
from tests.two_hosts import TwoHosts, ends_with_block, needs_two_hosts, two_hosts

pytestmark = [pytest.mark.e2e, pytest.mark.dist, needs_two_hosts]
STEPS = 4


def train_args(project: Project, run: str, *extra: str) -> list[str]:
    chosen = (*SETTINGS, "eval.limit=0", "checkpoint.every=1", *extra)
    return project.train_args(run, STEPS, *(word for setting in chosen for word in ("--set", setting)))


@contextlib.contextmanager
def on(host: int, hosts: TwoHosts, project: Project, *words: str) -> Iterator[subprocess.Popen[str]]:
    """skylite on a host. Afterwards it and its descendants are gone."""
    process = subprocess.Popen(
        [*hosts.command(host), *COMMAND, *words],
        cwd=project.root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with ends_with_block(process):
        yield process


def ended(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    return output


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
