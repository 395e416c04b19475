"""The whole program on real parts: prepare, train, stop, resume; then each process killed in turn."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import math
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from skylite.adapters.manifest import read_manifest
from skylite.vllm_plugin import CPU_SERVER
from tests.e2e.project import Project, descendants, torn

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.dist]
DEADLINE_S = 240.0


@contextlib.contextmanager
def running(project: Project, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A skylite process that is gone, with all its descendants, after the block, whatever the test found."""
    process = project.start(*args)
    below: list[psutil.Process] = []
    try:
        yield process
    finally:
        if process.poll() is None:
            below = descendants(process.pid)
            process.kill()
        process.wait()
        for child in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def wait_for_step(project: Project, process: subprocess.Popen[str], run: str, step: int) -> None:
    """Until metrics.jsonl has `step`."""
    deadline = time.monotonic() + DEADLINE_S
    while len(project.metrics(run)) < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"step {step} did not come"
        time.sleep(0.05)


def wait_gone(processes: list[psutil.Process], timeout_s: float = 15.0) -> list[psutil.Process]:
    """Those that still live after `timeout_s`."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_a_run_trains_syncs_and_proves_every_step_then_stops_and_resumes(project: Project) -> None:
    with running(project, *project.train_args("run", 40)) as process:
        wait_for_step(project, process, "run", 3)
        children = descendants(process.pid)
        asked = time.monotonic()
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert time.monotonic() - asked < 30, "a stop takes seconds"
    assert process.returncode == 130, output
    assert wait_gone(children) == []
    assert "Traceback" not in output
    assert project.status("run")["phase"] == "stopped"
    done = int(sorted((project.root / "run" / "checkpoints").iterdir())[-1].name.removeprefix("step-"))
    assert done >= 3
    assert f"step-{done:06d}" in output
    check_metrics(project, "run")

    resumed = project.run("train", "--resume", "run", "--steps", str(done + 2), timeout_s=DEADLINE_S)
    assert resumed.returncode == 0, resumed.stderr
    steps = [m["step"] for m in project.metrics("run")]
    assert steps[-2:] == [done + 1, done + 2]
    assert project.status("run")["phase"] == "done"
    log = (project.root / "run" / "logs" / "skylite.log").read_text()
    assert f": step {done}/40  reward" in log
    assert f" after step {done} of {done + 2}" in log
    assert f": step {done + 2}/{done + 2}  reward" in log
    assert sorted((project.root / "run" / "evals").glob("after-*.parquet"))


def check_metrics(project: Project, run: str) -> None:
    """Every step has its numbers, and they are sane."""
    for line in project.metrics(run):
        for key in (
            "time/publish_s",
            "time/load_s",
            "adapter/bytes",
            "canary/gap_max",
            "mismatch/logprob_diff_mean",
            "reward/mean",
        ):
            assert math.isfinite(line[key]), key
        assert line["canary/gap_max"] < 0.002
        assert line["canary/projection"] == pytest.approx(1.0, abs=0.05)
        assert line["mismatch/logprob_diff_mean"] < 1e-3
    adapters = sorted((project.root / run / "adapters").glob("policy-v*"))
    assert adapters[0].name == "policy-v000000"
    last = read_manifest(adapters[-1])
    assert last.parent == last.version - 1
    weights = load_file(adapters[-1] / "adapter_model.safetensors")
    assert any(abs(v).max() > 0 for k, v in weights.items() if "lora_B" in k)


def test_a_second_stage_begins_as_the_first_ended(project: Project) -> None:
    """Warm start, at another temperature: the trainer's logprobs must still be vLLM's. The first stage's folder may go."""
    first = project.run(*project.train_args("stage-one", 2, "--set", "eval.limit=0"), timeout_s=DEADLINE_S)
    assert first.returncode == 0, first.stderr
    given = project.root / "stage-one" / "adapters" / "policy-v000002"
    settings = ("--set", "eval.limit=0", "--set", "rollout.temperature=0.7", "--set", "checkpoint.every=1")
    second = project.run(
        *project.train_args("stage-two", 1, "--from-adapter", str(given), *settings), timeout_s=DEADLINE_S
    )
    assert second.returncode == 0, second.stderr
    assert f"warm start from {given} (rank 8, alpha 16, policy-v000002)" in second.stderr
    start, end = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (project.root / "stage-two/adapters/policy-v000000", given)
    )
    assert start.keys() == end.keys()
    assert all((start[name] == end[name]).all() for name in end)

    shutil.rmtree(project.root / "stage-one")
    resumed = project.run("train", "--resume", "stage-two", "--steps", "2", timeout_s=DEADLINE_S)
    assert resumed.returncode == 0, resumed.stderr
    assert len(project.metrics("stage-two")) == 2
    check_metrics(project, "stage-two")


def command_of(processes: list[psutil.Process], mark: str) -> psutil.Process:
    """The process that runs the module `mark` itself, not the guard or the agent that names it."""
    return next(
        p
        for p in reversed(processes)
        if mark in p.cmdline()
        and "torch.distributed.run" not in p.cmdline()
        and "guard.py" not in " ".join(p.cmdline()[:6])
    )


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
    assert "It is started again (1 of engine.max_restarts=2)." in output
    check_metrics(project, run)


def test_a_run_that_stops_in_time_and_goes_on_equals_one_that_never_stopped(project: Project) -> None:
    """Deterministic, one request at a time: then the engine too gives the same bits, whatever it did before."""
    kept = ("checkpoint.every=2", "checkpoint.keep_last=3")
    settings = ("trainer.deterministic=true", "engine.max_num_seqs=1", "eval.limit=0", *kept)
    extra = [word for setting in settings for word in ("--set", setting)]
    straight = project.run(*project.train_args("straight", 3, *extra), timeout_s=DEADLINE_S)
    assert straight.returncode == 0, straight.stderr
    stopped = project.run(
        *project.train_args("in-time", 3, *extra, "--max-hours", "0.0001"), timeout_s=DEADLINE_S
    )
    assert stopped.returncode == 0, stopped.stderr
    assert "--max-hours 0.0001: the next step" in stopped.stderr
    assert [m["step"] for m in project.metrics("in-time")] == [1]
    assert project.status("in-time")["phase"] == "stopped"

    resumed = project.run("train", "--resume", "in-time", timeout_s=DEADLINE_S)
    assert resumed.returncode == 0, resumed.stderr
    # The step after the limit may have been trained before the stop: then resume records it, without what only the parent had seen.
    assert [m["step"] for m in project.metrics("in-time")] == [1, 2, 3]
    check_metrics(project, "straight")
    for version in range(4):
        name = f"adapters/policy-v{version:06d}/adapter_model.safetensors"
        assert (project.root / "in-time" / name).read_bytes() == (
            project.root / "straight" / name
        ).read_bytes(), version

    assert project.run("adapters", "verify", "in-time").stdout == "4 of 4 published adapters are intact\n"
    replayed = project.run("replay", "in-time", "--step", "2")
    assert replayed.returncode == 0, replayed.stderr
    # From the checkpoint of the stop, where that was made after step 1: after step 2 there is none before it, and all is trained again.
    assert replayed.stdout.startswith("equal: step 2 again from ")
    assert "gives the published adapter bit for bit" in replayed.stdout


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


def said_in(secret: str, root: Path, processes: list[psutil.Process]) -> list[str]:
    """Files and command lines that hold it."""
    files = [str(path) for path in root.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    return files + [" ".join(p.cmdline()) for p in processes if secret in " ".join(p.cmdline())]


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
            "guard, torchrun, two ranks"
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


def test_two_runs_cannot_share_a_sync_folder(project: Project, tmp_path: Path) -> None:
    shared = f"lora.lora_sync_path={tmp_path / 'sync'}"
    with running(project, *project.train_args("first", 60, "--set", shared)) as process:
        deadline = time.monotonic() + 60
        while not (project.root / "first" / "status.json").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        second = project.run(*project.train_args("second", 1, "--set", shared))
        assert second.returncode == 2
        assert f"belongs to another live run (pid {process.pid})" in second.stderr
        assert not (project.root / "second").exists()
        assert "Traceback" not in second.stderr


def test_a_finished_run_can_be_evaluated_and_served(project: Project) -> None:
    trained = project.run(*project.train_args("finished", 2, "--set", "eval.limit=0"), timeout_s=DEADLINE_S)
    assert trained.returncode == 0, trained.stderr
    assert "skylite eval finished" in trained.stderr

    evaluated = project.run("eval", "finished", "--limit", "4", "--n", "2", timeout_s=DEADLINE_S)
    assert evaluated.returncode == 0, evaluated.stderr
    result = json.loads((project.root / "finished" / "evals" / "policy-v000002-test-mean2.json").read_text())
    assert (result["problems"], result["n"], result["adapter"]) == (4, 2, "policy-v000002")
    rows = pq.read_table(
        project.root / "finished" / "evals" / "policy-v000002-test-mean2.parquet"
    ).to_pylist()
    assert len(rows) == 8
    assert result["accuracy"] == pytest.approx(sum(r["reward"] for r in rows) / 8)

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with running(project, "serve", "finished", "--port", str(port)) as process:
        assert process.stdout is not None
        key = next(line.split()[-1] for line in process.stdout if "API key" in line)
        url, given = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {key}"}
        deadline = time.monotonic() + DEADLINE_S
        models: list[str] = []
        while not models:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            with contextlib.suppress(httpx.TransportError):
                models = [m["id"] for m in httpx.get(f"{url}/v1/models", headers=given).json()["data"]]
            time.sleep(0.5)
        assert models == ["base", "policy-v000002"]
        for path in ("/v1/models", "/metrics", "/version", "/openapi.json"):
            assert httpx.get(url + path).status_code == 401, path
        for path in ("/invocations", "/tokenize", "/adapters", "/v1/load_lora_adapter", "/v1/completions"):
            assert (
                httpx.post(url + path, json={}, headers={"Authorization": "Bearer x"}).status_code == 401
            ), path
        assert httpx.post(f"{url}/adapters", json={}, headers=given).status_code == 404, (
            "adapters cannot be loaded, with the key either"
        )
        children = descendants(process.pid)
        assert said_in(key, project.root, [psutil.Process(process.pid), *children]) == []
        process.send_signal(signal.SIGINT)
        log, _ = process.communicate(timeout=60)
        assert key not in log, "said once, before vLLM's own log begins"
    assert wait_gone(children) == []
