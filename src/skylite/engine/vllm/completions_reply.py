"""What skylite reads of the replies of vLLM's /v1/completions."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Logprobs(_Strict):
    token_logprobs: list[float]


class Choice(_Strict):
    """A completion."""

    index: int
    text: str
    prompt_token_ids: list[int]
    token_ids: list[int] = Field(min_length=1)
    logprobs: _Logprobs
    finish_reason: Literal["stop", "length"]


class Aborted(_Strict):
    """A completion that vLLM's engine dropped. The HTTP status is still 200."""

    index: int
    finish_reason: Literal["abort"]


class SampleReply(_Strict):
    """The completions of one prompt."""

    model: str
    choices: list[Choice | Aborted]


class _Token(_Strict):
    logprob: float


class _Scored(_Strict):
    prompt_logprobs: list[dict[str, _Token] | None]


class ScoreReply(_Strict):
    """The logprobs of one prompt."""

    choices: list[_Scored] = Field(min_length=1)
