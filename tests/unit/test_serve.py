"""`skylite serve` as a process, with a small server in place of vLLM: its log, its address, its end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from skylite.cli.serve import check_address, model_length
from skylite.config.train import TrainConfig
from skylite.engine.connections import Address
from skylite.engine.interface import EngineSpec
from skylite.engine.start_engines import single_engine_spec
from skylite.engine.vllm.launcher import VllmLauncher
from skylite.errors import ConfigError
from skylite.run.run_dir import AdapterVersion, RunDir
from tests.unit.export_cases import make_run

SERVER = """
import json, os, signal, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
host, port = sys.argv[1], int(sys.argv[2])
print("a line of vLLM's log", flush=True)
if "dies" in sys.argv:
    raise ValueError("no memory left")
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        allowed = self.headers["Authorization"] == f"Bearer {os.environ['SKYLITE_API_KEY']}"
        body = json.dumps({"data": [{"id": "base", "max_model_len": 4321}]}).encode()
        self.send_response(200 if allowed or self.path == "/health" else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
try:
    HTTPServer((host, port), Handler).serve_forever()
except BaseException:
    print("Traceback (most recent call last): the server's own", flush=True)
"""
DRIVER = """
import os, sys
from skylite.engine.vllm.launcher import VllmLauncher
def command(self, spec):
    host, port = spec.address.url.removeprefix("http://").rsplit(":", 1)
    return [sys.executable, "-c", os.environ["SERVER"], host, port, os.environ["WORD"]]
VllmLauncher.command = command
from skylite.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def run(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("serve"), tiny_llama, versions=(0, 1))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(run: RunDir, *flags: str, word: str = "") -> Iterator[subprocess.Popen[str]]:
    """`skylite serve RUN`, with this word for its server."""
    added = {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "SERVER": SERVER, "WORD": word}
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, "serve", str(run.root), *flags],
        env={**os.environ, **added, "SKYLITE_API_KEY": "secret"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """What it prints up to the line with `text`."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            break
    assert text in lines[-1], "".join(lines)
    return "".join(lines)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_log_is_in_a_file_and_a_signal_ends_it_quietly(run: RunDir, number: signal.Signals) -> None:
    port = free_port()
    with serving(run, "--port", str(port)) as process:
        said = read_until(process, "ready after")
        assert "a line of vLLM's log" not in said
        assert "4,321 tokens" in said, "as the server says itself"
        log = next(Path(word) for word in said.replace(". ", " ").split() if word.endswith(".log"))
        assert log.read_text().startswith("a line of vLLM's log\n")
        assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 401
        began = time.monotonic()
        process.send_signal(number)
        rest, _ = process.communicate(timeout=120)
        assert time.monotonic() - began < 60
        assert (process.returncode, rest) == (130, "")
        with socket.create_server(("127.0.0.1", port)):
            pass  # nobody listens any more


def test_verbose_prints_the_servers_log_as_it_comes(run: RunDir) -> None:
    with serving(run, "--port", str(free_port()), "-v") as process:
        said = read_until(process, "ready after")
        if "a line of vLLM's log" not in said:
            said += read_until(process, "a line of vLLM's log")
        assert "\na line of vLLM's log\n" in said
        assert "secret" not in said


def test_a_server_that_dies_shows_why(run: RunDir) -> None:
    with serving(run, "--port", str(free_port()), word="dies") as process:
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "ended with exit code 1: ValueError: no memory left" in said


def test_another_address_is_served_with_a_warning_and_asks_for_the_key(run: RunDir) -> None:
    port = free_port()
    with serving(run, "--host", "0.0.0.0", "--port", str(port)) as process:
        said = read_until(process, "ready after")
        assert "warning: Any machine that reaches 0.0.0.0" in said
        assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 401
        process.terminate()
        process.communicate(timeout=30)


def test_an_address_that_cannot_be_listened_on_is_refused_before_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        for host, number, why in (
            ("127.0.0.1", port, "in use"),
            ("192.0.2.7", free_port(), "assign"),  # an address of no machine
            ("example", 8000, "is not an IP address"),
        ):
            with pytest.raises(ConfigError, match=why):
                check_address(host, number)


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("::", "[::1]")]
)
def test_the_url_reaches_the_address_from_this_machine(host: str, url: str) -> None:
    port = free_port()
    assert check_address(host, port) == f"http://{url}:{port}"


def length_of(spec: EngineSpec) -> int:
    return model_length(VllmLauncher(), TrainConfig(), spec)


def test_a_cpu_serves_the_models_context_as_far_as_the_kv_cache_holds_it(tiny_llama: Path) -> None:
    """By hand: keys and values of each layer and head, in float32; vLLM keeps one block of 32 for itself."""
    config = json.loads((tiny_llama / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * 4
    spec = cpu_spec(tiny_llama)
    assert spec.max_model_len < config["max_position_embeddings"] == 2048
    assert length_of(spec) == 2048
    assert length_of(replace(spec, kv_cache_gib=token * 32 * (50 + 0.5) / 2**30)) == 49 * 32
    assert length_of(replace(spec, kv_cache_gib=token * 64 / 2**30)) == spec.max_model_len, "the run's own"


def test_a_gpu_leaves_it_to_vllm(tiny_llama: Path) -> None:
    spec = replace(cpu_spec(tiny_llama), device="cuda")
    spec = replace(spec, max_model_len=length_of(spec))
    spec = replace(spec, address=Address("http://[::]:1", "key"), fixed_adapter=AdapterVersion(1, Path("a")))
    command = VllmLauncher().command(spec)
    assert re.search(r" --max-model-len -1 .*--host :: ", " ".join(command))


def cpu_spec(model: Path) -> EngineSpec:
    config = TrainConfig().model_copy(deep=True)
    return replace(
        single_engine_spec(VllmLauncher(), config, None, model, Address("unix:s")),
        device="cpu",
        dtype="float32",
    )
