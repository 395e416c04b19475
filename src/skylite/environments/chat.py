"""What a user's episode gets: a task, and a chat with the policy.

    async def episode(task, chat) -> float:
        reply = await chat([{"role": "user", "content": task.prompt}])
        return 1.0 if task.answer in reply.text else 0.0

Any OpenAI client works too: base_url=chat.base_url, api_key=chat.api_key, model=chat.model. An episode that
is a plain function gets a chat whose calls block.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic import TypeAdapter, ValidationError, create_model

from skylite.errors import SkyliteError
from skylite.untrusted_text import encodable, parse_json

Messages = Sequence[dict[str, Any]]
Tools = Sequence[Callable[..., Any] | dict[str, Any]]
LIMIT_CODES = ("turn_limit", "context_length_exceeded")


class LimitReached(Exception):
    """The trajectory has no turn or no tokens left. An episode may catch it and return a reward."""


class ChatError(Exception):
    """The OpenAI server (openai_server.py) refused a request."""


def is_limit(error: BaseException) -> bool:
    """Whether this is LimitReached, or what an OpenAI client raises at a limit.

    True also for an exception raised from one, and for a group of nothing else. False for what a handler of
    LimitReached raises by mistake.
    """
    seen: list[BaseException] = []
    while not any(error is other for other in seen):  # an exception can be its own cause
        if isinstance(error, BaseExceptionGroup):
            return all(map(is_limit, error.exceptions))
        if isinstance(error, LimitReached) or getattr(error, "code", None) in LIMIT_CODES:
            return True
        seen.append(error)
        error = error if error.__cause__ is None else error.__cause__
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt of the data set, as an episode sees it."""

    id: str
    prompt: str
    """The question: the last user message."""
    messages: list[dict[str, Any]]
    """System text, examples and question."""
    answer: str
    columns: dict[str, Any]
    """More columns of the data."""
    seed: int
    """Differs between trajectories and is equal in a repeated run. `random` is seeded with it."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The model's answer."""

    message: dict[str, Any]
    """Append it to the messages of the next call as it is."""
    finish_reason: str
    """stop, length (cut at the token limit) or tool_calls."""

    @property
    def text(self) -> str:
        """Without reasoning and tool calls."""
        text: str = self.message["content"]
        return text

    @property
    def reasoning(self) -> str:
        text: str = self.message.get("reasoning_content", "")
        return text

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """In OpenAI's form."""
        calls: list[dict[str, Any]] = self.message.get("tool_calls", [])
        return calls

    def run_tools(self, tools: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
        """Run the called functions. Returns their results as messages; an error is a result too."""
        by_name = {tool.__name__: tool for tool in tools}
        return [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": encodable(_run_tool(call["function"], by_name)),
            }
            for call in self.tool_calls
        ]


@dataclass(slots=True, kw_only=True)
class Endpoint:
    """Where an OpenAI client finds the policy."""

    base_url: str
    api_key: str
    model: str


@dataclass(slots=True, kw_only=True)
class Chat(Endpoint):
    """`await chat(messages)`: a call of the policy."""

    _client: httpx.AsyncClient | None = field(default=None, init=False, repr=False)

    async def __call__(
        self, messages: Messages, *, tools: Tools = (), max_tokens: int | None = None
    ) -> Reply:
        """Sample a reply. Raises LimitReached at the trajectory's limits, ChatError for a refused request.

        `tools`: functions with type hints, or OpenAI's JSON schemas.
        """
        if self._client is None:  # no timeout: env.timeout_s ends the episode
            self._client = httpx.AsyncClient(timeout=None, trust_env=False, verify=False)
        return _reply(await self._client.post(**_request(self, messages, tools, max_tokens)))


@dataclass(slots=True, kw_only=True)
class BlockingChat(Endpoint):
    """`chat(messages)` for an episode that is a plain function."""

    def __call__(self, messages: Messages, *, tools: Tools = (), max_tokens: int | None = None) -> Reply:
        """As `Chat`."""
        with httpx.Client(timeout=None, trust_env=False, verify=False) as client:
            return _reply(client.post(**_request(self, messages, tools, max_tokens)))


def tool_schema(tool: Callable[..., Any] | dict[str, Any]) -> dict[str, Any]:
    """OpenAI's schema of a function: name, docstring, and type hints of its parameters."""
    if isinstance(tool, dict):
        return tool
    parameters = TypeAdapter(_arguments_model(tool)).json_schema()
    function = {"name": tool.__name__, "description": inspect.getdoc(tool) or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _arguments_model(tool: Callable[..., Any]) -> Any:
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(tool, eval_str=True).parameters.items():
        kind = Any if parameter.annotation is parameter.empty else parameter.annotation
        fields[name] = (kind, ... if parameter.default is parameter.empty else parameter.default)
    return create_model(tool.__name__, **fields)


def _run_tool(call: dict[str, Any], tools: dict[str, Callable[..., Any]]) -> str:
    tool = tools.get(call["name"])
    if tool is None:
        return f"Error: there is no tool {call['name']}; there are {', '.join(tools)}."
    try:
        checked = _arguments_model(tool).model_validate(parse_json(call["arguments"]))
    except (ValidationError, ValueError) as error:
        return f"Error: {call['name']} got other arguments: {str(error).splitlines()[0]}"
    try:
        value = tool(**{name: getattr(checked, name) for name in type(checked).model_fields})
    except SkyliteError:  # the user must correct this, not the model
        raise
    except Exception as error:  # noqa: BLE001  # the model reads it
        return f"Error: {type(error).__name__}: {error}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _request(endpoint: Endpoint, messages: Messages, tools: Tools, max_tokens: int | None) -> dict[str, Any]:
    """Address, headers and body, by httpx's names."""
    body: dict[str, Any] = {"model": endpoint.model, "messages": list(messages)}
    if tools:
        body["tools"] = [tool_schema(tool) for tool in tools]
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    return {
        "url": f"{endpoint.base_url}/chat/completions",
        "headers": {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"},
        "content": encodable(json.dumps(body, ensure_ascii=False, allow_nan=False)).encode(),
    }


def _reply(response: httpx.Response) -> Reply:
    if response.status_code == httpx.codes.OK:
        choice = response.json()["choices"][0]
        return Reply(choice["message"], choice["finish_reason"])
    error = response.json()["error"]
    kind = LimitReached if error["code"] in LIMIT_CODES else ChatError
    raise kind(error["message"])
