"""Conversations with a chat template, and what the model answers in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skylite.types import Message
from tests.unit.template_cases import Family

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
QUESTION: Message = {"role": "user", "content": "What is 40 + 2?"}
SYSTEM = "Answer as a pirate."
Ask = Callable[[list[Any]], Any]


class Refused(Exception):
    """The template does not take the conversation."""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def plain(ask: Ask) -> None:
    messages = [user("First question")]
    for turn in range(3):
        messages += [await ask(messages), user(f"again {turn}")]


async def thinking(ask: Ask) -> None:
    """The program drops the reasoning, as OpenAI's clients do."""
    messages = [user("First question")]
    for turn in range(3):
        reply = await ask(messages)
        messages += [{"role": "assistant", "content": reply["content"]}, user(f"again {turn}")]


async def tools(ask: Ask) -> None:
    messages: list[Any] = [QUESTION]
    for turn in range(2):
        reply = await ask(messages)
        assert reply["tool_calls"][0]["function"]["name"] == "add"
        result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": f"result {turn}"}
        messages += [reply, result]
        messages += [await ask(messages), user("Once more")]


async def compacted(ask: Ask) -> None:
    """After two turns a summary replaces the history."""
    messages = [user("First question")]
    for turn in range(2):
        messages += [await ask(messages), user(f"again {turn}")]
    messages = [user("Summary: two answers. Go on")]
    for turn in range(2):
        messages += [await ask(messages), user(f"then {turn}")]


async def sub_agent(ask: Ask) -> None:
    """Another conversation between two turns of the first one."""
    messages = [user("First question")]
    messages += [await ask(messages), user("again")]
    await ask([user("A question for a sub-agent")])
    await ask(messages)


async def with_system(ask: Ask) -> None:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, user("First question")]
    for turn in range(3):
        messages += [await ask(messages), user(f"again {turn}")]


def replies_of(family: Family, conversation: Any) -> list[str]:
    answers = [family.answer.format(f"answer {i}") + family.stop for i in range(9)]
    if conversation is thinking:
        return [family.thought.format(f"answer {i}") + family.stop for i in range(9)]
    if conversation is tools:
        call = family.call + (family.call_stop or family.stop)
        return [call, answers[0], call.replace("c00001000", "c00003000"), answers[1]]
    return answers


CONVERSATIONS = (plain, thinking, tools, compacted, sub_agent, with_system)
REWRITTEN = {compacted: 1, sub_agent: 1}
"""Calls whose conversation does not continue an earlier one."""
