"""Completions in batches (engine/vllm/plugin/batched_outputs.py) are those of stock vLLM."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from skylite.engine.vllm.plugin.batched_outputs import MARK
from tests.engines import EngineServer
from tests.integration.adapter_versions import PROMPT, publish

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).parents[2]
GENERATED = re.compile(r"^vllm:generation_tokens_total\{.*\} (\S+)$", re.MULTILINE)
STOPPED, LENGTH = 20, 600


def choice(server: EngineServer, model: str, *, batched: bool, **changes: Any) -> dict[str, Any]:
    """A greedy completion. Another salt each: no request finds the cache of another."""
    body = {"model": model, "prompt": PROMPT, "temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True}
    body |= {"logprobs": 0, "return_token_ids": True, "cache_salt": f"batched {batched} {changes}"}
    body |= {"vllm_xargs": {MARK: 1}} if batched else {}
    reply = server.http.post("/v1/completions", json=body | changes).raise_for_status().json()
    found: dict[str, Any] = reply["choices"][0]
    return found


def generated(server: EngineServer) -> float:
    return sum(map(float, GENERATED.findall(server.http.get("/metrics").text)))


def test_a_server_gives_the_same_completion_bit_for_bit(server: EngineServer, tmp_path: Path) -> None:
    adapter = publish(server, tmp_path, seed=1)
    for model in (server.base, adapter.name):
        plain = choice(server, model, batched=False)
        stop = plain["token_ids"][STOPPED]
        for changes in ({}, {"stop_token_ids": [stop]}):
            plain, batched = (choice(server, model, batched=batched, **changes) for batched in (False, True))
            assert batched["logprobs"]["tokens"] == []  # the plugin is on
            assert len(plain["logprobs"]["tokens"]) == len(plain["token_ids"]) > 1
            for reply in (plain, batched):
                reply["logprobs"] = reply["logprobs"]["token_logprobs"]
            assert batched == plain


def test_the_watchdog_sees_progress_within_a_request(server: EngineServer) -> None:
    before, counts = generated(server), []
    thread = threading.Thread(target=choice, args=(server, server.base), kwargs={"batched": True})
    thread.start()
    while thread.is_alive():
        counts.append(generated(server) - before)
    thread.join()
    assert {count for count in counts if 1 < count < LENGTH}, counts


def test_every_completion_of_a_prompt_is_equal_and_cheaper(tmp_path: Path, tiny_llama: Path) -> None:
    """With vLLM's own message coder, output processor and reply, 256 requests at once."""
    out = tmp_path / "api.json"
    command = [sys.executable, "benchmarks/api_process.py", "--tokenizer", str(tiny_llama), "--out", str(out)]
    subprocess.run([*command, "--tokens", "100", "--rounds", "1"], cwd=ROOT, check=True)
    result = json.loads(out.read_bytes())
    assert result["equal"]
    costs = result["us_per_token"]
    assert costs["batched"]["api"] < costs["plain"]["api"] / 3


def test_the_gpu_benchmark_runs_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "sampling.json"
    command = [sys.executable, "benchmarks/gpu_sampling.py", "--dry-run", "--rounds", "1", "--out", str(out)]
    subprocess.run([*command, "--until", "400"], cwd=ROOT, check=True)
    kinds = json.loads(out.read_bytes())["kinds"]
    assert {(len(rows), rows[0]["tokens"]) for rows in kinds.values()} == {(1, 4 * 2 * 24)}
    logprobs = ("+ logprobs in batches", "+ logprobs", "")
    assert [*kinds] == [f"{model} {words}".strip() for model in ("LoRA", "base") for words in logprobs]
    assert not any("wrong_form" in row for rows in kinds.values() for row in rows)
