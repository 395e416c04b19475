"""`skylite service` with real vLLM and torchrun, and Tinker's own client, unchanged, in its own processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.e2e.project import COMMAND, descendants
from tests.e2e.running import DEADLINE_S, wait_gone

FOLDER = Path(sys.prefix) / "tinker"
CLIENT = Path(__file__).with_name("tinker_client.py")
ANN, BOB = "tml-ann-0000000000000", "tml-bob-0000000000000"
SETTINGS = (
    "trainer.deterministic=true",
    "trainer.num_threads=1",
    "engine.max_num_seqs=16",
    "engine.kv_cache_gib=0.25",
)


@dataclass(frozen=True)
class Running:
    """A service of the tiny model."""

    url: str
    model: str

    def client(self, scenario: str, word: str = "0", key: str = ANN) -> subprocess.Popen[str]:
        """Start a user of Tinker's client."""
        words = [sys.executable, str(CLIENT), scenario, self.url, key, self.model, word]
        env = {**os.environ, "PYTHONPATH": str(FOLDER), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def result(self, scenario: str, word: str = "0", key: str = ANN) -> dict[str, Any]:
        """What it prints at its end."""
        return result_of(self.client(scenario, word, key))


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err[-4000:]
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def service(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    if not (FOLDER / "tinker").is_dir():
        pytest.skip("Tinker's client is not installed: run `make setup`")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    root = tmp_path_factory.mktemp("service")
    flags = [word for setting in SETTINGS for word in ("--set", setting)]
    flags += ["--rank", "8", "--max-length", "512", "--port", str(port), "--out", "clients"]
    with (root / "log").open("wb") as log:
        process = subprocess.Popen(
            [*COMMAND, "service", "--model", str(tiny_llama), *flags],
            cwd=root,
            env={**os.environ, "SKYLITE_API_KEY": f"{ANN},{BOB}"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    below = []
    try:
        deadline = DEADLINE_S
        while "ready: " not in (root / "log").read_text():
            assert process.poll() is None, (root / "log").read_text()
            assert (deadline := deadline - 0.2) > 0, "the service did not start"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.2)
        yield Running(f"http://127.0.0.1:{port}", str(tiny_llama))
        below = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, (root / "log").read_text()
        assert not wait_gone(below)
    finally:
        process.kill()
        process.wait()
        for child in below:
            if child.is_running():
                child.kill()


@pytest.fixture(scope="module")
def alone(service: Running) -> list[dict[str, Any]]:
    """What two clients get, one after the other."""
    return [service.result("sft", seed) for seed in ("1", "2")]


def test_two_clients_at_once_get_what_each_gets_alone(service: Running, alone: list[dict[str, Any]]):
    together = [service.client("sft", seed) for seed in ("1", "2")]
    found = [result_of(process) for process in together]
    for mine, lone in zip(found, alone, strict=True):
        for name in ("losses", "norms", "logprobs"):
            assert mine[name] == lone[name], name
        assert mine["loaded"] == mine["logprobs"]
        assert mine["losses"] == sorted(mine["losses"], reverse=True)
        assert mine["losses"][-1] < 0.9 * mine["losses"][0]
        assert mine["rank"] == 4
    assert found[0]["losses"] != found[1]["losses"]
    stolen = service.result("steal", found[0]["state"], key=BOB)
    assert "You have saved nothing at" in stolen["error"]


def test_downloaded_weights_give_transformers_and_peft_the_same_logprobs(service: Running, tmp_path: Path):
    found = service.result("download", str(tmp_path))
    base = AutoModelForCausalLM.from_pretrained(service.model, dtype=torch.float32)
    assert "q_proj" not in (tmp_path / "adapter_config.json").read_text()
    model = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    ids = found["ids"]
    with torch.no_grad():
        table = torch.log_softmax(model(torch.tensor([ids[:-1]])).logits[0].float(), 1)
    expected = table.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert found["logprobs"] == pytest.approx(expected, abs=1e-5)


def test_a_loop_of_reinforcement_learning_learns(service: Running):
    found = service.result("rl", "6")
    assert found["gap"] < 1e-3  # engine and trainer agree on what was sampled
    assert sum(found["rewards"][-2:]) / 2 > sum(found["rewards"][:2]) / 2 + 0.05
    assert found["full"][0] is None
    assert found["again"] == pytest.approx(found["full"], abs=1e-4)
    assert found["top"][0] is None
    for row, logprob in zip(found["top"][1:], found["full"][1:], strict=True):
        assert len(row) == 3
        assert row[0][1] >= row[1][1] >= row[2][1]
        assert logprob <= row[0][1] + 1e-4
    assert len(found["greedy"]) == 3
    for text, reason in found["texts"]:
        assert (reason == "stop") == text.endswith(("e", "a")), (text, reason)


def test_preferences_through_a_loss_of_the_client(service: Running):
    found = service.result("dpo")
    assert found["losses"][0] == pytest.approx(2 * 0.6931472, abs=1e-5)  # 2 log 2 at the start
    assert found["margins"][0] == pytest.approx(0.0, abs=1e-5)
    assert found["margins"] == sorted(found["margins"])
    assert found["margins"][-1] > 0.1


def test_a_client_that_is_killed_disturbs_nobody_and_keeps_what_it_saved(
    service: Running, alone: list[dict[str, Any]]
):
    dying = service.client("die")
    assert dying.stdout is not None
    state = json.loads(dying.stdout.readline())["state"]
    other = service.client("sft", "1")
    dying.send_signal(signal.SIGKILL)
    dying.communicate()
    assert result_of(other)["losses"] == alone[0]["losses"]
    assert service.result("steal", state) == {}


def test_the_cookbooks_own_loops_run(service: Running, tmp_path: Path):
    script = Path(__file__).with_name("cookbook_loops.py")
    env = {**os.environ, "PYTHONPATH": str(FOLDER), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(script), service.url, ANN, service.model]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-4000:]
    found = {
        name: [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("sl", "rl")
    }
    losses = [line["train_mean_nll"] for line in found["sl"]]
    assert losses == sorted(losses, reverse=True)
    assert [0 < line["reward/total"] < 1 and line["grad_norm"] > 0 for line in found["rl"]] == [True, True]
    states = (tmp_path / "rl" / "checkpoints.jsonl").read_text()
    assert "/weights/final" in states
    assert "/sampler_weights/final" in states
