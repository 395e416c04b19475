"""A finished run: another that was stopped equals it; users train on from it, evaluate it and serve it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from functools import partial
from pathlib import Path

import httpx
import psutil
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from skylite.rollout.session import read_events
from skylite.run.run_dir import RunDir
from tests.e2e.conftest import EXACT
from tests.e2e.project import FAKE_WORDS, Project, descendants
from tests.e2e.running import DEADLINE_S, check_metrics, places_with, running, wait_for_step, wait_gone
from tests.other_user import as_other_user

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.dist]


def test_a_run_stopped_by_ctrl_c_and_resumed_equals_one_that_never_stopped(
    project: Project, finished: str
) -> None:
    extra = [word for setting in EXACT for word in ("--set", setting)]
    with running(project, *project.train_args("stopped", 3, *extra)) as process:
        wait_for_step(project, process, "stopped", 1)
        children = descendants(process.pid)
        asked = time.monotonic()
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert time.monotonic() - asked < 30, "a stop takes seconds"
    assert process.returncode == 130, output
    assert wait_gone(children) == []
    assert "Traceback" not in output
    assert project.status("stopped")["phase"] == "stopped"
    assert len(project.metrics("stopped")) < 3

    resumed = project.run("train", "--resume", "stopped", timeout_s=DEADLINE_S)
    assert resumed.returncode == 0, resumed.stderr
    # If the trainer finished a step after Ctrl-C, the resume records it without the parent's metrics.
    assert [m["step"] for m in project.metrics("stopped")] == [1, 2, 3]
    check_metrics(project, finished)
    for version in range(4):
        name = f"adapters/policy-v{version:06d}/adapter_model.safetensors"
        assert (project.root / "stopped" / name).read_bytes() == (
            project.root / finished / name
        ).read_bytes(), version

    assert project.run("adapters", "verify", "stopped").stdout == "4 of 4 published adapters are intact\n"
    replayed = project.run("replay", "stopped", "--step", "2")
    assert replayed.returncode == 0, replayed.stderr
    # Replay starts at the stop's checkpoint if that is of step 1, otherwise at the start of the run.
    assert replayed.stdout.startswith("equal: step 2 again from ")
    assert "gives the published adapter bit for bit" in replayed.stdout


def test_a_second_stage_starts_from_the_first_stages_adapter_and_samples_ahead(
    project: Project, finished: str
) -> None:
    """Warm start at another temperature: the trainer's logprobs equal vLLM's, which has two versions loaded.

    test_warm_start.py resumes without the first run, test_environment_ahead.py while it samples ahead.
    """
    given = project.root / finished / "adapters" / "policy-v000003"
    chosen = ("eval.limit=0", "rollout.temperature=0.7", "rollout.max_staleness=1", "sync.keep_last=9")
    settings = [word for setting in chosen for word in ("--set", setting)]
    args = project.train_args("stage-two", 3, "--from-adapter", str(given), *settings)
    second = project.run(*args, timeout_s=DEADLINE_S)
    assert second.returncode == 0, second.stderr
    assert f"warm start from {given} (rank 8, alpha 16, policy-v000003)" in second.stderr
    start, end = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (project.root / "stage-two/adapters/policy-v000000", given)
    )
    assert start.keys() == end.keys()
    assert all((start[name] == end[name]).all() for name in end)

    run = RunDir(project.root / "stage-two")
    versions = [set(pq.read_table(run.rollout_path(k))["adapter_version"].to_pylist()) for k in (1, 2, 3)]
    assert versions == [{0}, {0}, {1}]
    metrics = project.metrics("stage-two")
    assert [m["staleness/max"] for m in metrics] == [0, 1, 1]
    assert all(m["canary/gap_max"] < 0.002 for m in metrics)
    # Step 3's completions are stale: their logprobs must differ from the trainer's.
    assert metrics[0]["mismatch/logprob_diff_mean"] < 1e-3 < metrics[2]["mismatch/logprob_diff_mean"]
    order = [(e["event"], e["step"]) for e in read_events(run.events_path) if "step" in e]
    assert order.index(("sampling_started", 2)) < order.index(("trainer_step_seen", 1))


def test_a_finished_run_can_be_evaluated(project: Project, finished: str) -> None:
    """test_hostile_bundle.py evaluates with vLLM."""
    words = ("--limit", "4", "--n", "2", *FAKE_WORDS)
    evaluated = project.run("eval", finished, *words, timeout_s=DEADLINE_S)
    assert evaluated.returncode == 0, evaluated.stderr
    evals = project.root / finished / "evals"
    result = json.loads((evals / "policy-v000003-data-test-mean2.json").read_text())
    assert (result["problems"], result["n"], result["adapter"]) == (4, 2, "policy-v000003")
    rows = pq.read_table(evals / "policy-v000003-data-test-mean2.parquet").to_pylist()
    assert len(rows) == 8
    assert result["mean"] == pytest.approx(sum(r["reward"] for r in rows) / 8)


def test_merged_weights_are_checked_with_vllm(project: Project, finished: str, tmp_path: Path) -> None:
    """vLLM loads the adapter itself in each step of a run, and in test_load_the_adapter.py."""
    out = tmp_path / "export"
    done = project.run("export", finished, "--merge", "--out", str(out), "--check-vllm", timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    (check,) = [c for c in json.loads((out / "export.json").read_text())["checks"] if "vllm" in c["by"]]
    assert check["what"] == "merged weights in float32"
    assert check["gap_max"] < 0.002 < check["base_distance"]


def is_dropped(port: int, key: str) -> None:
    """The server answers nothing here, even to the key."""
    with socket.socket() as client, contextlib.suppress(ConnectionError):
        client.connect(("127.0.0.1", port))
        client.sendall(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n".encode())
        assert client.recv(1) == b""


def test_a_finished_run_can_be_served(project: Project, finished: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with running(project, "serve", finished, "--port", str(port)) as process:
        assert process.stdout is not None
        key = next(line.split()[-1] for line in process.stdout if "API key" in line)
        url, given = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {key}"}
        deadline = time.monotonic() + DEADLINE_S
        models: dict[str, int] = {}
        while not models:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            with contextlib.suppress(httpx.TransportError):
                reply = httpx.get(f"{url}/v1/models", headers=given).json()["data"]
                models = {m["id"]: m["max_model_len"] for m in reply}
            time.sleep(0.5)
        assert list(models) == ["base", "policy-v000003"]
        context = json.loads((project.model / "config.json").read_text())["max_position_embeddings"]
        assert models["base"] == context, "of the model, not of the run"
        for path in ("/v1/models", "/metrics", "/version", "/openapi.json"):
            assert httpx.get(url + path).status_code == 401, path
        for path in ("/invocations", "/tokenize", "/adapters", "/v1/load_lora_adapter", "/v1/completions"):
            assert (
                httpx.post(url + path, json={}, headers={"Authorization": "Bearer x"}).status_code == 401
            ), path
        assert httpx.post(f"{url}/adapters", json={}, headers=given).status_code == 404, (
            "adapters cannot be loaded, even with the key"
        )
        if os.geteuid() == 0:  # only root can act as another user
            assert as_other_user(partial(is_dropped, port, key)) == 0
        children = descendants(process.pid)
        assert places_with(key, project.root, [psutil.Process(process.pid), *children]) == []
        process.send_signal(signal.SIGTERM)
        log, _ = process.communicate(timeout=60)
        assert key not in log, "printed once"
        assert process.returncode == 130
        assert "Traceback" not in log
        assert "(APIServer pid=" not in log, "vLLM's own lines are in a file"
    assert wait_gone(children) == []
