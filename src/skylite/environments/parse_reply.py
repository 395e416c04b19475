"""A sampled text to an assistant message: reasoning, content and tool calls, by the model's own notation.

The parsed message is only what the program reads. What the trainer learns from are the sampled token ids.
In a text of `decode_reply` a special token counts only where its id was sampled. Notations without a token
of their own count as text.

Every parser takes time in proportion to the text, whatever the model writes: it splits the text at marks.
So a call whose arguments hold the mark that begins a call stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from skylite.data.chat_tokenizer_in_sandbox import as_written
from skylite.untrusted_text import parse_json


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model made."""

    name: str
    arguments: str
    """JSON, as in OpenAI's API."""


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """The parts of a sampled text."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self, number: int) -> dict[str, Any]:
        """The assistant message in OpenAI's form. `number` makes the ids of its tool calls unique."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": f"c{number:05d}{index:03d}",  # Mistral's template takes 9 characters only
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for index, call in enumerate(self.tool_calls)
            ]
        return message


BLOCKS = (("<think>", "</think>"), ("<|channel>thought", "<channel|>"), ("[THINK]", "[/THINK]"))
"""Begin and end of reasoning: most models, Gemma 4, Mistral."""
Parsed = tuple[str, list[ToolCall]]
"""Text without its tool calls, and these."""


def tool_format(template: str) -> str:
    """The name of the notation that a chat template teaches: a key of TOOL_FORMATS."""
    signs = (
        ("<arg_key>", "glm"),
        ("<function=", "qwen-xml"),
        ("<|channel|>", "harmony"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|tool_call>", "gemma"),
        ("<tool_call>", "hermes"),
        ("<|python_tag|>", "llama"),
        ('"parameters"', "llama"),
    )
    return next((name for sign, name in signs if sign in template), "hermes")


def parse_reply(text: str, form: str, stops: Sequence[str], *, has_tools: bool, thinks: bool) -> ParsedReply:
    """Parse a text of `decode_reply`.

    `stops`: end-of-turn tokens. `thinks`: the generation prompt has opened a reasoning block already.
    """
    for stop in sorted(stops, key=len, reverse=True):
        if stop and text.endswith(stop):
            text = text.removesuffix(stop)
            break
    if form == "harmony":
        return _as_written(_harmony(text))
    reasoning, text = _reasoning(text, thinks=thinks)
    calls: list[ToolCall] = []
    if has_tools:
        text, calls = TOOL_FORMATS[form](text)
    return _as_written(ParsedReply(_clean(text), reasoning, tuple(calls)))


def _as_written(reply: ParsedReply) -> ParsedReply:
    calls = tuple(ToolCall(as_written(call.name), as_written(call.arguments)) for call in reply.tool_calls)
    return ParsedReply(as_written(reply.content), as_written(reply.reasoning), calls)


def _reasoning(text: str, *, thinks: bool) -> tuple[str, str]:
    """(reasoning, rest). A block without an end is all reasoning.

    A reply may end a block that neither it nor its prompt began: DeepSeek-R1's template opens none after the
    result of a tool.
    """
    start, finish = next((b for b in BLOCKS if text.lstrip().startswith(b[0])), BLOCKS[0])
    opened = text.lstrip().startswith(start)
    before, ended, _ = text.partition(finish)
    if not (opened or thinks or (ended and start not in before)):
        return "", text
    inside = text.split(start, 1)[1] if opened else text
    reasoning, end, rest = inside.partition(finish)
    if not end and not opened:
        return reasoning.strip(), ""
    return reasoning.strip(), rest.lstrip("\n")


def _clean(text: str) -> str:
    """Content without special tokens: <|...|> and the usual padding."""
    return re.sub(r"<\|[a-z_]+\|>|</?s>", "", text).strip()


def _call(value: Any) -> ToolCall | None:
    """A call from its JSON object."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError:
            return None
    return (
        ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))
        if isinstance(arguments, dict)
        else None
    )


def _json_calls(text: str) -> list[ToolCall] | None:
    """The calls in a JSON object or a list of them; None if it is none."""
    try:
        value = parse_json(text)
    except ValueError:
        return None
    calls = [_call(item) for item in (value if isinstance(value, list) else [value])]
    return None if not calls or None in calls else [c for c in calls if c is not None]


def _blocks(
    text: str, opening: str, closing: str, read: Callable[[str, bool], list[ToolCall] | None]
) -> Parsed:
    """The text without its blocks that are calls, and these.

    `read` gets what a block holds, and whether it has an end. None: the block stays text.
    """
    first, *parts = text.split(opening)
    kept, calls = [first], list[ToolCall]()
    for part in parts:
        inside, end, rest = part.partition(closing)
        found = read(inside, bool(end))
        calls += found or ()
        kept.append(opening + part if found is None else rest)
    return "".join(kept), calls


def _hermes(text: str) -> Parsed:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>"""
    return _blocks(text, "<tool_call>", "</tool_call>", lambda inside, _: _json_calls(inside.strip()))


def _qwen_xml(text: str) -> Parsed:
    """<tool_call><function=NAME><parameter=KEY>value</parameter>...</function></tool_call>"""

    def read(inside: str, has_end: bool) -> list[ToolCall] | None:
        name, named, body = inside.partition(">")
        if not (has_end and named and name.strip()) or "\n" in name:
            return None
        pairs = []
        for part in body.split("<parameter=")[1:]:
            key, named, rest = part.partition(">")
            value, end, _ = rest.partition("</parameter>")
            if named and end and "\n" not in key:
                pairs.append((key, value.removeprefix("\n").removesuffix("\n")))
        return [ToolCall(name.strip(), _arguments(pairs))]

    text, calls = _blocks(text, "<function=", "</function>", read)
    return (re.sub(r"<tool_call>\s*(</tool_call>|\Z)", "", text) if calls else text), calls


def _glm(text: str) -> Parsed:
    """<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...</tool_call>"""

    def read(inside: str, has_end: bool) -> list[ToolCall] | None:
        name = re.split("[<\n]", inside, maxsplit=1)[0]
        if not (has_end and name.strip()):
            return None
        pairs = []
        for part in inside.split("<arg_key>")[1:]:
            key, _, rest = part.partition("</arg_key>")
            value, end, _ = rest.lstrip().partition("</arg_value>")
            if end and value.startswith("<arg_value>"):
                pairs.append((key, value.removeprefix("<arg_value>")))
        return [ToolCall(name.strip(), _arguments(pairs))]

    return _blocks(text, "<tool_call>", "</tool_call>", read)


def _mistral(text: str) -> Parsed:
    """[TOOL_CALLS][{...}], or [TOOL_CALLS]NAME[ARGS]{...} in newer models."""
    before, sign, rest = text.partition("[TOOL_CALLS]")
    if not sign:
        return text, []
    if (calls := _json_calls(rest.strip())) is not None:
        return before, calls
    calls = []
    for part in rest.split("[TOOL_CALLS]"):
        name, _, arguments = part.partition("[ARGS]")
        name = name.partition("[CALL_ID]")[0].strip()
        call = _call({"name": name, "arguments": arguments.strip() or "{}"})
        if call is None:
            return text, []
        calls.append(call)
    return before, calls


def _llama(text: str) -> Parsed:
    """The turn is nothing but JSON: {"name": ..., "parameters": {...}}, several divided by ";"."""
    inside = text.replace("<|python_tag|>", "").strip()
    if not inside.startswith(("{", "[")):
        return text, []
    if (calls := _json_calls(inside)) is not None:
        return "", calls
    calls = []
    for part in re.split(r";\s*(?=\{)", inside):
        if (found := _json_calls(part)) is None:
            return text, []
        calls += found
    return "", calls


_GEMMA_HEAD = re.compile(r"([\w.-]+)\s*(?=\{)")


def _gemma(text: str) -> Parsed:
    """<|tool_call>call:NAME{key:1,other:<|"|>text<|"|>}<tool_call|>"""

    def read(inside: str, has_end: bool) -> list[ToolCall] | None:
        head = _GEMMA_HEAD.match(inside)
        return _gemma_call(head[1], inside[head.end() :].rstrip()) if has_end and head is not None else None

    return _blocks(text, "<|tool_call>call:", "<tool_call|>", read)


def _gemma_call(name: str, arguments: str) -> list[ToolCall] | None:
    parts = arguments.split('<|"|>')
    # Each second part is a text; in the others, keys have no quotes.
    parts[::2] = [re.sub(r"([{,]\s*)([A-Za-z_][\w-]*)\s*:", r'\1"\2":', part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
    call = _call({"name": name, "arguments": "".join(parts)})
    return None if call is None else [call]


_HARMONY_END = re.compile(r"<\|(?:end|call|return|start)\|>|\Z")
_HARMONY_TARGET = re.compile(r"to=functions\.([\w.-]+)")
_HARMONY_HEAD = re.compile(_HARMONY_TARGET.pattern + r"\s*\Z")


def _harmony(text: str) -> ParsedReply:
    """GPT-OSS: <|channel|>analysis|commentary|final [to=functions.NAME] ... <|message|>text<|end|>"""
    reasoning, content, calls = [], [], []
    for before, channel, body in _harmony_messages(text):
        # The target stands on either side of the channel.
        target = _HARMONY_TARGET.search(channel) or _HARMONY_HEAD.search(before)
        call = _call({"name": target[1], "arguments": body.strip() or "{}"}) if target else None
        if call is not None:
            calls.append(call)
        elif channel.strip().startswith("analysis"):
            reasoning.append(body)
        else:
            content.append(body)
    return ParsedReply("".join(content).strip(), "\n".join(reasoning).strip(), tuple(calls))


def _harmony_messages(text: str) -> Iterator[tuple[str, str, str]]:
    """What stands before the channel, the channel, and the text of each message."""
    position = 0
    while (channel := text.find("<|channel|>", position)) >= 0:
        after = channel + len("<|channel|>")
        if (message := text.find("<|message|>", after)) < 0:
            return
        start = message + len("<|message|>")
        end = _HARMONY_END.search(text, start)
        assert end is not None, "the end of the text counts"
        yield text[position:channel], text[after:message], text[start : end.start()]
        position = end.start()


def _arguments(pairs: Sequence[tuple[str, str]]) -> str:
    """JSON of keys and values; a value that is JSON keeps its type, any other is text."""

    def value(text: str) -> Any:
        try:
            return parse_json(text.strip())
        except ValueError:
            return text

    return json.dumps({key.strip(): value(text) for key, text in pairs}, ensure_ascii=False)


TOOL_FORMATS: dict[str, Callable[[str], Parsed]] = {
    "hermes": _hermes,
    "qwen-xml": _qwen_xml,
    "glm": _glm,
    "mistral": _mistral,
    "llama": _llama,
    "gemma": _gemma,
    "harmony": lambda text: (text, []),
}
"""Notation -> parser. What no parser understands stays content."""
