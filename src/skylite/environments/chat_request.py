"""The body of POST /v1/chat/completions: what skylite's server accepts, and its errors in OpenAI's form."""

from __future__ import annotations

import contextlib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from skylite.untrusted_text import SURROGATE, encodable, plain

ChatMessage = dict[str, Any]
"""role, content (text), and, where the role has them, tool_calls, tool_call_id, name, reasoning_content."""
NO_EFFECT = {
    "user", "store", "metadata", "seed", "parallel_tool_calls", "service_tier", "stream_options",
    "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "verbosity",
}  # fmt: skip
"""Parameters that change nothing here. The server derives the seed from the run's seed."""
SAMPLING = {"temperature", "top_p", "top_k", "min_p"}
"""Parameters that the run fixes: the trainer must know the distribution that was sampled from."""
NEUTRAL: dict[str, Any] = {
    "n": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "logit_bias": {},
    "modalities": ["text"],
    "tool_choice": "auto",
}
"""Parameters that are accepted with this value only."""


class ApiError(Exception):
    """An error reply in OpenAI's form. Status 4xx: an OpenAI client does not repeat the request."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """The JSON of the reply."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class _Open(BaseModel):
    """Other fields are kept."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Function(_Open):
    name: str = Field(min_length=1)
    arguments: str = "{}"


class _ToolCall(_Open):
    id: str = ""
    type: Literal["function"] = "function"
    function: _Function


class _Message(_Open):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: list[_ToolCall] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def join_parts(cls, value: Any) -> Any:
        """A list of text parts becomes one text."""
        if not isinstance(value, list):
            return value
        kinds = [part.get("type") if isinstance(part, dict) else None for part in value]
        if odd := next((kind for kind in kinds if kind not in ("text", "refusal")), ""):
            raise ValueError(f"a part of type {odd!r} is no text; skylite trains text models")
        return "".join(str(part.get("text") or part.get("refusal") or "") for part in value)


class _FunctionSchema(_Open):
    name: str = Field(min_length=1)


class _Tool(_Open):
    type: Literal["function"]
    function: _FunctionSchema


_StopText = Annotated[str, Field(min_length=1)]


class ChatRequest(_Open):
    """A valid request."""

    model: str = ""
    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] | None = None
    stream: bool = False
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: _StopText | list[_StopText] | None = None
    """Texts that end the reply, which does not have them. They change no token's probability."""
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def check_extras(self) -> ChatRequest:
        """Refuse parameters that would change the reply in a way that the server does not offer."""
        extra = self.model_extra or {}
        if (form := extra.get("response_format")) not in (None, {"type": "text"}):
            raise ValueError(f"response_format={form!r} is not offered")
        for name, value in extra.items():
            if name in NO_EFFECT | SAMPLING | {"response_format"} or value is None:
                continue
            if name == "tool_choice" and value == "none":
                continue
            if name not in NEUTRAL:
                raise ValueError(f"{name} is not offered")
            if value != NEUTRAL[name]:
                raise ValueError(f"{name}={value!r} is not offered; leave it out")
        return self

    @property
    def limit(self) -> int | None:
        """The most tokens that the caller wants."""
        given = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return min(given, default=None)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """`stop` as OpenAI's clients send it: a text, or a list."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def fixed_sampling(self) -> list[str]:
        """Sampling parameters of the request, which the run's settings replace."""
        return sorted(n for n in SAMPLING if (self.model_extra or {}).get(n) is not None)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        options = (self.model_extra or {}).get("stream_options")
        return isinstance(options, dict) and options.get("include_usage") is True

    def chat(self) -> list[ChatMessage]:
        """The messages, without fields that are null."""
        return [normalised(m.model_dump(exclude_none=True)) for m in self.messages]

    def tool_schemas(self) -> list[dict[str, Any]] | None:
        """The tools for the chat template; None if there are none or tool_choice is none."""
        if not self.tools or (self.model_extra or {}).get("tool_choice") == "none":
            return None
        return [t.model_dump(exclude_none=True) for t in self.tools]


def parse_request(body: bytes) -> ChatRequest:
    """Raises ApiError with status 400."""
    if SURROGATE.search(body):  # a tool may print half a character, and a program send it as an escape
        with contextlib.suppress(ValueError, RecursionError):  # the validation below says what is wrong
            body = encodable(json.dumps(json.loads(body), ensure_ascii=False)).encode()
    try:
        return ChatRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        text = plain(f"{where}: {first['msg']}" if where else first["msg"])[:500]
        raise ApiError(400, "invalid_value", text, where or None) from None


def normalised(message: ChatMessage) -> ChatMessage:
    """The message as templates expect it: developer is system, and content is always text."""
    role = "system" if message["role"] == "developer" else message["role"]
    return {**message, "role": role, "content": message.get("content") or ""}
