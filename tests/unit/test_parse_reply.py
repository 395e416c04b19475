"""Replies in the notations of model families: reasoning, content and tool calls."""

from __future__ import annotations

import json
import time

import pytest

from skylite.environments.parse_reply import ToolCall, parse_reply, tool_format

ADD = ToolCall("add", json.dumps({"a": 1, "b": "x"}))


@pytest.mark.parametrize(
    ("form", "text", "content"),
    [
        ("hermes", 'Now.<tool_call>{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call><|im_end|>',
         "Now."),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": \\"x\\"}"}', ""),
        ("qwen-xml", "Now.<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n"
                     "</parameter>\n</function>\n</tool_call><|im_end|>", "Now."),
        ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
                "<arg_value>x</arg_value>\n</tool_call><|user|>", ""),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "x"}}]</s>', ""),
        ("mistral", 'Now.[TOOL_CALLS]add[ARGS]{"a": 1, "b": "x"}</s>', "Now."),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": 1, "b": "x"}</s>', ""),
        ("llama", '{"name": "add", "parameters": {"a": 1, "b": "x"}}<|eot_id|>', ""),
        ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": "x"}}<|eom_id|>', ""),
        ("gemma", '<|tool_call>call:add{"a": 1, "b": <|"|>x<|"|>}<tool_call|><turn|>', ""),
        ("gemma", '<|tool_call>call:add{a:1,b:<|"|>x<|"|>}<tool_call|><turn|>', ""),
        ("harmony", "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
                    '{"a": 1, "b": "x"}<|call|>', ""),
        ("harmony", " to=functions.add<|channel|>commentary json<|message|>"
                    '{"a": 1, "b": "x"}<|call|>', ""),
    ],
)  # fmt: skip
def test_one_call_in_every_notation(form: str, text: str, content: str) -> None:
    stops = ["<|im_end|>", "</s>", "<|eot_id|>", "<|eom_id|>", "<|user|>", "<turn|>", "<|call|>"]
    reply = parse_reply(text, form, stops, has_tools=True, thinks=False)
    assert reply.tool_calls == (ADD,)
    assert reply.content == content


def test_two_calls_keep_their_order_and_get_different_ids() -> None:
    text = "".join(f'<tool_call>{{"name": "f{i}", "arguments": {{}}}}</tool_call>' for i in range(2))
    message = parse_reply(text, "hermes", (), has_tools=True, thinks=False).message(7)
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["f0", "f1"]
    assert len({c["id"] for c in message["tool_calls"]}) == 2
    assert {len(c["id"]) for c in message["tool_calls"]} == {9}
    several = '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"x": 2}}'
    calls = parse_reply(several, "llama", (), has_tools=True, thinks=False).tool_calls
    assert calls == (ToolCall("a", "{}"), ToolCall("b", '{"x": 2}'))


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        ("llama", '{"name": 3}'),
        ("llama", "{" * 20000),
        ("mistral", "[TOOL_CALLS]add[ARGS]{"),
        ("gemma", "<|tool_call>call:add{nothing}<tool_call|>"),
    ],
)
def test_a_malformed_call_stays_text(form: str, text: str) -> None:
    reply = parse_reply(text, form, (), has_tools=True, thinks=False)
    assert reply.tool_calls == ()
    assert reply.content != ""


def test_without_tools_a_call_is_text() -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert parse_reply(text, "hermes", (), has_tools=False, thinks=False).content == text


@pytest.mark.parametrize(
    ("text", "thinks", "reasoning", "content"),
    [
        ("<think>\nwhy\n</think>\n\nbecause", False, "why", "because"),
        ("why\n</think>\n\nbecause", True, "why", "because"),
        ("why\n</think>\n\nbecause", False, "why", "because"),
        ("say <think>x</think>", False, "", "say <think>x</think>"),
        ("<think>\nstill", False, "still", ""),
        ("still", True, "still", ""),
        ("because", False, "", "because"),
    ],
)
def test_reasoning_is_apart(text: str, thinks: bool, reasoning: str, content: str) -> None:
    reply = parse_reply(text + "<|im_end|>", "hermes", ["<|im_end|>"], has_tools=True, thinks=thinks)
    assert (reply.reasoning, reply.content) == (reasoning, content)


def test_harmony_has_channels() -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>"
    reply = parse_reply(text, "harmony", ["<|return|>"], has_tools=False, thinks=False)
    assert (reply.reasoning, reply.content) == ("hm", "yes")


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call>\n<function=x>", "qwen-xml"),
        ("<tool_call>{{ name }}<arg_key>", "glm"),
        ("[TOOL_CALLS]", "mistral"),
        ('{"name": function name, "parameters": dictionary}', "llama"),
        ("<|channel|>", "harmony"),
        ("<|tool_call>call:", "gemma"),
        ("plain", "hermes"),
    ],
)
def test_the_template_shows_the_notation(template: str, form: str) -> None:
    assert tool_format(template) == form


@pytest.mark.parametrize(
    "text",
    ["<think>\nhm\n</think>\n\nyes", "<|channel>thought\nhm\n<channel|>yes", "[THINK]hm[/THINK]yes"],
)
def test_reasoning_in_every_notation(text: str) -> None:
    reply = parse_reply(text, "hermes", (), has_tools=False, thinks=False)
    assert (reply.reasoning, reply.content) == ("hm", "yes")


HOSTILE: dict[str, tuple[str, str]] = {
    "glm: a name and spaces": ("glm", "<tool_call>a« »"),
    "glm: names": ("glm", "«<tool_call>a»"),
    "glm: keys without a value": ("glm", "<tool_call>a«<arg_key>a</arg_key>»</tool_call>"),
    "glm: values without an end": ("glm", "<tool_call>a«<arg_key></arg_key><arg_value>»</tool_call>"),
    "hermes: beginnings": ("hermes", "«<tool_call>»x"),
    "hermes: spaces": ("hermes", "<tool_call>x« »y"),
    "hermes: blocks": ("hermes", "«<tool_call>[</tool_call>»"),
    "harmony: channels": ("harmony", "«<|channel|>»"),
    "harmony: spaces": ("harmony", "« »"),
    "harmony: targets": ("harmony", "«to=functions.a»<|channel|>x<|message|>"),
    "harmony: messages": ("harmony", "«<|channel|><|message|>»"),
    "qwen-xml: functions without an end": ("qwen-xml", "«<function=a>»"),
    "qwen-xml: names without an end": ("qwen-xml", "«<function=a»"),
    "qwen-xml: names over a line": ("qwen-xml", "«<function=a»\n>"),
    "qwen-xml: spaces": ("qwen-xml", "<tool_call>« »"),
    "qwen-xml: parameters": ("qwen-xml", "<function=a>«<parameter=a>»</function>"),
    "qwen-xml: parameters over a line": ("qwen-xml", "<function=a>«<parameter=a»\n></function>"),
    "gemma: beginnings": ("gemma", "«<|tool_call>call:a{»"),
    "gemma: ends": ("gemma", "<|tool_call>call:a{«<tool_call|>»"),
    "gemma: brackets": ("gemma", "<|tool_call>call:a{«} »"),
    "gemma: spaces": ("gemma", "<|tool_call>call:a{}« »"),
    "gemma: keys": ("gemma", "<|tool_call>call:a{«, »}<tool_call|>"),
    "llama: parts": ("llama", "«{}; »"),
    "llama: brackets": ("llama", "«{»"),
    "mistral: calls": ("mistral", "«[TOOL_CALLS]»"),
    "reasoning": ("hermes", "«<think>»"),
    "special tokens": ("hermes", "«<|»"),
    "a special token": ("hermes", "<|«a»"),
}
"""Name -> notation, and a text whose part between « and » repeats."""


def seconds(form: str, text: str) -> float:
    started = time.process_time()
    parse_reply(text, form, ("<|x|>",), has_tools=True, thinks=False)
    return time.process_time() - started


def repeated(pattern: str, count: int) -> str:
    """A text of about so many characters."""
    head, _, rest = pattern.partition("«")
    part, _, tail = rest.partition("»")
    return head + part * (count // len(part)) + tail


@pytest.mark.parametrize(("form", "pattern"), HOSTILE.values(), ids=HOSTILE)
def test_no_text_takes_more_than_its_length_in_time(form: str, pattern: str) -> None:
    """Twice the text takes at most three times as long, so 256,000 characters a fraction of a second."""
    before = 0.0
    for count in (1000 * 2**power for power in range(9)):
        took = min(seconds(form, repeated(pattern, count)) for _ in range(2))
        assert took <= 3 * before + 0.03, f"{count} characters took {took:.2f} s, half of them {before:.2f} s"
        before = took
