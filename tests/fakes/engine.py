"""A fake vLLM server that starts fast: a real process with the same Unix socket, requests and replies.

    SKYLITE_ENGINE_COMMAND="python -m tests.fakes.engine" skylite train ...

Its answers depend only on the adapter's weights, the prompt and the seed, so two runs with the same adapters
get the same completions. It reads the canary's logprobs from the adapter's manifest: it tests the run's
machinery, not the sampling. ENGINE_DELAY_S delays each completion, ENGINE_LOAD_DELAY_S each adapter load.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import socket
import socketserver
import string
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

LETTERS = string.ascii_letters + string.digits + " .,"
DELAY_S = float(os.environ.get("ENGINE_DELAY_S", "0"))
LOAD_DELAY_S = float(os.environ.get("ENGINE_LOAD_DELAY_S", "0"))


class Served:
    """The adapters that are loaded, and how many tokens were made."""

    def __init__(self) -> None:
        self.folders: dict[str, Path] = {}
        self.tokens = 0
        self.lock = threading.Lock()

    def load(self, body: dict[str, Any]) -> None:
        folder = Path(body["lora_path"])
        if not (folder / "adapter_model.safetensors").is_file():
            raise LookupError(f"no adapter in {folder}")
        time.sleep(LOAD_DELAY_S)
        self.folders[body["lora_name"]] = folder

    def unload(self, body: dict[str, Any]) -> None:
        if self.folders.pop(body["lora_name"], None) is None:
            raise LookupError(f"{body['lora_name']} is not loaded")

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        model = body["model"]
        if model != "base" and model not in self.folders:
            raise LookupError(f"The model `{model}` does not exist.")
        choices: list[dict[str, Any]]
        if "prompt_logprobs" in body:
            choices = [{"index": 0, "text": "", "prompt_logprobs": self.scored(model, body["prompt"])}]
        else:
            time.sleep(DELAY_S)
            choices = [self.sampled(model, body, index) for index in range(body["n"])]
        with self.lock:
            self.tokens += sum(len(c.get("token_ids", ())) for c in choices) + len(body["prompt"])
        return {"model": model, "choices": choices}

    def chat(self, body: dict[str, Any]) -> Iterator[bytes]:
        """A stream that says which model answers, how many messages it saw, and the last one."""
        if body["model"] != "base" and body["model"] not in self.folders:
            raise LookupError(f"The model `{body['model']}` does not exist.")
        said = f"{body['model']} {len(body['messages'])} {body['messages'][-1]['content']}"
        for text in [*said.split(" "), "\x1b[31mred"]:
            event = {"choices": [{"delta": {"content": f"{text} "}}]}
            yield f"data: {json.dumps(event)}\n\n".encode()
        yield b"data: [DONE]\n\n"

    def sampled(self, model: str, body: dict[str, Any], index: int) -> dict[str, Any]:
        """Letters and token ids out of a hash: what they say to each other is of no interest to a run."""
        weights = b"" if model == "base" else (self.folders[model] / "adapter_model.safetensors").read_bytes()
        seed = hashlib.sha256(
            weights + json.dumps([body["prompt"], body["seed"] + index]).encode()
        ).hexdigest()
        rng = random.Random(seed)
        count = rng.randrange(2, body["max_tokens"] + 1)
        full = count == body["max_tokens"]
        return {
            "index": index,
            "text": "".join(rng.choices(LETTERS, k=count)),
            "prompt_token_ids": body["prompt"],
            "token_ids": [rng.randrange(256) for _ in range(count)],
            "logprobs": {"token_logprobs": [-5.5 + rng.uniform(-0.5, 0.5) for _ in range(count)]},
            "finish_reason": "length" if full else "stop",
        }

    def scored(self, model: str, prompt: list[int]) -> list[dict[str, dict[str, float]] | None]:
        which = "base_logprobs" if model == "base" else "policy_logprobs"
        folders = self.folders.values() if model == "base" else [self.folders[model]]
        known: dict[tuple[int, ...], list[float]] = {}
        for folder in list(folders):
            canary = json.loads((folder / "manifest.json").read_bytes())["canary"]
            known |= zip(map(tuple, canary["sequences"]), canary[which], strict=True)
        logprobs = known[tuple(prompt)]
        return [
            None,
            *({str(token): {"logprob": value}} for token, value in zip(prompt[1:], logprobs, strict=True)),
        ]


class Handler(BaseHTTPRequestHandler):
    """One connection; kept open between requests, as vLLM does."""

    protocol_version = "HTTP/1.1"
    served = Served()

    def address_string(self) -> str:
        return "unix"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing a request."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            names = [{"id": name} for name in ["base", *self.served.folders]]
            self.answer(HTTPStatus.OK, json.dumps({"data": names}).encode())
            return
        text = (
            f"vllm:prompt_tokens_total 0\nvllm:generation_tokens_total {self.served.tokens}\n"
            if self.path == "/metrics"
            else ""
        )
        self.answer(HTTPStatus.OK, text.encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            if self.path == "/v1/chat/completions":
                self.answer(HTTPStatus.OK, b"".join(self.served.chat(body)))
                return
            if self.path == "/v1/completions":
                self.answer(HTTPStatus.OK, json.dumps(self.served.complete(body)).encode())
                return
            {"/v1/load_lora_adapter": self.served.load, "/v1/unload_lora_adapter": self.served.unload}[
                self.path
            ](body)
            self.answer(HTTPStatus.OK, b"{}")
        except LookupError as error:
            self.answer(HTTPStatus.NOT_FOUND, json.dumps({"error": {"message": str(error)}}).encode())

    def answer(self, status: HTTPStatus, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """A thread a connection."""

    daemon_threads = True
    request_queue_size = socket.SOMAXCONN


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds", type=Path, required=True)
    arguments, _ = parser.parse_known_args()
    arguments.uds.unlink(missing_ok=True)
    with Server(str(arguments.uds), Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
