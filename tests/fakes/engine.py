"""The server of the fake engine (launcher.py): `python engine.py SOCKET [ADAPTER]`.

It reads the canary's logprobs from the adapter's manifest: it tests the run's machinery, not the sampling.
ENGINE_DELAY_S delays each completion, ENGINE_LOAD_DELAY_S each adapter load. The folder ENGINE_ORDERS holds
orders, each a file that is removed when it is obeyed: `refuse to start`, and for the next completion request
`die`, `hang` and `dead` (500 from then on); for the next wake, `refuse to wake`.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import socket
import socketserver
import string
import sys
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

BASE = "base"
LETTERS = string.ascii_letters + string.digits + " .,"
DELAY_S = float(os.environ.get("ENGINE_DELAY_S", "0"))
LOAD_DELAY_S = float(os.environ.get("ENGINE_LOAD_DELAY_S", "0"))


def obey(order: str) -> bool:
    """Whether there was such an order. It is obeyed once."""
    try:
        Path(os.environ.get("ENGINE_ORDERS", "/nowhere"), order).unlink()
    except FileNotFoundError:
        return False
    return True


class Served:
    """The adapters that are loaded, and how many tokens were made."""

    def __init__(self) -> None:
        self.folders: dict[str, Path] = {}
        self.tokens = 0
        self.is_dead = self.is_asleep = False
        self.lock = threading.Lock()

    def sleep(self, body: dict[str, Any]) -> None:
        """Nothing may be asked of it until it wakes: its weights may be gone."""
        self.is_asleep = True

    def wake(self, body: dict[str, Any]) -> None:
        if obey("refuse to wake"):
            raise MemoryError("its memory is taken")
        self.is_asleep = False

    def load(self, body: dict[str, Any]) -> None:
        folder = Path(body["path"])
        if not (folder / "adapter_model.safetensors").is_file():
            raise LookupError(f"no adapter in {folder}")
        time.sleep(LOAD_DELAY_S)
        self.folders[body["name"]] = folder

    def unload(self, body: dict[str, Any]) -> None:
        self.folders.pop(body["name"], None)

    def generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        self.require(body["model"])
        time.sleep(DELAY_S)
        self.obey_orders()
        calls = [self.sampled(body["model"], body, index) for index in range(body["n"])]
        self.count(len(body["prompt"]) + sum(len(call["completion_token_ids"]) for call in calls))
        return calls

    def require(self, model: str) -> None:
        if model != BASE and model not in self.folders:
            raise LookupError(f"The model `{model}` does not exist.")

    def count(self, tokens: int) -> None:
        with self.lock:
            self.tokens += tokens

    def completions(self, body: dict[str, Any]) -> dict[str, Any]:
        """For a teacher: -1/4 of its id for a token, from vLLM's route."""
        self.require(body["model"])
        self.obey_orders()
        prompt: list[int] = body["prompt"]
        self.count(len(prompt))
        rows = [{str(token): {"logprob": -token / 4}} for token in prompt[1:]]
        return {"choices": [{"prompt_logprobs": [None, *rows]}]}

    def obey_orders(self) -> None:
        if obey("die"):
            os._exit(7)
        if obey("hang"):
            time.sleep(600)
        self.is_dead = self.is_dead or obey("dead")

    def chat(self, body: dict[str, Any]) -> Iterator[bytes]:
        """A stream that says which model answers, how many messages it saw, and the last one."""
        self.require(body["model"])
        said = f"{body['model']} {len(body['messages'])} {body['messages'][-1]['content']}"
        for text in [*said.split(" "), "\x1b[31mred"]:
            event = {"choices": [{"delta": {"content": f"{text} "}}]}
            yield f"data: {json.dumps(event)}\n\n".encode()
        yield b"data: [DONE]\n\n"

    def sampled(self, model: str, body: dict[str, Any], index: int) -> dict[str, Any]:
        """Letters and token ids out of a hash: what they say to each other is of no interest to a run."""
        weights = b"" if model == BASE else (self.folders[model] / "adapter_model.safetensors").read_bytes()
        seed = hashlib.sha256(
            weights + json.dumps([body["prompt"], body["seed"] + index]).encode()
        ).hexdigest()
        rng = random.Random(seed)
        count = rng.randrange(2, body["max_tokens"] + 1)
        full = count == body["max_tokens"]
        return {
            "text": "".join(rng.choices(LETTERS, k=count)),
            "completion_token_ids": [rng.randrange(256) for _ in range(count)],
            "sampling_logprobs": [-5.5 + rng.uniform(-0.5, 0.5) for _ in range(count)],
            "finish_reason": "length" if full else "stop",
        }

    def score(self, body: dict[str, Any]) -> list[float]:
        model, prompt = body["model"], body["prompt"]
        self.require(model)
        which = "base_logprobs" if model == BASE else "policy_logprobs"
        folders = self.folders.values() if model == BASE else [self.folders[model]]
        rows: dict[tuple[int, ...], list[float]] = {}
        for folder in list(folders):
            canary = json.loads((folder / "manifest.json").read_bytes())["canary"]
            rows |= zip(map(tuple, canary["sequences"]), canary[which], strict=True)
        self.count(len(prompt))
        return rows[tuple(prompt)]


class Handler(BaseHTTPRequestHandler):
    """One connection; kept open between requests."""

    protocol_version = "HTTP/1.1"
    served = Served()

    def address_string(self) -> str:
        return "unix"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing a request."""

    def do_GET(self) -> None:
        names = [{"id": name} for name in [BASE, *self.served.folders]]
        answers = {"/v1/models": {"data": names}, "/progress": self.served.tokens}
        status = HTTPStatus.INTERNAL_SERVER_ERROR if self.served.is_dead else HTTPStatus.OK
        self.answer(status, json.dumps(answers[self.path]).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        served = self.served
        verbs = {
            "/generate": served.generate, "/score": served.score, "/load": served.load,
            "/unload": served.unload, "/v1/completions": served.completions,
            "/sleep": served.sleep, "/wake": served.wake,
        }  # fmt: skip
        try:
            if served.is_asleep and self.path != "/wake":
                raise LookupError(f"{self.path} was asked of a sleeping engine")
            if self.path == "/v1/chat/completions":
                self.answer(HTTPStatus.OK, b"".join(served.chat(body)))
            else:
                answer = verbs[self.path](body)
                status = HTTPStatus.INTERNAL_SERVER_ERROR if served.is_dead else HTTPStatus.OK
                self.answer(status, json.dumps(answer).encode())
        except MemoryError as error:
            self.answer(HTTPStatus.INTERNAL_SERVER_ERROR, str(error).encode())
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
    path = Path(sys.argv[1])
    path.unlink(missing_ok=True)
    if obey("refuse to start"):
        sys.exit("the fake engine does not start")
    for folder in sys.argv[2:]:
        Handler.served.load({"name": Path(folder).name, "path": folder})
    with Server(str(path), Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
