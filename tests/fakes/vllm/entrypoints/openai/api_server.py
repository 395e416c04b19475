"""A fake vLLM server: a real process on a real Unix socket that answers what skylite asks, and fails on
request.

Put tests/fakes first in PYTHONPATH, and `python -m vllm.entrypoints.openai.api_server` is this. A completion
is a function of the seed. The folder FAKE_VLLM holds orders, each a file that is taken away when it is
obeyed: `die` (at the next completion request), `hang` (no completion any more, while /health and /metrics
answer), `dead` (500, and /health says 503), `short` (one choice only).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socketserver
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

ORDERS = Path(os.environ["FAKE_VLLM"])
adapters: dict[str, Path] = {}
state = {"tokens": 0, "dead": False}


def obey(order: str) -> bool:
    """Whether there was such an order; it is obeyed once."""
    try:
        (ORDERS / order).unlink()
    except FileNotFoundError:
        return False
    return True


def choice(index: int, seed: int, max_tokens: int, prompt: list[int]) -> dict[str, Any]:
    """A completion, always the same for its seed."""
    draw = random.Random(seed)
    tokens = [draw.randrange(100) for _ in range(max_tokens)]
    return {
        "index": index,
        "text": f"text {seed}",
        "prompt_token_ids": prompt,
        "token_ids": tokens,
        "logprobs": {"token_logprobs": [-0.5] * max_tokens},
        "finish_reason": "length",
    }


def canary(name: str, ids: list[int]) -> list[dict[str, Any] | None]:
    """The trainer's own logprobs out of the adapter's manifest; of the base, out of any that has them."""
    which = "base_logprobs" if name == "base" else "policy_logprobs"
    for folder in list(adapters.values()) if name == "base" else [adapters[name]]:
        known = json.loads((folder / "manifest.json").read_text())["canary"]
        if ids in known["sequences"]:
            row = known[which][known["sequences"].index(ids)]
    return [None, *({str(token): {"logprob": value}} for token, value in zip(ids[1:], row, strict=True))]


class Handler(BaseHTTPRequestHandler):
    """The routes."""

    protocol_version = "HTTP/1.1"

    def address_string(self) -> str:
        return "socket"

    def reply(self, value: Any, status: int = 200) -> None:
        body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.reply(
                f'vllm:prompt_tokens_total{{a="b"}} {state["tokens"]}.0\n'
                'vllm:generation_tokens_total{{a="b"}} 1e+00\n'
            )
        else:
            self.reply("", 503 if state["dead"] else 200)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/completions":
            self.complete(body)
        elif self.path == "/v1/load_lora_adapter":
            known = body["lora_name"] in adapters
            adapters[body["lora_name"]] = Path(body["lora_path"])
            self.reply({}, 400 if known else 200)
        else:
            self.reply({}, 200 if adapters.pop(body["lora_name"], None) else 404)

    def complete(self, body: dict[str, Any]) -> None:
        if body["model"] not in {*adapters, "base"}:
            return self.reply({"error": {"message": f"The model {body['model']} does not exist"}}, 404)
        if "prompt_logprobs" in body:
            state["tokens"] += 1
            return self.reply({"choices": [{"prompt_logprobs": canary(body["model"], body["prompt"])}]})
        if obey("die"):
            print("the fake engine dies", file=sys.stderr, flush=True)
            os._exit(7)
        if obey("hang"):
            time.sleep(600)
        state["dead"] = state["dead"] or obey("dead")
        if state["dead"]:
            return self.reply({"error": {"message": "EngineDeadError"}}, 500)
        count = 1 if obey("short") else body["n"]
        state["tokens"] += count * body["max_tokens"]
        return self.reply(
            {
                "model": body["model"],
                "choices": [
                    choice(i, body["seed"] + i, body["max_tokens"], body["prompt"]) for i in range(count)
                ],
            }
        )


def main() -> None:
    """Serve on the socket that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds")
    socket_path = parser.parse_known_args()[0].uds
    if obey("refuse to start"):
        sys.exit("the fake engine does not start")
    socketserver.ThreadingUnixStreamServer.daemon_threads = True
    socketserver.ThreadingUnixStreamServer(socket_path, Handler).serve_forever()


if __name__ == "__main__":
    main()
