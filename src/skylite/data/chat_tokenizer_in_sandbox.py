"""A model's chat template and tokenizer, as the sandbox runs them (data/chat_tokenizer.py): both are foreign.

This process alone imports transformers. It gets jobs. One that fails gives {"error": text}, the others:
    {"messages", "tools", "arguments"}            {"ids": token ids of the prompt, "thinks": whether it
                                                  opens a reasoning block}
    {the same, "images": [[width, height], ...]}  {the same, "images": [[first token, tokens], ...]}
    {the same, "end": true}                       {"end": the last characters of the rendered prompt}
    {the same, "reply": index, "ended": bool}     {"tail": token ids that follow the sampled reply, "thinks"},
                                                  or {"ids", "thinks"} where the template does not show it
    {the same, "learned": indices of replies}     {"calls": [[prompt ids, reply ids], ...]}, a reply as the
                                                  model would sample it: with its end-of-turn token
    {"text": a text}                              {"ids": its token ids, without special tokens}
    {"text_of": token ids}                        {"text": as the tokenizer alone decodes them}
    {"vocabulary": null}                          {"size": number of token ids, "special": texts}
    {"decode": token ids}                         {"text": text with special tokens, of decode_reply}
    {"facts": arguments of the template}          {"template", "stops": texts, "eos_token_id",
                                                  "hides_thinking"}, if it renders a question; null: anyway
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

PLAIN_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}Question: {{ m['content'] }}\nAnswer:"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }}\n\n"
    "{% else %}{{ m['content'] }}\n\n{% endif %}{% endfor %}"
)
"""For base models without a chat template."""

END_CHARACTERS = 80
"""Of a rendered prompt, to see what stands before a completion."""
MARK = "@@skylite-reply-7f3a@@"
"""Stands for a reply in a rendered conversation, to find what the template puts after it."""
CLOSING = ("<|end|>",)
"""Tokens that close a turn in the history only. GPT-OSS samples <|return|> in their place."""
Job = dict[str, Any]
SPELLED = "\ufdd0"
"""Not a character of Unicode. U+FFFD replaces it, as it does other bytes that are not text."""


def make_encoder(
    model_path: str, template: str | None, now: str | None = None
) -> Callable[[Sequence[Job], Sequence[int]], list[Job]]:
    """Load the tokenizer. Returns (jobs, end-of-turn tokens) -> results.

    `template`: text of a chat template instead of the model's own. `now`: the time that the template sees, in
    ISO 8601; None: the clock's.
    """
    # Without torch: buys 330 MB while the run lasts, and 0.5 s of start. It stays because of the memory, more
    # than 5 % of a trainer's (2.2 GiB for a 135M model). transformers then offers no models.
    sys.modules["torch"] = None  # type: ignore[assignment]  # None makes the import fail
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    from transformers import AutoTokenizer

    # Beside tekken.json transformers would take mistral-common, which knows no chat template.
    tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False, mistral_format=False)
    tokenizer.chat_template = template or tokenizer.chat_template or PLAIN_TEMPLATE
    # An argument hides transformers' own function of this name.
    clock = {} if now is None else {"strftime_now": datetime.fromisoformat(now).strftime}
    count = functools.cache(lambda: image_counter(model_path))

    def run(jobs: Sequence[Job], stop_token_ids: Sequence[int]) -> list[Job]:
        stops = [tokenizer.convert_ids_to_tokens(i) for i in stop_token_ids]
        return [
            with_images(result, job["images"], *count()) if job.get("images") and "ids" in result else result
            for job, result in zip(jobs, run_jobs(tokenizer, stops, jobs, clock), strict=True)
        ]

    return run


def run_jobs(
    tokenizer: Any, stops: Sequence[str], jobs: Sequence[Job], clock: Mapping[str, Any] | None = None
) -> list[Job]:
    """The results of jobs.

    `stops`: texts of the end-of-turn tokens. `clock`: arguments of the template that no job brings.
    """
    return [_attempt(tokenizer, list(stops), job | {"clock": dict(clock or {})}) for job in jobs]


def image_counter(model_path: str) -> tuple[int, Callable[[int, int], int]]:
    """The token that stands for an image, and (width, height) -> how many of them its features replace."""
    from transformers import AutoConfig, AutoImageProcessor

    config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    processor = AutoImageProcessor.from_pretrained(model_path, trust_remote_code=False)

    def count(width: int, height: int) -> int:
        return int(processor.get_number_of_image_patches(height, width, {}) // processor.merge_size**2)

    return config.image_token_id, count


def with_images(
    result: Job, sizes: Sequence[Sequence[int]], token: int, count: Callable[[int, int], int]
) -> Job:
    """The result with one token repeated for each image, and their places."""
    if result["ids"].count(token) != len(sizes):
        places = result["ids"].count(token)
        return {"error": f"the rendered prompt has {places} places of images for {len(sizes)} images"}
    ids: list[int] = []
    places, left = [], iter(sizes)
    for i in result["ids"]:
        tokens = count(*next(left)) if i == token else 1
        places += [[len(ids), tokens]] if i == token else []
        ids += [i] * tokens
    return result | {"ids": ids, "images": places}


def _attempt(tokenizer: Any, stops: list[str], job: Job) -> Job:
    try:
        if "facts" in job:
            return _facts(tokenizer, stops, job)
        if "decode" in job:
            return {"text": decode_reply(tokenizer, job["decode"])}
        if "text" in job:
            return {"ids": tokenizer.encode(job["text"], add_special_tokens=False)}
        if "text_of" in job:
            return {"text": str(tokenizer.decode(job["text_of"]))}
        if "vocabulary" in job:
            added = tokenizer.added_tokens_decoder
            return {"size": len(tokenizer), "special": [str(added[i].content) for i in sorted(added)]}
        if "learned" in job:
            return {"calls": [_call(tokenizer, stops, job, index) for index in job["learned"]]}
        if "reply" in job and (tail := _tail(tokenizer, stops, job)) is not None:
            return {"tail": tokenizer.encode(tail, add_special_tokens=False), "thinks": _opens_thinking(tail)}
        text = _render(tokenizer, job, job["messages"])
        if "end" in job:
            return {"end": text[-END_CHARACTERS:]}
        return {"ids": tokenizer.encode(text, add_special_tokens=False), "thinks": _opens_thinking(text)}
    except Exception as error:  # noqa: BLE001  # a template may raise anything; the caller gets the text
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _facts(tokenizer: Any, stops: list[str], job: Job) -> Job:
    if job["facts"] is not None:
        question = {"tools": None, "arguments": job["facts"], "clock": job["clock"]}
        _render(tokenizer, question, [{"role": "user", "content": "Hello"}])
    used = tokenizer.chat_template
    return {
        "template": used if isinstance(used, str) else "\n".join(map(str, used.values())),
        "stops": stops,
        "eos_token_id": tokenizer.eos_token_id,
        "hides_thinking": bool({"<think>", "</think>"} & {*tokenizer.all_special_tokens}),
    }


def _render(
    tokenizer: Any, job: Job, messages: list[dict[str, Any]], *, generation_prompt: bool = True
) -> str:
    text: str = tokenizer.apply_chat_template(
        messages,
        tools=job["tools"],
        add_generation_prompt=generation_prompt,
        tokenize=False,
        **(job["clock"] | job["arguments"]),
    )
    return text


def _call(tokenizer: Any, stops: list[str], job: Job, index: int) -> list[list[int]]:
    """The prompt before the reply at `index`, and the reply. Raises ValueError if they cannot be told apart.

    What the template writes after the end-of-turn token, such as a newline, belongs to the next prompt.
    """
    messages = job["messages"]
    prompt = _render(tokenizer, job, messages[:index])
    text = _render(tokenizer, job, messages[: index + 1], generation_prompt=False)
    content = str(messages[index]["content"]).strip()
    if not text.startswith(prompt):
        raise ValueError("the template does not show a reply right after its prompt")
    reply = text[len(prompt) :]
    start = reply.find(content)
    if start < 0 or not content:
        raise ValueError("the template does not show the text of a reply")
    end = start + len(content)
    if stop := _closed_by(reply[end:], stops):
        end = reply.index(stop, end)
    before = tokenizer.encode(prompt, add_special_tokens=False)
    both = tokenizer.encode(prompt + reply[:end] + (stop or stops[0]), add_special_tokens=False)
    if both[: len(before)] != before:
        raise ValueError("the first token of a reply joins its prompt's last one")
    return [before, both[len(before) :]]


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


def decode_reply(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text, special tokens included, with SPELLED in what ordinary tokens spell.

    A model can spell `</think>` in ordinary tokens without ending its reasoning. Where the vocabulary has the
    text as one token, only that token counts: in the text of other tokens SPELLED stands after the first
    character, so that no parser finds it there. A notation without a token of its own (the JSON of Llama 3's
    tool calls, `<tool_call>` of SmolLM2) is ordinary text, and counts as text.
    """
    special, spelled = special_tokens(tokenizer)
    parts, start, before = [], 0, None
    for end in [*(i for i, token in enumerate(token_ids) if token in special), len(token_ids)]:
        text = _text_after(tokenizer, before, list(token_ids[start:end])).replace(SPELLED, "\ufffd")
        parts.append(spelled.sub(lambda m: m[0][0] + SPELLED + m[0][1:], text) if spelled else text)
        if end < len(token_ids):
            before = token_ids[end]
            parts.append(special[before])
        start = end + 1
    return "".join(parts)


def as_written(text: str) -> str:
    """What the model wrote: the text without SPELLED."""
    return text.replace(SPELLED, "")


def _text_after(tokenizer: Any, before: int | None, token_ids: list[int]) -> str:
    """The text of ordinary tokens. Some tokenizers drop the space at the start of a text, but not here."""
    if not token_ids:
        return ""
    if before is None:
        return str(tokenizer.decode(token_ids, skip_special_tokens=False))
    known = tokenizer.decode([before], skip_special_tokens=False)
    return str(tokenizer.decode([before, *token_ids], skip_special_tokens=False)).removeprefix(known)


@functools.lru_cache(maxsize=4)
def special_tokens(tokenizer: Any) -> tuple[dict[int, str], re.Pattern[str] | None]:
    """Id -> text of the tokens in brackets, and a pattern of their texts. Others are runs of spaces."""
    added = {i: str(token.content) for i, token in tokenizer.added_tokens_decoder.items()}
    special = {i: text for i, text in added.items() if re.fullmatch(r"[<\[].+[>\]]", text, re.DOTALL)}
    return special, _any_of(special.values())


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
