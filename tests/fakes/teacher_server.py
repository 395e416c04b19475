"""A teacher's server in a thread, in vLLM's form: models, tokenizer, and logprobs of prompts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.http_stub import Answer, serving

Scores = Callable[[list[int]], Sequence[float]]
"""Token ids [L] -> logprobs [L - 1] of all but the first."""
Best = Callable[[list[int], int], Sequence[dict[int, float]]]
"""Token ids [L] and K -> of all but the first, the logprobs of the K most likely tokens in its place."""
Fault = Callable[[str, int], tuple[int, str] | None]
"""(path, number of earlier requests) -> status and body in place of the answer, or None."""


@dataclass(slots=True)
class TeacherStub:
    """The server's address, and what it was asked."""

    tokenizer: Any
    scores: Scores
    best: Best | None = None
    """None: it refuses more than the token's own logprob, in vLLM's words."""
    models: dict[str, int | None] = field(default_factory=lambda: {"big": None})
    """Name -> max_model_len."""
    fault: Fault = lambda path, number: None
    url: str = ""
    prompts: list[list[int]] = field(default_factory=list)
    """Of the requests that it scored."""
    named: set[str] = field(default_factory=set)
    """Models of the requests."""
    headers: list[dict[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, path: str, body: Any, headers: dict[str, str]) -> Answer:
        with self.lock:
            number = len(self.headers)
            self.headers.append(headers)
        if (failed := self.fault(path, number)) is not None:
            return failed[0], {}, failed[1]
        if self.best is None and (count := (body or {}).get("prompt_logprobs")):
            what = f"Requested prompt logprobs of {count}, which is greater than max allowed: 0"
            return 400, {}, json.dumps({"error": {"message": what, "type": "BadRequestError"}})
        return 200, {}, json.dumps(self.reply(path, body))

    def reply(self, path: str, body: Any) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": name, "max_model_len": length} for name, length in self.models.items()]}
        self.named.add(body["model"])
        if path == "/tokenize":
            ids = self.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
            return {"tokens": ids, "count": len(ids)}
        if path == "/detokenize":
            return {"prompt": self.tokenizer.decode(body["tokens"])}
        assert path == "/v1/completions"
        assert body["max_tokens"] == 1
        ids, count = body["prompt"], body["prompt_logprobs"]
        with self.lock:
            self.prompts.append(ids)
            scores = self.scores(ids)
            best = self.best(ids, count) if self.best is not None else [{} for _ in scores]
        found = [x | {i: score} for i, score, x in zip(ids[1:], scores, best, strict=True)]
        rows = [{str(i): {"logprob": x, "decoded_token": "?"} for i, x in row.items()} for row in found]
        return {"choices": [{"prompt_logprobs": [None, *rows]}]}


@contextmanager
def teacher_server(tokenizer: Any, scores: Scores, **facts: Any) -> Iterator[TeacherStub]:
    """Serve it until the block ends."""
    stub = TeacherStub(tokenizer, scores, **facts)
    with serving(stub.answer) as stub.url:
        yield stub
