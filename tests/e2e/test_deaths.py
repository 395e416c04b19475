"""Each process of a run killed or stopped in turn."""

from __future__ import annotations

import ipaddress
import signal
import time

import psutil
import pytest

from skylite.vllm_plugin import CPU_SERVER
from tests.e2e.project import Project, descendants, torn
from tests.e2e.running import (
    DEADLINE_S,
    check_metrics,
    command_of,
    running,
    said_in,
    wait_for_step,
    wait_gone,
)

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.dist]


@pytest.mark.parametrize("order", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_is_killed_or_hangs_is_started_again_and_the_run_goes_on(
    project: Project, order: signal.Signals
) -> None:
    run = f"engine-{order.name}"
    with running(
        project, *project.train_args(run, 60, "--set", "eval.limit=0", "--set", "engine.stall_timeout_s=5")
    ) as process:
        wait_for_step(project, process, run, 1)
        (core,) = [p for p in descendants(process.pid) if p.cmdline()[0].startswith("VLLM::EngineCore")]
        core.send_signal(order)
        before = len(project.metrics(run))
        wait_for_step(project, process, run, before + 3)
        assert project.metrics(run)[-1]["restarts"] == 1
        assert project.status(run)["restarts"] == {"vllm-0": 1}
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "It restarts (1 of engine.max_restarts=2)." in output
    check_metrics(project, run)


def test_a_rank_that_stands_still_is_killed_and_the_run_is_started_again_from_its_checkpoint(
    project: Project,
) -> None:
    settings = (
        "--set",
        "eval.limit=0",
        "--set",
        "checkpoint.every=2",
        "--set",
        "trainer.step_timeout_s=30",
        "--max-restarts",
        "1",
    )
    with running(project, *project.train_args("stood-still", 60, *settings)) as process:
        wait_for_step(project, process, "stood-still", 3)
        rank = command_of(descendants(process.pid), "skylite.trainer.worker")
        rank.send_signal(signal.SIGSTOP)
        # The parent, which lives on, keeps multiprocessing's tracker.
        children = [p for p in descendants(process.pid) if "resource_tracker" not in " ".join(p.cmdline())]
        deadline = time.monotonic() + DEADLINE_S
        while not [m for m in project.metrics("stood-still") if m.get("restarts")]:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert wait_gone(children) == []
        assert project.status("stood-still")["restarts"] == {"trainer": 1}
        children = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        asked = time.monotonic()
        output, _ = process.communicate(timeout=60)
    assert time.monotonic() - asked < 5, "a second Ctrl-C ends at once"
    assert process.returncode == 130, output
    assert wait_gone(children) == []
    assert (
        f"in 30 s (trainer.step_timeout_s): it hangs. Stopped by a signal (SIGSTOP): process {rank.pid}."
        in output
    )
    steps = [m["step"] for m in project.metrics("stood-still")]
    assert steps == list(range(1, len(steps) + 1))
    check_metrics(project, "stood-still")


@pytest.mark.parametrize("victim", ["trainer", "vllm"])
def test_a_killed_child_ends_the_run_with_its_reason(project: Project, victim: str) -> None:
    run = f"killed-{victim}"
    with running(project, *project.train_args(run, 60, "--set", "engine.max_restarts=0")) as process:
        wait_for_step(project, process, run, 1)
        children = descendants(process.pid)
        mark = "skylite.trainer.worker" if victim == "trainer" else CPU_SERVER
        command_of(children, mark).send_signal(signal.SIGKILL)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert "Traceback (most recent call last)" not in output.split("The last lines of its log")[0]
    assert (
        "was killed by SIGKILL: by hand, or by the kernel for lack of memory"
        if victim == "trainer"
        else "vllm-0"
    ) in output
    assert wait_gone(children) == []
    assert torn(project.root / run) == []
    assert project.status(run)["phase"] == "failed"


def reachable(processes: list[psutil.Process]) -> list[str]:
    """Where they listen for other machines."""
    found = [(p, c) for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return [
        f"{c.laddr} {' '.join(p.cmdline())}"
        for p, c in found
        if not ipaddress.ip_address(c.laddr.ip).is_loopback
    ]


def test_a_run_shows_nobody_its_secrets_nor_an_open_port_and_a_killed_parent_leaves_nothing_behind(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {"HF_TOKEN": "hf_neverwritten", "VLLM_API_KEY": "usersownneverwritten"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    with running(
        project, *project.train_args("killed-parent", 60, "--set", "trainer.num_ranks=2")
    ) as process:
        wait_for_step(project, process, "killed-parent", 1)
        children = descendants(process.pid)
        assert len([p for p in children if "skylite.trainer.worker" in p.cmdline()]) >= 4, (
            "reaper, torchrun, two ranks"
        )
        everyone = [psutil.Process(process.pid), *children]
        assert reachable(everyone) == []
        assert [said_in(value, project.root / "killed-parent", everyone) for value in secrets.values()] == [
            [],
            [],
        ]
        process.kill()
        process.wait()
        assert wait_gone(children) == []
    assert torn(project.root / "killed-parent") == []
    lines = (project.root / "killed-parent" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) >= 1
