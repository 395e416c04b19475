"""`skylite service` with real vLLM and torchrun, and Tinker's own client, unchanged, in its own processes."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.e2e.project import COMMAND, descendants
from tests.e2e.running import DEADLINE_S, wait_gone
from tests.unit.service_cases import forward_backward

FOLDER = Path(sys.prefix) / "tinker"
CLIENT = Path(__file__).with_name("tinker_client.py")
ANN, BOB = "tml-ann-0000000000000", "tml-bob-0000000000000"
DYING = Path(__file__).with_name("dying_client.py")
FUTURE = "retrieve_future"
VERBS = 10
LORA = {"rank": 4, "seed": 1}
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
    flags += ["--rank", "32", "--max-length", "512", "--port", str(port), "--out", "clients"]
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


def post(service: Running, path: str, body: dict[str, Any] | bytes, key: str = ANN) -> Any:
    """The JSON of a reply, or of the answer that it promises; None if that is not JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = httpx.post(
        f"{service.url}/api/v1/{path}", content=content, headers={"X-API-Key": key}, timeout=60
    )
    if not reply.is_success:
        return reply.json()
    if "request_id" in (found := reply.json() if reply.content[:1] == b"{" else {}) and path != FUTURE:
        return post(service, FUTURE, {"request_id": found["request_id"]}, key)
    return found


def new_policy(service: Running, key: str = ANN) -> tuple[str, str]:
    """A session, and a policy of seed 1 in it."""
    session = post(service, "create_session", {"sdk_version": "x"}, key)["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": service.model, "lora_config": LORA}
    return session, post(service, "create_model", body, key)["model_id"]


def bobs_steps(service: Running, count: int, disturb: Callable[[int], None]) -> list[Any]:
    """What an update gives, with others in flight while it is computed."""
    session, name = new_policy(service, BOB)
    norms, tokens = [], tuple(7 * i % 249 + 1 for i in range(400))
    for step in range(count):
        first = 3 * step + 1
        adam = {"model_id": name, "seq_id": first + 2, "adam_params": {"learning_rate": 0.01}}
        with ThreadPoolExecutor() as pool:
            update = pool.submit(post, service, "optim_step", adam, BOB)
            for number in (first, first + 1):
                pool.submit(
                    post, service, "forward_backward", forward_backward(name, number, tokens=tokens), BOB
                )
            disturb(step)
            norms.append(update.result()["metrics"]["grad_norm"])
    post(service, f"sessions/{session}/finish", {}, BOB)
    return norms


def requests_of(
    service: Running, session: str, name: str, state: str
) -> list[tuple[str, dict[str, Any] | bytes]]:
    """A request of each verb, of a client with a policy, a session and a saved state."""
    turn = {"model_id": name, "seq_id": 2}
    another = {"session_id": session, "model_seq_id": 1}
    sampler = {"session_id": session, "sampling_session_seq_id": 7, "base_model": service.model}
    sample = {"seq_id": 0, "prompt": {"chunks": [{"tokens": [5, 6]}]}, "sampling_params": {"max_tokens": 4}}
    return [
        ("create_session", {"sdk_version": "x"}),
        ("create_model", {**another, "base_model": service.model, "lora_config": LORA}),
        ("forward_backward", forward_backward(name, 2)),
        ("optim_step", {**turn, "adam_params": {}}),
        ("save_weights", {**turn, "path": "b"}),
        ("save_weights_for_sampler", {**turn, "path": "b"}),
        ("save_weights_external", {**turn, "path": "b"}),
        ("load_weights", {**turn, "path": state, "optimizer": True}),
        ("load_weights", {**another, "path": state, "optimizer": False}),
        ("asample", {**post(service, "create_sampling_session", sampler), **sample}),
    ]


def killed_in_flight(service: Running, path: str, body: dict[str, Any] | bytes) -> None:
    """A client in a process of its own, until SIGKILL."""
    address = urlsplit(service.url)
    words = [sys.executable, str(DYING), str(address.hostname), str(address.port), ANN, path]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(body if isinstance(body, bytes) else json.dumps(body).encode())
    process.stdin.close()
    assert process.stdout.readline() == b"in flight\n", path
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_client_killed_at_each_verb_disturbs_nobody_and_keeps_what_it_saved(service: Running):
    states: list[str] = []

    def kill_at(step: int) -> None:
        session, name = new_policy(service)
        save = {"model_id": name, "seq_id": 1, "path": "mine"}
        states.append(post(service, "save_weights", save)["path"])
        requests = requests_of(service, session, name, states[0])
        assert len(requests) == VERBS
        killed_in_flight(service, *requests[step])
        post(service, f"sessions/{session}/finish", {})
        assert "You have no such model" in post(service, "get_info", {"model_id": name})["detail"]

    alone = bobs_steps(service, VERBS, lambda _: None)
    assert bobs_steps(service, VERBS, kill_at) == alone
    assert len(set(alone)) == VERBS
    session, _ = new_policy(service)
    for number, path in enumerate(states, start=1):
        body = {"session_id": session, "model_seq_id": number, "path": path, "optimizer": True}
        assert post(service, "load_weights", body)["path"] == path
    post(service, f"sessions/{session}/finish", {})


@dataclass
class Reference:
    """PEFT's model in plain transformers, with torch's AdamW, from the adapter that policies start with."""

    model: Any
    adamw: torch.optim.AdamW

    @classmethod
    def load(cls, service: Running, adapter: Path) -> Reference:
        base = AutoModelForCausalLM.from_pretrained(service.model, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, str(adapter), is_trainable=True).eval()
        return cls(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))

    def logprobs(self, data: list[dict[str, Any]]) -> list[torch.Tensor]:
        """[N] of the targets of each datum."""
        found = []
        for datum in data:
            table = torch.log_softmax(self.model(torch.tensor([datum["ids"]])).logits[0].float(), 1)
            found.append(table.gather(1, torch.tensor(datum["target_tokens"])[:, None])[:, 0])
        return found

    def update(self, adam: dict[str, Any]) -> None:
        for group in self.adamw.param_groups:
            group.update(lr=adam["learning_rate"], betas=(adam["beta1"], adam["beta2"]), eps=adam["eps"])
            group["weight_decay"] = adam["weight_decay"]
        self.adamw.step()
        self.adamw.zero_grad()

    def passes(self, steps: list[dict[str, Any]]) -> Iterator[tuple[float, list[torch.Tensor]]]:
        """Loss and logprobs of each pass, with the updates between them."""
        for step in steps:
            if "adam" in step:
                self.update(step["adam"])
                continue
            logprobs, total = self.logprobs(step["data"]), torch.zeros(())
            for logprob, datum in zip(logprobs, step["data"], strict=True):
                if step["loss"] == "cross_entropy":
                    total = total - (logprob * torch.tensor(datum["weights"])).sum()
                else:
                    ratio = (logprob - torch.tensor(datum["logprobs"])).exp()
                    total = total - (ratio * torch.tensor(datum["advantages"])).sum()
            total.backward()
            yield float(total.detach()), [x.detach() for x in logprobs]


def dpo_loss(mine: list[Any], base: list[Any], data: list[dict[str, Any]], beta: float) -> float:
    """The mean over pairs; the replies are where the passes have a weight."""
    gains = [
        float((x - y)[torch.tensor(datum["weights"]) != 0].double().sum())
        for x, y, datum in zip(mine, base, data, strict=True)
    ]
    margins = [beta * (good - bad) for good, bad in zip(gains[::2], gains[1::2], strict=True)]
    return sum(math.log1p(math.exp(-margin)) for margin in margins) / len(margins)


def check_losses(service: Running, folder: Path, metrics: dict[str, Any]) -> None:
    """The loops' losses and logprobs equal those of plain torch to 1e-5."""
    service.result("start", str(folder))
    teacher = Reference.load(service, folder / "rank-8")
    for name, lines in metrics.items():
        steps = json.loads((folder / name / "passes.json").read_text())
        mine = Reference.load(service, folder / ("rank-32" if name == "dpo" else "rank-8"))
        with torch.no_grad():  # B is zero: the base
            before = [mine.logprobs(step["data"]) for step in steps if "loss" in step]
        found = list((teacher if name == "sl" else mine).passes(steps))
        assert len(found) == len(lines) > 1
        for line, step, (total, logprobs), old in zip(
            lines, (step for step in steps if "loss" in step), found, before, strict=True
        ):
            data = step["data"]
            for theirs, expected in zip(step["logprobs"], logprobs, strict=True):
                assert theirs == pytest.approx(expected.tolist(), abs=1e-5), name
            if name == "dpo":
                assert line["dpo_loss"] == pytest.approx(dpo_loss(logprobs, old, data, 0.1), abs=1e-5)
                continue
            assert step["sum"] == pytest.approx(total, rel=1e-5, abs=1e-5), name
            if name == "sl":
                weights = sum(sum(datum["weights"]) for datum in data)
                assert line["train_mean_nll"] == pytest.approx(total / weights, abs=1e-5)
            if name == "distillation":
                with torch.no_grad():
                    taught = teacher.logprobs(data)
                assert line["teacher_kl"] == pytest.approx(teacher_kl(taught, data), abs=1e-5)
                assert abs(line["teacher_kl"]) > 1e-3


def teacher_kl(taught: list[torch.Tensor], data: list[dict[str, Any]]) -> float:
    """Mean of log p - log q over the sampled tokens; the advantage of each is its negative."""
    gaps = [
        (sampled - float(logprob), advantage)
        for datum, logprobs in zip(data, taught, strict=True)
        for sampled, logprob, advantage in zip(datum["logprobs"], logprobs, datum["advantages"], strict=True)
        if sampled
    ]
    assert all(advantage == pytest.approx(-gap, abs=1e-5) for gap, advantage in gaps)
    return sum(gap for gap, _ in gaps) / len(gaps)


def test_the_cookbooks_own_loops_run(service: Running, tmp_path: Path):
    script = Path(__file__).with_name("cookbook_loops.py")
    env = {**os.environ, "PYTHONPATH": str(FOLDER), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(script), service.url, ANN, service.model]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-4000:]
    found = {
        name: [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("sl", "rl", "distillation", "dpo")
    }
    losses = [line["train_mean_nll"] for line in found["sl"]]
    assert losses == sorted(losses, reverse=True)
    assert [0 < line["reward/total"] < 1 and line["grad_norm"] > 0 for line in found["rl"]] == [True, True]
    check_losses(service, tmp_path, found)
    states = (tmp_path / "rl" / "checkpoints.jsonl").read_text()
    assert "/weights/final" in states
    assert "/sampler_weights/final" in states
