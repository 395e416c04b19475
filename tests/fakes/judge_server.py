"""An OpenAI-compatible judge in a thread. It answers by a script and records when requests come and go."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.http_stub import Answer, serving

COMPLETION = re.compile(r"<completion-(\d+)-([0-9a-f]{12})>\n(.*?)\n</completion-\1-\2>", re.DOTALL)
Script = Callable[[str, int], str | tuple[int, dict[str, str], str]]
"""(question, number of earlier requests) -> the reply, or (status, headers, body)."""


def shown(question: str) -> dict[int, str]:
    """Place -> completion in a question."""
    return {int(place): text for place, _, text in COMPLETION.findall(question)}


def nonce_of(question: str) -> str:
    return COMPLETION.search(question)[2]  # type: ignore[index]


def points(question: str, values: Sequence[float] | Callable[[str], float], before: str = "") -> str:
    """A reply in the right form: points by place, or by a function of the completion."""
    texts, nonce = shown(question), nonce_of(question)
    given = {n: values(text) if callable(values) else values[n - 1] for n, text in texts.items()}
    lines = [f"<score-{nonce}-{n}>{value:g}</score-{nonce}-{n}>" for n, value in given.items()]
    return "\n".join([before, *lines])


@dataclass(slots=True)
class JudgeStub:
    """The judge's address, and what it saw."""

    script: Script
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    """"in" and "out", in order."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def most_at_once(self) -> int:
        running, most = 0, 0
        for event in self.events:
            running += 1 if event == "in" else -1
            most = max(most, running)
        return most

    def answer(self, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, dict[str, str], str]:
        with self.lock:
            self.events.append("in")
            number = len(self.requests)
            self.requests.append(body)
            self.headers.append(headers)
        try:
            said = self.script(body["messages"][0]["content"], number)
        finally:
            with self.lock:
                self.events.append("out")
        if isinstance(said, tuple):
            return said
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        return 200, {}, json.dumps({"choices": [{"message": {"content": said}}], "usage": usage})


@contextmanager
def judge_server(script: Script) -> Iterator[JudgeStub]:
    """Serve it until the block ends."""
    stub = JudgeStub(script)

    def answer(path: str, body: Any, headers: dict[str, str]) -> Answer:
        assert path == "/v1/chat/completions"
        return stub.answer(body, headers)

    with serving(answer) as stub.url:
        yield stub
