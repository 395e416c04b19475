"""The snippets of docs/how-to/load-the-adapter.md, and of "Serve with vLLM alone", on a tiny model."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.engines import START_TIMEOUT_S, write_random_adapter
from tests.unit.doc_blocks import ROOT, blocks

PAGE = ROOT / "docs" / "how-to" / "load-the-adapter.md"
SERVE_PAGE = ROOT / "docs" / "how-to" / "serve-and-export.md"
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}
"""vLLM asks no server for anything."""
IN_DOCS = "runs/NAME/adapters/policy-v000020"


@pytest.fixture(scope="module")
def adapter(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_adapter(tmp_path_factory.mktemp("adapters") / "policy", tiny_llama, rank=8)


def snippet(mark: str, model: Path, adapter: Path) -> str:
    """The page's Python block with `mark`, with this test's paths."""
    (text,) = [b.text for b in blocks(PAGE) if b.language == "python" and mark in b.text]
    return text.replace("path/to/base", str(model)).replace(IN_DOCS, str(adapter))


def greedy_logits(model: object, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids).logits  # type: ignore[operator]
    return logits


def test_peft_merged_and_transformers_give_the_same_logits(
    tiny_llama: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(snippet("PeftModel.from_pretrained", tiny_llama, adapter), names)
    ids = torch.arange(40, 60)[None]
    adapted = greedy_logits(names["model"], ids)
    base = greedy_logits(AutoModelForCausalLM.from_pretrained(tiny_llama), ids)
    assert (adapted - base).abs().max() > 0.1, "the adapter changes the model"

    exec(snippet("merge_and_unload", tiny_llama, adapter), names)
    merged = greedy_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), ids)
    assert torch.allclose(merged, adapted, atol=1e-4)

    exec(snippet("load_adapter", tiny_llama, adapter), names)
    assert torch.allclose(greedy_logits(names["model"], ids), adapted, atol=1e-4)


@pytest.mark.vllm
def test_vllm_offline(tiny_llama: Path, adapter: Path, tmp_path: Path) -> None:
    script = tmp_path / "offline.py"
    text = snippet("lora_request", tiny_llama, adapter).replace(
        "enable_lora=True", "enable_lora=True, enforce_eager=True, max_model_len=256, dtype='float32'"
    )
    script.write_text(f"{text}\nprint(len(answer.outputs[0].token_ids), 'tokens')\n", encoding="utf-8")
    environ = os.environ | OFFLINE | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, env=environ, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    count = int(done.stdout.splitlines()[-1].removesuffix(" tokens"))
    assert 1 <= count <= 32


@pytest.mark.vllm
def test_vllm_alone_answers_the_documented_request(tiny_llama: Path, adapter: Path, tmp_path: Path) -> None:
    commands = [line for block in blocks(SERVE_PAGE) for line in block.commands]
    (serve,) = [line for line in commands if line.startswith("vllm serve")]
    (module,) = [line for line in commands if line.startswith("python -m vllm")]
    (ask,) = [line for line in commands if line.startswith("curl")]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    # The wheel for CPUs has no working `vllm` script, so the other form runs, with the same flags.
    assert module == serve.replace("vllm serve", "python -m vllm.entrypoints.openai.api_server --model")
    words = shlex.split(module.replace("path/to/base", str(tiny_llama)).replace(IN_DOCS, str(adapter)))
    words[0] = sys.executable
    flags = [
        "--port",
        port,
        "--host",
        "127.0.0.1",
        "--max-model-len",
        "256",
        "--dtype",
        "float32",
        "--enforce-eager",
    ]
    # vLLM alone has its own name for the key, and the documented request ours.
    environ = os.environ | OFFLINE | {"VLLM_API_KEY": "secret", "SKYLITE_API_KEY": "secret"}
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [*words, *flags], env=environ, stdout=log, stderr=log, start_new_session=True
        )
    try:
        request = ask.replace(":8000", f":{port}").replace("policy-v000020", "mine")
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            done = subprocess.run(
                ["bash", "-c", request], env=environ, capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                break
            assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(1)
        assert '"model":"mine"' in done.stdout, done.stdout
    finally:
        os.killpg(server.pid, 9)
        server.wait()
