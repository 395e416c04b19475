"""vLLM over HTTP on a Unix socket: the only file that knows its requests and replies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from skylite.errors import RunFailed, SyncFailed
from skylite.run.run_dir import AdapterVersion
from skylite.types import Completion

REQUEST_TIMEOUT_S = 1800.0
"""A whole group may queue behind others on a slow engine; a dead engine is noticed by its process, not by this."""


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
    """One engine. Owns its connections; close it with `aclose`."""

    def __init__(self, name: str, socket_path: Path) -> None:
        self.name = name
        transport = httpx.AsyncHTTPTransport(uds=str(socket_path), limits=httpx.Limits(max_connections=None))
        self._http = httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=REQUEST_TIMEOUT_S)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def is_ready(self) -> bool:
        """Whether /health answers 200."""
        try:
            reply = await self._http.get("/health", timeout=5.0)
        except httpx.TransportError:
            return False
        return reply.status_code == httpx.codes.OK

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when the engine serves; raises RunFailed after `timeout_s`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not await self.is_ready():
            if asyncio.get_running_loop().time() > deadline:
                raise RunFailed(
                    f"{self.name} did not serve within {timeout_s:.0f} s.", f"Read logs/{self.name}.log, or raise engine.start_timeout_s."
                )
            await asyncio.sleep(0.2)

    async def generate(self, model: str, prompt_token_ids: Sequence[int], n: int, sampling: Sampling, version: int) -> list[Completion]:
        """`n` completions of one prompt, with the sampling policy's logprobs.

        Args:
            model: served name; an adapter's versioned name, so that the reply proves the policy version.
            version: recorded in each completion.

        Raises SyncFailed when the reply names another model, RunFailed on any HTTP error.
        """
        reply = await self._post(
            "/v1/completions",
            {
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
            },
        )
        if reply["model"] != model:
            raise SyncFailed(f"{self.name} answered as {reply['model']} when asked for {model}; its completions were not used.")
        return [_completion(choice, version) for choice in sorted(reply["choices"], key=lambda c: int(c["index"]))]

    async def prompt_logprobs(self, model: str, token_ids: Sequence[int]) -> list[float]:
        """[L - 1] natural-log probabilities of tokens 1.. of the sequence, given those before."""
        request = {"model": model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        rows = (await self._post("/v1/completions", request))["choices"][0]["prompt_logprobs"]
        return [float(row[str(token)]["logprob"]) for token, row in zip(token_ids[1:], rows[1:], strict=True)]

    async def load_adapter(self, adapter: AdapterVersion) -> None:
        """Load under the version's own name. Never in place: vLLM would re-read the disk every step and keep stale cache blocks."""
        reply = await self._http.post("/v1/load_lora_adapter", json={"lora_name": adapter.name, "lora_path": str(adapter.path)})
        if reply.status_code != httpx.codes.OK:
            raise SyncFailed(f"{self.name} refused adapter {adapter.name}: {_reason(reply)}")

    async def unload_adapter(self, name: str) -> None:
        """Forget a name no request uses any more."""
        reply = await self._http.post("/v1/unload_lora_adapter", json={"lora_name": name})
        if reply.status_code != httpx.codes.OK:
            raise SyncFailed(f"{self.name} could not unload adapter {name}: {_reason(reply)}")

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            reply = await self._http.post(path, json=body)
        except httpx.TransportError as error:
            raise RunFailed(f"{self.name} went away during {path}: {type(error).__name__} {error}") from error
        if reply.status_code != httpx.codes.OK:
            raise RunFailed(f"{self.name} answered {path} with {reply.status_code}: {_reason(reply)}")
        value: dict[str, Any] = reply.json()
        return value


def _completion(choice: dict[str, Any], version: int) -> Completion:
    if choice["finish_reason"] not in ("stop", "length"):
        raise RunFailed(f"vLLM ended a completion with finish_reason={choice['finish_reason']!r}; expected stop or length.")
    return Completion(
        token_ids=choice["token_ids"],
        logprobs=choice["logprobs"]["token_logprobs"],
        text=choice["text"],
        finish_reason=choice["finish_reason"],
        adapter_version=version,
    )


def _reason(reply: httpx.Response) -> str:
    """The message of vLLM's error reply, shortened."""
    try:
        body = reply.json()
    except ValueError:
        return reply.text[:400]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:400]
