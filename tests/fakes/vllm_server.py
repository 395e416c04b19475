"""A vLLM server with LoRA and runtime updating, as somebody else starts one: in a thread, on a port.

It tells the canary's logprobs from the manifests of its adapters, and makes tokens up out of the seed. `stop`
and `start` are a kill and a restart at the same address: adapters and counters are lost.

    python -m tests.fakes.vllm_server HOST PORT    serves until it is killed
"""

from __future__ import annotations

import json
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BASE_MODEL = "/models/base"


@dataclass(slots=True)
class VllmStub:
    """The server, its faults, and what it was asked."""

    token: str = ""
    version: str = "0.32.0"
    runtime_lora: bool = True
    max_lora_rank: int = 64
    max_loras: int = 2
    max_model_len: int = 8192
    processed: bool = True
    """--logprobs-mode processed_logprobs."""
    hidden: Path | None = None
    """A folder that it does not see."""
    host: str = "127.0.0.1"
    off: float = 0.0
    """Its canary logprobs are off by so many nats: another base."""
    hangs: bool = False
    """It answers nothing."""
    sample_s: float = 0.0
    load_s: float = 0.0
    tokenizer: Any = None
    """For /tokenize and /detokenize."""
    context: ssl.SSLContext | None = None

    port: int = 0
    """0: any."""
    url: str = ""
    adapters: dict[str, Path] = field(default_factory=dict)
    tokens: int = 0
    polls: int = 0
    """Of its count of tokens."""
    used_lora: bool = False
    log: list[str] = field(default_factory=list)
    """Such as `load policy-v000001`, `sample policy-v000001`, in order."""
    _server: ThreadingHTTPServer | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(None)

            def do_POST(self) -> None:
                self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def reply(self, body: Any) -> None:
                server = stub._server
                while stub.hangs:
                    time.sleep(0.01)
                is_guarded = self.path.startswith("/v1") and stub.token
                if is_guarded and self.headers.get("Authorization") != f"Bearer {stub.token}":
                    status, text = 401, '{"error":"Unauthorized"}'
                else:
                    status, text = stub.answer(self.path, body)
                if stub._server is not server:  # it was killed meanwhile
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                with suppress(ConnectionError):  # the client has gone
                    self.wfile.write(text.encode())

            def log_message(self, format: str, *args: Any) -> None: ...

        server = ThreadingHTTPServer((self.host, self.port), Handler)
        server.daemon_threads = True
        if self.context is not None:
            server.socket = self.context.wrap_socket(server.socket, server_side=True)
        self._server, self.port = server, server.server_port
        self.url = f"http{'s' if self.context else ''}://{self.host}:{self.port}"
        self.adapters, self.tokens, self.used_lora = {}, 0, False
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def answer(self, path: str, body: Any) -> tuple[int, str]:
        if path == "/health":
            return 200, ""
        if path == "/metrics":
            self.polls += 1
            info = f'vllm:lora_requests_info{{max_lora="{self.max_loras}",running_lora_adapters=""}} 1.0\n'
            count = f'vllm:prompt_tokens_total{{engine="0"}} {self.tokens}.0\n'
            return 200, count + (info if self.used_lora else "")
        status, found = self.api(path, body)
        return status, found if isinstance(found, str) else json.dumps(found)

    def api(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/v1/models":
            base = {"id": BASE_MODEL, "parent": None, "max_model_len": self.max_model_len}
            return 200, {"data": [base, *({"id": name, "parent": BASE_MODEL} for name in self.adapters)]}
        if path == "/version":
            return 200, {"version": self.version}
        if path == "/tokenize":
            return 200, {"tokens": self.tokenizer.encode(body["prompt"], add_special_tokens=False)}
        if path == "/detokenize":
            return 200, {"prompt": self.tokenizer.decode(body["tokens"])}
        if path == "/v1/completions":
            return self.complete(body)
        if path == "/v1/load_lora_adapter" and self.runtime_lora:
            return self.load(body)
        if path != "/v1/unload_lora_adapter" or not self.runtime_lora:
            return 404, {"detail": "Not Found"}
        self.note("unload", body["lora_name"])
        return (200, "Success") if self.adapters.pop(body["lora_name"], None) else error(404, "not found")

    def load(self, body: Any) -> tuple[int, Any]:
        if "lora_name" not in body:
            return error(400, "Field required")
        name, path = body["lora_name"], Path(body["lora_path"])
        if name in self.adapters:
            return error(400, f"The lora adapter '{name}' has already been loaded.")
        if not (path / "adapter_model.safetensors").is_file() or self.hidden in path.parents:
            return error(404, f"Loading lora {name} failed: No adapter found for <path>")
        config = path / "adapter_config.json"
        rank = json.loads(config.read_text())["r"] if config.exists() else 1
        if rank > self.max_lora_rank:
            return error(500, f"LoRA rank {rank} is greater than max_lora_rank {self.max_lora_rank}.")
        self.note("load", name)
        time.sleep(self.load_s)
        self.adapters[name] = path
        return 200, "Success"

    def complete(self, body: Any) -> tuple[int, Any]:
        model, prompt = body["model"], body["prompt"]
        if model != BASE_MODEL and model not in self.adapters:
            return error(404, f"The model `{model}` does not exist.")
        self.used_lora = self.used_lora or model != BASE_MODEL
        scored = "prompt_logprobs" in body
        self.note("score" if scored else "sample", model)
        if not scored:
            time.sleep(self.sample_s)
        with self._lock:
            self.tokens += len(prompt) + 1
        if scored:
            rows = [
                {str(i): {"logprob": x}} for i, x in zip(prompt[1:], self.scores(model, prompt), strict=True)
            ]
            return 200, {"choices": [{"prompt_logprobs": [None, *rows]}]}
        count = body["max_tokens"] if body["ignore_eos"] else max(1, body["max_tokens"] // 2)
        logprob = 0.0 if self.processed and body["top_k"] == 1 else -0.5
        ids = [[7 + (body["seed"] + i + place) % 90 for place in range(count)] for i in range(body["n"])]
        choice = {
            "prompt_token_ids": prompt,
            "logprobs": {"token_logprobs": [logprob] * count},
            "finish_reason": "length" if count == body["max_tokens"] else "stop",
        }
        choices = [
            {"index": i, "token_ids": tokens, "text": "".join(map(chr, tokens)), **choice}
            for i, tokens in enumerate(ids)
        ]
        return 200, {"model": model, "choices": choices}

    def scores(self, model: str, prompt: list[int]) -> list[float]:
        """Of a canary's sequence, as the trainer published them; of others, -1 a token."""
        key = "base_logprobs" if model == BASE_MODEL else "policy_logprobs"
        folders = list(self.adapters.values()) if model == BASE_MODEL else [self.adapters[model]]
        rows: dict[tuple[int, ...], list[float]] = {}
        for manifest in (folder / "manifest.json" for folder in folders):
            if manifest.exists():
                canary = json.loads(manifest.read_bytes())["canary"]
                rows |= zip(map(tuple, canary["sequences"]), canary[key], strict=True)
        found = rows.get(tuple(prompt), [-1.0] * (len(prompt) - 1))
        return [x + self.off for x in found]

    def note(self, verb: str, model: str) -> None:
        with self._lock:
            self.log.append(f"{verb} {'base' if model == BASE_MODEL else model}")


def error(status: int, message: str) -> tuple[int, Any]:
    return status, {"error": {"message": message, "code": status}}


@contextmanager
def vllm_servers(count: int = 1, **facts: Any) -> Iterator[list[VllmStub]]:
    """Serve until the block ends."""
    stubs = [VllmStub(**facts) for _ in range(count)]
    for stub in stubs:
        stub.start()
    try:
        yield stubs
    finally:
        for stub in stubs:
            stub.hangs = False
            stub.stop()


if __name__ == "__main__":
    from tests.tiny_models import tiny_tokenizer

    VllmStub(host=sys.argv[1], port=int(sys.argv[2]), tokenizer=tiny_tokenizer()).start()
    print("ready", flush=True)
    threading.Event().wait()
