"""Processes of a run killed or stopped in turn; tests/torture hits each of them in each phase."""

from __future__ import annotations

import contextlib
import ipaddress
import time
from subprocess import Popen

import psutil
import pytest

from tests.e2e.project import Project, descendants, torn
from tests.e2e.running import (
    DEADLINE_S,
    check_metrics,
    command_of,
    places_with,
    running,
    wait_for_step,
    wait_gone,
    words_of,
)
from tests.fakes.launcher import SERVER

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.dist]
Process = Popen[str]


def test_a_run_opens_no_port_leaks_no_secret_survives_its_engine_and_leaves_nothing_after_its_parent(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run with vLLM and two ranks: its engine core is killed, then its parent."""
    secrets = {"HF_TOKEN": "hf_neverwritten", "VLLM_API_KEY": "usersownneverwritten"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    run = project.root / "struck"
    settings = ("--set", "trainer.num_ranks=2", "--set", "eval.limit=0")
    with running(project, *project.train_args("struck", 60, *settings)) as process:
        wait_for_step(project, process, "struck", 1)
        children = descendants(process.pid)
        assert len([p for p in children if "skylite.trainer.worker" in words_of(p)]) >= 4, (
            "reaper, torchrun, two ranks"
        )
        everyone = [psutil.Process(process.pid), *children]
        assert reachable(everyone) == []
        assert [places_with(value, run, everyone) for value in secrets.values()] == [[], []]

        engine_core(process).kill()
        wait_for_step(project, process, "struck", len(project.metrics("struck")) + 3)
        assert project.metrics("struck")[-1]["restarts"] == 1
        assert project.status("struck")["restarts"] == {"engine-0": 1}
        children = descendants(process.pid)
        process.kill()
        process.wait()
        assert wait_gone(children) == []
    assert torn(run) == []
    steps = [m["step"] for m in project.metrics("struck")]
    assert steps == list(range(1, len(steps) + 1))
    check_metrics(project, "struck")


@pytest.mark.usefixtures("fake_engine")
def test_a_run_survives_a_hung_engine_and_a_hung_rank_and_fails_with_the_reason_when_no_restart_is_left(
    project: Project,
) -> None:
    settings = (
        "eval.limit=0",
        "engine.stall_timeout_s=3",
        "trainer.step_timeout_s=40",  # also the limit of its start, which takes half of it beside other work
    )
    flags = [*(word for setting in settings for word in ("--set", setting)), "--max-restarts", "1"]
    with running(project, *project.train_args("deaths", 600, *flags)) as process:
        wait_for_step(project, process, "deaths", 1)
        command_of(descendants(process.pid), str(SERVER)).suspend()
        wait_for_restart(project, process, "engine-0")
        rank = command_of(descendants(process.pid), "skylite.trainer.worker")
        torchrun = [p for p in descendants(process.pid) if "torch.distributed.run" in words_of(p)]
        rank.suspend()
        wait_for_restart(project, process, "trainer")
        assert wait_gone([rank, *torchrun]) == []
        assert project.status("deaths")["restarts"] == {"engine-0": 1, "trainer": 1}

        children = descendants(process.pid)
        command_of(children, "skylite.trainer.worker").kill()
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert "It restarts (1 of engine.max_restarts=2)." in output
    assert f"it hangs. Stopped by a signal (SIGSTOP): process {rank.pid}." in output
    assert "was killed by SIGKILL: by hand, or by the kernel for lack of memory" in output
    assert "Traceback (most recent call last)" not in output.split("The last lines of its log")[0]
    assert wait_gone(children) == []
    assert torn(project.root / "deaths") == []
    assert project.status("deaths")["phase"] == "failed"
    steps = [m["step"] for m in project.metrics("deaths")]
    assert steps == list(range(1, len(steps) + 1))


def wait_for_restart(project: Project, process: Process, child: str) -> None:
    """Wait until a new child of this name has served a step."""
    # Count from the restart: until then steps of the lost child may still be recorded.
    before, deadline = None, time.monotonic() + DEADLINE_S
    while before is None or len(project.metrics("deaths")) <= before:
        if before is None and child in project.status("deaths")["restarts"]:
            before = len(project.metrics("deaths"))
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def engine_core(process: Process) -> psutil.Process:
    """vLLM's engine core below skylite."""
    (core,) = [p for p in descendants(process.pid) if "".join(words_of(p)).startswith("VLLM::EngineCore")]
    return core


def reachable(processes: list[psutil.Process]) -> list[str]:
    """Addresses of `processes` that other machines can reach. One that has just ended has none."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            listening = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            found += [(c.laddr, words_of(process)) for c in listening]
    return [
        f"{address} {' '.join(words)}"
        for address, words in found
        if not ipaddress.ip_address(address.ip).is_loopback
    ]
