"""Renders conversations with the model's chat template. Runs in the sandbox: both are foreign.

A job that fails gives {"error": text}, the others:
    {"messages", "tools", "arguments"}            {"ids": token ids of the prompt, "thinks": whether it
                                                  opens a reasoning block}
    {the same, "reply": index, "ended": bool}     {"tail": token ids that follow the sampled reply, "thinks"},
                                                  or {"ids", "thinks"} where the template does not show it
    {"decode": token ids}                         {"text": text with special tokens, of decode_reply}
    {"facts": arguments of the template}          {"template", "stops": texts}, if it renders a question
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from skylite.data.decode_reply import decode_reply

MARK = "@@skylite-reply-7f3a@@"
"""Stands for a reply in a rendered conversation, to find what the template puts after it."""
CLOSING = ("<|end|>",)
"""Tokens that close a turn in the history only. GPT-OSS samples <|return|> in their place."""
Job = dict[str, Any]


@dataclass(frozen=True, slots=True)
class JobRunner:
    """The function of jobs, for a loaded tokenizer."""

    tokenizer: Any
    stops: list[str]
    """Texts of the end-of-turn tokens."""
    clock: dict[str, Any] = field(default_factory=dict)
    """Arguments of the template that a job does not bring: the run's time."""

    def __call__(self, jobs: Sequence[Job]) -> list[Job]:
        return [_attempt(self.tokenizer, self.stops, job | {"clock": self.clock}) for job in jobs]


def _attempt(tokenizer: Any, stops: list[str], job: Job) -> Job:
    try:
        if "facts" in job:
            question = {"messages": [], "tools": None, "arguments": job["facts"], "clock": job["clock"]}
            _render(tokenizer, question, [{"role": "user", "content": "Hello"}])
            return {"template": str(tokenizer.chat_template), "stops": stops}
        if "decode" in job:
            return {"text": decode_reply(tokenizer, job["decode"])}
        if "reply" in job and (tail := _tail(tokenizer, stops, job)) is not None:
            return {"tail": tokenizer.encode(tail, add_special_tokens=False), "thinks": _opens_thinking(tail)}
        text = _render(tokenizer, job, job["messages"])
        return {"ids": tokenizer.encode(text, add_special_tokens=False), "thinks": _opens_thinking(text)}
    except Exception as error:  # noqa: BLE001  # a template may raise anything; the caller gets the text
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _render(
    tokenizer: Any, job: Job, messages: list[dict[str, Any]], *, generation_prompt: bool = True
) -> str:
    text: str = tokenizer.apply_chat_template(
        messages,
        tools=job["tools"],
        add_generation_prompt=generation_prompt,
        tokenize=False,
        **job["clock"],
        **job["arguments"],
    )
    return text


def _opens_thinking(text: str) -> bool:
    return text.rstrip().endswith("<think>")


def _tail(tokenizer: Any, stops: list[str], job: Job) -> str | None:
    """What the template puts between a sampled reply and the next one; None if it does not show the reply.

    The reply's own text is not rendered again: MARK stands for it, because templates rewrite replies (they
    drop reasoning, or write tool calls in another form).
    """
    messages, index = job["messages"], job["reply"]
    before, after = messages[:index], messages[index + 1 :]
    if messages[index].get("tool_calls") and (tail := _after_calls(tokenizer, stops, job)) is not None:
        return tail
    for reply in ({"role": "assistant", "content": MARK}, {**messages[index], "content": MARK}):
        try:
            text = _render(tokenizer, job, [*before, reply, *after])
        except Exception:  # noqa: BLE001  # some templates refuse a tool's answer without its call
            continue
        _, mark, tail = text.rpartition(MARK)
        if mark and (not reply.get("tool_calls") or _closed_by(tail, stops)):
            return _without_stop(tail, stops) if job["ended"] else tail
    return None


def _after_calls(tokenizer: Any, stops: list[str], job: Job) -> str | None:
    """The tail after a reply that calls tools, where the rendered reply begins the conversation.

    Some templates put the results inside the turn of the calls, where MARK would be the wrong place.
    """
    messages, index = job["messages"], job["reply"]
    try:
        known = _render(tokenizer, job, messages[: index + 1], generation_prompt=False)
        text = _render(tokenizer, job, messages)
    except Exception:  # noqa: BLE001  # as above
        return None
    if not text.startswith(known):
        return None
    tail = text[len(known) :]
    for stop in stops:
        if known.rstrip().endswith(stop):
            start = known.rindex(stop)
            return text[start + len(stop) :] if job["ended"] else text[start:]
    if _closed_by(tail, stops):
        return _without_stop(tail, stops) if job["ended"] else tail
    return None


def _closed_by(tail: str, stops: list[str]) -> str:
    """The token that ends the turn directly at the start of `tail`; empty if there is none.

    So nothing of the reply is rendered a second time.
    """
    return next((stop for stop in [*stops, *CLOSING] if tail.lstrip().startswith(stop)), "")


def _without_stop(tail: str, stops: list[str]) -> str:
    """The tail after the end-of-turn token, for which the engine has sampled one already."""
    stop = _closed_by(tail, stops)
    return tail.lstrip()[len(stop) :] if stop else tail
