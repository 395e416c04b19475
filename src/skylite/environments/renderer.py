"""Prompts of conversations as token ids, from the sandbox of the model's tokenizer and chat template.

Requests that wait at the same time share one call of the sandbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skylite.data.chat_tokenizer_in_sandbox import Job
from skylite.environments.chat_request import ApiError, ChatMessage
from skylite.errors import ModelError
from skylite.untrusted_text import parse_json, plain


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """Facts about a chat template and its tokenizer."""

    template: str
    stops: tuple[str, ...]
    """Texts of the end-of-turn tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """A prompt, or its end."""

    ids: list[int]
    follows: bool
    """Whether the ids are only what follows a recorded reply."""
    opens_thinking: bool
    """Whether the generation prompt opens a reasoning block, which `chat_template_kwargs` can decide."""


@dataclass(slots=True)
class Renderer:
    """Renders with the sandbox of a tokenizer. Use it from one event loop."""

    run: Callable[[Sequence[Job]], Iterable[Job]]
    """ChatTokenizer.run."""
    model_path: Path
    _waiting: list[tuple[Job, asyncio.Future[Job]]] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None

    async def prompt(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[dict[str, Any]] | None,
        arguments: dict[str, Any],
        reply: int | None = None,
        *,
        ended: bool = True,
    ) -> RenderedPrompt:
        """The prompt of a conversation; what follows the reply at index `reply`, if the template shows it.

        `arguments`: of the template. `ended`: that reply ends with a sampled end-of-turn token. Raises
        ApiError if the template refuses the conversation, ModelError if it cannot be run.
        """
        job: Job = {"messages": for_template(messages), "tools": tools, "arguments": arguments}
        if reply is not None:
            job |= {"reply": reply, "ended": ended}
        found = await self._run(job)
        ids = found.get("tail", found.get("ids"))
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            raise ApiError(
                400,
                "invalid_messages",
                f"The chat template refused the messages: {plain(str(found.get('error')))}",
            )
        return RenderedPrompt(ids=ids, follows="tail" in found, opens_thinking=found.get("thinks") is True)

    async def text(self, token_ids: Sequence[int]) -> str:
        """The text of sampled tokens as `decode_reply` marks it. Raises ModelError."""
        found = await self._run({"decode": list(token_ids)})
        if not isinstance(found.get("text"), str):
            raise ModelError(f"The tokenizer of {self.model_path} cannot decode {len(token_ids)} tokens.")
        text: str = found["text"]
        return text

    async def facts(self, arguments: dict[str, Any]) -> TemplateFacts:
        """What the chat template is like. Raises ModelError."""
        found = await self._run({"facts": arguments})
        if "error" in found or not isinstance(found.get("stops"), list):
            raise ModelError(
                f"The chat template of {self.model_path} cannot be used: {plain(str(found.get('error')))}.",
                "Correct it or data.template_args, or use another model.",
            )
        return TemplateFacts(template=str(found["template"]), stops=tuple(map(str, found["stops"])))

    async def _run(self, job: Job) -> Job:
        future: asyncio.Future[Job] = asyncio.get_running_loop().create_future()
        self._waiting.append((job, future))
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._drain())
        return await future

    async def _drain(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                results = await asyncio.to_thread(list, self.run([job for job, _ in batch]))
            except Exception as error:  # noqa: BLE001  # every caller gets it
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():  # the request may be cancelled
                    future.set_result(result)


def for_template(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages with the arguments of tool calls as objects, which templates write as JSON."""
    return [_with_objects(m) if m.get("tool_calls") else dict(m) for m in messages]


def _with_objects(message: ChatMessage) -> ChatMessage:
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"].get("arguments", "{}")
        try:
            value = parse_json(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            value = arguments
        calls.append({**call, "function": {**call["function"], "arguments": value}})
    return {**message, "tool_calls": calls}
