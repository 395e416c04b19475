"""Each process of a run killed or stopped in turn."""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import time
from subprocess import Popen

import psutil
import pytest

from skylite.engine.vllm.plugin import CPU_SERVER
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

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.dist]
Process = Popen[str]


def test_a_run_survives_a_killed_engine_a_hung_engine_and_a_hung_rank_and_then_fails_with_a_reason(
    project: Project,
) -> None:
    """One run, so that vLLM starts as rarely as possible. The third engine to die is one too many."""
    settings = (
        "eval.limit=0",
        "engine.stall_timeout_s=15",
        "checkpoint.every=2",
        "trainer.step_timeout_s=60",  # also the limit of its start, which takes half of it beside other work
    )
    flags = [*(word for setting in settings for word in ("--set", setting)), "--max-restarts", "1"]
    with running(project, *project.train_args("deaths", 90, *flags)) as process:
        wait_for_step(project, process, "deaths", 1)
        for restarts, order in enumerate((signal.SIGKILL, signal.SIGSTOP), start=1):
            engine_core(process).send_signal(order)
            wait_for_step(project, process, "deaths", len(project.metrics("deaths")) + 3)
            assert project.metrics("deaths")[-1]["restarts"] == restarts
            assert project.status("deaths")["restarts"] == {"vllm-0": restarts}
        rank = hang_the_rank(project, process)
        assert project.status("deaths")["restarts"] == {"vllm-0": 2, "trainer": 1}

        children = descendants(process.pid)
        command_of(children, CPU_SERVER).send_signal(signal.SIGKILL)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert "It restarts (1 of engine.max_restarts=2)." in output
    assert "It restarts (2 of engine.max_restarts=2)." in output
    assert f"it hangs. Stopped by a signal (SIGSTOP): process {rank.pid}." in output
    assert "vllm-0" in output.rpartition("skylite:")[2]
    check_failed(project, "deaths", output, children)
    steps = [m["step"] for m in project.metrics("deaths")]
    assert steps == list(range(1, len(steps) + 1))
    check_metrics(project, "deaths")


def engine_core(process: Process) -> psutil.Process:
    """vLLM's engine core below skylite."""
    (core,) = [p for p in descendants(process.pid) if "".join(words_of(p)).startswith("VLLM::EngineCore")]
    return core


def hang_the_rank(project: Project, process: Process) -> psutil.Process:
    """Stop the rank with SIGSTOP, and wait until a new trainer has finished a step."""
    before = len(project.metrics("deaths"))
    below = descendants(process.pid)
    rank = command_of(below, "skylite.trainer.worker")
    torchrun = [p for p in below if "torch.distributed.run" in words_of(p)]
    rank.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + DEADLINE_S
    while "trainer" not in project.status("deaths")["restarts"] or len(project.metrics("deaths")) <= before:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert wait_gone([rank, *torchrun]) == []
    return rank


def check_failed(project: Project, run: str, output: str, children: list[psutil.Process]) -> None:
    """The run failed in words, and left no process and no incomplete file."""
    assert "Traceback (most recent call last)" not in output.split("The last lines of its log")[0]
    assert wait_gone(children) == []
    assert torn(project.root / run) == []
    assert project.status(run)["phase"] == "failed"


@pytest.mark.usefixtures("fake_engine")
def test_a_killed_trainer_ends_the_run_with_the_reason(project: Project) -> None:
    with running(project, *project.train_args("killed-trainer", 600)) as process:
        wait_for_step(project, process, "killed-trainer", 1)
        children = descendants(process.pid)
        command_of(children, "skylite.trainer.worker").send_signal(signal.SIGKILL)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert "was killed by SIGKILL: by hand, or by the kernel for lack of memory" in output
    check_failed(project, "killed-trainer", output, children)


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


def test_a_run_leaks_no_secret_opens_no_port_and_leaves_nothing_after_its_parent_is_killed(
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
        assert len([p for p in children if "skylite.trainer.worker" in words_of(p)]) >= 4, (
            "reaper, torchrun, two ranks"
        )
        everyone = [psutil.Process(process.pid), *children]
        assert reachable(everyone) == []
        assert [
            places_with(value, project.root / "killed-parent", everyone) for value in secrets.values()
        ] == [
            [],
            [],
        ]
        process.kill()
        process.wait()
        assert wait_gone(children) == []
    assert torn(project.root / "killed-parent") == []
    lines = (project.root / "killed-parent" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) >= 1
