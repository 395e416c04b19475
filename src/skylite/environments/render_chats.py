"""Renders conversations with the model's chat template. Runs in the sandbox: both are foreign.

`make_renderer` returns one function of a list of jobs. A job that fails gives {"error": text}, the others:
    {"messages", "tools", "arguments"}            {"ids": token ids of the prompt}
    {the same, "reply": index, "ended": bool}     {"tail": token ids that follow the sampled reply},
                                                  or {"ids"} where the template does not show the reply
    {"decode": token ids}                         {"text": text with special tokens}
    {"facts": arguments of the template}          {"template", "stops": texts, "prompt": a rendered question}
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

MARK = "@@skylite-reply-7f3a@@"
"""Stands for a reply in a rendered conversation, to find what the template puts after it."""
Job = dict[str, Any]


def make_renderer(
    model_path: str, template: str | None, stop_token_ids: list[int]
) -> Callable[[list[Job]], list[Job]]:
    """Load the tokenizer. `template`: text of a chat template that replaces the model's own."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # None makes the import fail: saves seconds
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    from transformers import AutoTokenizer

    from skylite.data.encode_chats import PLAIN_TEMPLATE

    tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
    tokenizer.chat_template = template or tokenizer.chat_template or PLAIN_TEMPLATE
    stops = [tokenizer.convert_ids_to_tokens(i) for i in stop_token_ids]

    def run(jobs: list[Job]) -> list[Job]:
        return [_attempt(tokenizer, stops, job) for job in jobs]

    return run


def _attempt(tokenizer: Any, stops: list[str], job: Job) -> Job:
    try:
        if "facts" in job:
            question = {"messages": [], "tools": None, "arguments": job["facts"]}
            prompt = _render(tokenizer, question, [{"role": "user", "content": "Hello"}])
            return {"template": str(tokenizer.chat_template), "stops": stops, "prompt": prompt}
        if "decode" in job:
            return {"text": tokenizer.decode(job["decode"], skip_special_tokens=False)}
        if "reply" in job and (tail := _tail(tokenizer, stops, job)) is not None:
            return {"tail": tokenizer.encode(tail, add_special_tokens=False)}
        text = _render(tokenizer, job, job["messages"])
        return {"ids": tokenizer.encode(text, add_special_tokens=False)}
    except Exception as error:  # noqa: BLE001  # a template may raise anything; the caller gets the text
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _render(tokenizer: Any, job: Job, messages: list[dict[str, Any]]) -> str:
    text: str = tokenizer.apply_chat_template(
        messages, tools=job["tools"], add_generation_prompt=True, tokenize=False, **job["arguments"]
    )
    return text


def _tail(tokenizer: Any, stops: list[str], job: Job) -> str | None:
    """What the template puts between a sampled reply and the next one; None if it does not show the reply.

    The reply's own text is not rendered again: MARK stands for it, because templates rewrite replies (they
    drop reasoning, or write tool calls in another form).
    """
    messages, index = job["messages"], job["reply"]
    before, after = messages[:index], messages[index + 1 :]
    for reply in ({"role": "assistant", "content": MARK}, {**messages[index], "content": MARK}):
        try:
            text = _render(tokenizer, job, [*before, reply, *after])
        except Exception:  # noqa: BLE001  # some templates refuse a tool's answer without its call
            continue
        _, mark, tail = text.rpartition(MARK)
        if mark and (not reply.get("tool_calls") or _ends_turn(tail, stops)):
            return _without_stop(tail, stops) if job["ended"] else tail
    return None


def _ends_turn(tail: str, stops: list[str]) -> bool:
    """Whether the turn ends directly after the reply, so that nothing of it is rendered a second time."""
    return any(tail.lstrip().startswith(stop) for stop in stops)


def _without_stop(tail: str, stops: list[str]) -> str:
    """The tail after the end-of-turn token, which the engine has sampled already."""
    stripped = tail.lstrip()
    for stop in stops:
        if stripped.startswith(stop):
            return stripped[len(stop) :]
    return tail
