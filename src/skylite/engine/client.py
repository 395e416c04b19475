"""vLLM over HTTP on a Unix socket: the only file that knows its requests and replies. One attempt a call; engine.py has the patience."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skylite.errors import EngineDead, EngineFailed, RunFailed, SyncFailed
from skylite.run.run_dir import AdapterVersion
from skylite.types import Sample

REQUEST_TIMEOUT_S = 1800.0
"""A whole group may queue behind others on a slow engine; an engine that does nothing is noticed by its progress, not by this."""
STATUS_TIMEOUT_S = 5.0
"""For /health and /metrics, which vLLM answers without its engine."""
_TOKENS = re.compile(r"^vllm:(?:prompt|generation)_tokens_total(?:\{.*\})? (\S+)$", re.MULTILINE)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Logprobs(_Strict):
    token_logprobs: list[float]


class _Choice(_Strict):
    index: int
    text: str
    token_ids: list[int] = Field(min_length=1)
    logprobs: _Logprobs
    finish_reason: Literal["stop", "length"]


class _Aborted(_Strict):
    """vLLM ends a completion so, with HTTP 200, when its engine is told to drop it."""

    index: int
    finish_reason: Literal["abort"]


class _Sampled(_Strict):
    model: str
    choices: list[_Choice | _Aborted]


class _Token(_Strict):
    logprob: float


class _Scored(_Strict):
    prompt_logprobs: list[dict[str, _Token] | None]


class _Prompts(_Strict):
    choices: list[_Scored] = Field(min_length=1)


Reply = TypeVar("Reply", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Every parameter is sent explicitly: an unset one would be filled in by the server."""

    temperature: float
    """0 is greedy."""
    top_p: float
    """Sample among the likeliest tokens that hold this share together; 1: all."""
    top_k: int
    """Sample among this many likeliest tokens; 0: all."""
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    """End-of-turn tokens of the model."""
    seed: int
    """vLLM gives sample i of a request seed + i."""


class VllmClient:
    """One server. Owns its connections; close it with `aclose`."""

    def __init__(self, name: str, socket_path: Path, request_timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        self.name = name
        self._request_timeout_s = request_timeout_s
        transport = httpx.AsyncHTTPTransport(uds=str(socket_path), limits=httpx.Limits(max_connections=None))
        # No timeouts of httpx's own: they are for one read each, and a reply can come drop by drop.
        self._http = httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=None)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def is_ready(self) -> bool:
        """Whether /health answers 200."""
        try:
            return (await self._send("GET", "/health", None, STATUS_TIMEOUT_S)).status_code == httpx.codes.OK
        except EngineFailed:
            return False

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when the engine serves; raises RunFailed after `timeout_s`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not await self.is_ready():
            if asyncio.get_running_loop().time() > deadline:
                raise RunFailed(
                    f"{self.name} did not serve within {timeout_s:.0f} s.",
                    f"Read logs/{self.name}.log, or raise engine.start_timeout_s.",
                )
            await asyncio.sleep(0.2)

    async def token_count(self) -> float:
        """Tokens read and made since the server started. Raises EngineFailed when it does not say, EngineDead when it gave up."""
        health = await self._send("GET", "/health", None, STATUS_TIMEOUT_S)
        if health.status_code != httpx.codes.OK:
            raise EngineDead(f"{self.name} says that its engine is dead (/health: {health.status_code}).")
        counts = _TOKENS.findall((await self._send("GET", "/metrics", None, STATUS_TIMEOUT_S)).text)
        if not counts:
            raise EngineFailed(f"{self.name} does not count its tokens in /metrics.")
        try:
            done = sum(map(float, counts))
        except ValueError:
            done = math.inf
        if not math.isfinite(done):
            raise EngineFailed(f"{self.name} counts its tokens in /metrics as {', '.join(counts)[:100]}.")
        return done

    async def sample(
        self, model: str, prompt_token_ids: Sequence[int], n: int, sampling: Sampling, version: int
    ) -> dict[int, Sample]:
        """Up to `n` completions of one prompt by sample index, with the sampling policy's logprobs; those that vLLM aborted are left out.

        Args:
            model: served name; an adapter's versioned name, so that the reply shows the policy version.
            version: recorded in each completion.

        Raises SyncFailed when the reply names another model, EngineFailed without a usable reply, RunFailed when the request is refused.
        """
        request = {
            "model": model,
            "prompt": list(prompt_token_ids),
            "n": n,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(sampling.stop_token_ids),
            "seed": sampling.seed,
            "logprobs": 0,
            "return_token_ids": True,
        }
        reply = await self._post("/v1/completions", request, _Sampled)
        if reply.model != model:
            raise SyncFailed(
                f"{self.name} answered as {reply.model} when asked for {model}; its completions were not used."
            )
        indices = [choice.index for choice in reply.choices]
        if len(set(indices)) != len(indices) or not set(indices) <= set(range(n)):
            raise EngineFailed(
                f"{self.name} answered with completions numbered {indices[:20]} when asked for {n}."
            )
        return {
            c.index: self._checked(c, list(prompt_token_ids), sampling, version)
            for c in reply.choices
            if isinstance(c, _Choice)
        }

    async def prompt_logprobs(self, model: str, token_ids: Sequence[int]) -> list[float]:
        """[L - 1] natural-log probabilities of tokens 1.. of the sequence, given those before."""
        request = {
            "model": model,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        rows = (await self._post("/v1/completions", request, _Prompts)).choices[0].prompt_logprobs
        found = [
            row[str(token)].logprob
            for token, row in zip(token_ids, rows, strict=False)
            if row is not None and str(token) in row
        ]
        if len(found) != len(token_ids) - 1 or len(rows) != len(token_ids):
            raise EngineFailed(
                f"{self.name} gave {len(found)} logprobs for a prompt of {len(token_ids)} tokens; all but the first have one."
            )
        return found

    async def load_adapter(self, adapter: AdapterVersion) -> None:
        """Load under the version's own name. Never in place: vLLM would re-read the disk every step and keep stale cache blocks."""
        body = {"lora_name": adapter.name, "lora_path": str(adapter.path)}
        reply = await self._send("POST", "/v1/load_lora_adapter", body, self._request_timeout_s)
        if reply.status_code != httpx.codes.OK:
            # vLLM says 500 both for an adapter it cannot use and for an engine that is dead.
            kind = SyncFailed if await self.is_ready() else EngineFailed
            raise kind(f"{self.name} refused adapter {adapter.name}: {_reason(reply)}")

    async def unload_adapter(self, name: str) -> None:
        """Forget a name no request uses any more; no error when it is not there."""
        reply = await self._send(
            "POST", "/v1/unload_lora_adapter", {"lora_name": name}, self._request_timeout_s
        )
        if reply.status_code not in (httpx.codes.OK, httpx.codes.NOT_FOUND):
            kind = EngineFailed if reply.is_server_error else SyncFailed
            raise kind(f"{self.name} could not unload adapter {name}: {_reason(reply)}")

    async def _post(self, path: str, body: dict[str, Any], form: type[Reply]) -> Reply:
        reply = await self._send("POST", path, body, self._request_timeout_s)
        if reply.status_code != httpx.codes.OK:
            kind = EngineFailed if reply.is_server_error else RunFailed
            raise kind(f"{self.name} answered {path} with {reply.status_code}: {_reason(reply)}")
        try:
            return form.model_validate_json(reply.content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part).strip("_") for part in first["loc"]) or "the whole"
            raise EngineFailed(
                f"{self.name} answered {path} with what is no reply of vLLM's: {where}: {first['msg']}."
            ) from None

    async def _send(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float
    ) -> httpx.Response:
        """The whole reply, or EngineFailed: no connection, a connection that breaks off, or no end of the reply by the deadline."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._http.request(method, path, json=body)
        except TimeoutError:
            raise EngineFailed(f"{self.name} did not answer {path} within {timeout_s:g} s.") from None
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise EngineFailed(
                f"{self.name} went away during {path}: {type(error).__name__} {error}".rstrip() + "."
            ) from None

    def _checked(
        self, choice: _Choice, prompt_token_ids: list[int], sampling: Sampling, version: int
    ) -> Sample:
        """A choice as a sample. Raises EngineFailed when it is not what was asked for."""
        tokens, logprobs = choice.token_ids, choice.logprobs.token_logprobs
        if len(tokens) != len(logprobs) or len(tokens) > sampling.max_tokens:
            raise EngineFailed(
                f"{self.name} gave a completion of {len(tokens)} tokens with {len(logprobs)} logprobs when asked for "
                f"{sampling.max_tokens} tokens at most."
            )
        return Sample(
            prompt_token_ids=prompt_token_ids,
            completion_token_ids=tokens,
            rollout_logprobs=logprobs,
            finish_reason=choice.finish_reason,
            adapter_version=version,
            text=choice.text,
        )


def _reason(reply: httpx.Response) -> str:
    """The message of vLLM's error reply, shortened."""
    try:
        body = reply.json()
    except ValueError:
        return reply.text[:400]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:400]
