"""An engine over vLLM's HTTP API, one attempt per call, and what it reads of the replies."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skylite.config.engine import Lent
from skylite.data.images import data_uri
from skylite.engine.connections import MAX_CONNECTIONS, Address, Connections
from skylite.engine.interface import BASE_NAME, Sampling
from skylite.engine.vllm.plugin.batched_outputs import MARK
from skylite.engine.vllm.plugin.sleep import SLEEP, WAKE
from skylite.errors import EngineDead, EngineFailed, RunFailed, SyncFailed
from skylite.run.run_dir import AdapterVersion
from skylite.types import Call, EncodedPrompt

REQUEST_TIMEOUT_S = 1800.0
"""Long, because a group may queue behind others on a slow engine. The watchdog detects hangs earlier."""
TURN_TIMEOUT_S = 600.0
"""To sleep or wake: as for a start, because it may copy all weights."""
GENERATE = "/inference/v1/generate"
"""vLLM's route for token ids with images."""
_TOKENS = re.compile(r"^vllm:(?:prompt|generation)_tokens_total(?:\{.*\})? (\S+)$", re.MULTILINE)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Logprobs(_Strict):
    token_logprobs: list[float]


class _Choice(_Strict):
    """A completion."""

    index: int
    text: str
    prompt_token_ids: list[int]
    token_ids: list[int] = Field(min_length=1)
    logprobs: _Logprobs
    finish_reason: Literal["stop", "length"]


class _Aborted(_Strict):
    """A completion that vLLM's engine dropped. The HTTP status is still 200."""

    index: int
    finish_reason: Literal["abort"]


class _SampleReply(_Strict):
    """The completions of one prompt."""

    model: str
    choices: list[_Choice | _Aborted]


class _ImageLogprobs(_Strict):
    content: list[_Token]


class _ImageChoice(_Strict):
    """A completion of a prompt with images."""

    index: int
    text: str
    token_ids: list[int] = Field(min_length=1)
    logprobs: _ImageLogprobs
    finish_reason: Literal["stop", "length"]


class _ImageReply(_Strict):
    model: str
    prompt_token_ids: list[int]
    choices: list[_ImageChoice | _Aborted]

    def as_completions(self) -> _SampleReply:
        """The same as a reply of /v1/completions has it."""
        return _SampleReply(
            model=self.model,
            choices=[
                choice
                if isinstance(choice, _Aborted)
                else _Choice(
                    index=choice.index,
                    text=choice.text,
                    prompt_token_ids=self.prompt_token_ids,
                    token_ids=choice.token_ids,
                    logprobs=_Logprobs(token_logprobs=[token.logprob for token in choice.logprobs.content]),
                    finish_reason=choice.finish_reason,
                )
                for choice in self.choices
            ],
        )


class _Token(_Strict):
    logprob: float


class _Scored(_Strict):
    prompt_logprobs: list[dict[str, _Token] | None]


class _ScoreReply(_Strict):
    """The logprobs of one prompt."""

    choices: list[_Scored] = Field(min_length=1)


Reply = TypeVar("Reply", bound=BaseModel)


class VllmClient:
    """Client of one vLLM server: an interface.Engine. Owns its connections; close it with `aclose`."""

    def __init__(
        self,
        name: str,
        address: Address,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        max_connections: int = MAX_CONNECTIONS,
        base_name: str = BASE_NAME,
        lends: Lent | None = None,
    ) -> None:
        """`base_name`: what the server calls the model without an adapter. `lends`: see EngineSpec."""
        self.name = name
        self._base_name, self._lends = base_name, lends
        self._request_timeout_s = request_timeout_s
        self._connections = Connections(name, address, max_connections)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._connections.aclose()

    async def is_ready(self) -> bool:
        """Whether /health answers 200."""
        try:
            return (await self._connections.send("GET", "/health")).status_code == httpx.codes.OK
        except EngineFailed:
            return False

    async def progress(self) -> float:
        """Prompt and generated tokens since the server started. vLLM answers this without its engine process.

        Raises EngineDead if the server reports that its engine is dead, EngineFailed without a usable count.
        """
        health = await self._connections.send("GET", "/health")
        if health.status_code != httpx.codes.OK:
            raise EngineDead(f"{self.name} reports that its engine is dead (/health: {health.status_code}).")
        counts = _TOKENS.findall((await self._connections.send("GET", "/metrics")).text)
        if not counts:
            raise EngineFailed(f"{self.name} does not count its tokens in /metrics.")
        try:
            total = sum(map(float, counts))
        except ValueError:
            total = math.inf
        if not math.isfinite(total):
            raise EngineFailed(
                f"{self.name} counts its tokens in /metrics as {', '.join(counts)[:100]}, "
                "which is not a finite number."
            )
        return total

    async def generate(
        self, model: str, prompt: EncodedPrompt, n: int, sampling: Sampling, version: int
    ) -> list[Call | None]:
        """[n] completions of one prompt; None for those that vLLM aborted or left out.

        Args:
            model: served name of the base or of an adapter version. The reply must name it too.
            prompt: of an image, vLLM gets one token, and must make as many of it as we did.
            version: recorded in each completion.

        Raises SyncFailed if the reply names another model, EngineFailed without a usable reply, and RunFailed
        if vLLM rejects the request.
        """
        parameters = {
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
            "stop": list(sampling.stop),
            "include_stop_str_in_output": bool(sampling.stop),
            "ignore_eos": sampling.ignore_eos,
            "seed": sampling.seed,
            "logprobs": 0,
        }
        model = self._served_name(model)
        request = {"model": model, "return_token_ids": True}
        if prompt.images:
            request |= _of_images(prompt) | {"sampling_params": parameters}
            reply = (await self._complete(request, _ImageReply, GENERATE)).as_completions()
        else:
            request |= {"prompt": list(prompt.token_ids), "vllm_xargs": {MARK: 1}} | parameters
            reply = await self._complete(request, _SampleReply)
        if reply.model != model:
            raise SyncFailed(
                f"{self.name} sampled from {reply.model} instead of {model}; its completions were discarded."
            )
        indices = [choice.index for choice in reply.choices]
        if len(set(indices)) != len(indices) or not set(indices) <= set(range(n)):
            raise EngineFailed(f"{self.name} returned completions with the indices {indices[:20]} for n={n}.")
        calls: list[Call | None] = [None] * n
        for choice in reply.choices:
            if isinstance(choice, _Choice):
                calls[choice.index] = self._to_sample(choice, prompt, sampling, version)
        return calls

    async def score(self, model: str, prompt: EncodedPrompt) -> list[float]:
        """[L - 1] logprobs in nats of all tokens of the sequence but the first."""
        token_ids = prompt.token_ids
        if prompt.images:
            parameters = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
            request = {"model": self._served_name(model), "sampling_params": parameters} | _of_images(prompt)
            rows = (await self._complete(request, _Scored, GENERATE)).prompt_logprobs
        else:
            rows = await self._prompt_logprobs(model, token_ids, 0)
        logprobs = [
            row[str(token)].logprob
            for token, row in zip(token_ids, rows, strict=False)
            if row is not None and str(token) in row
        ]
        if len(logprobs) != len(token_ids) - 1 or len(rows) != len(token_ids):
            raise EngineFailed(
                f"{self.name} returned {len(logprobs)} logprobs for a prompt of {len(token_ids)} tokens; "
                f"expected {len(token_ids) - 1}."
            )
        return logprobs

    async def top_tokens(
        self, model: str, token_ids: Sequence[int], count: int
    ) -> list[list[tuple[int, float]]]:
        """[L - 1] the `count` most likely tokens with their logprobs, the best first.

        Raises RunFailed beyond vLLM's limit of 20 (its --max-logprobs).
        """
        rows = await self._prompt_logprobs(model, token_ids, count)
        # vLLM adds the prompt's own token where it is not among them.
        top = [
            sorted(((int(token), x.logprob) for token, x in row.items()), key=lambda x: -x[1])[:count]
            for row in rows[1:]
            if row is not None
        ]
        if len(top) != len(token_ids) - 1 or any(len(row) < count for row in top):
            raise EngineFailed(f"{self.name} returned too few logprobs for a prompt.")
        return top

    async def _prompt_logprobs(
        self, model: str, token_ids: Sequence[int], count: int
    ) -> list[dict[str, _Token] | None]:
        request = {
            "model": self._served_name(model),
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": count,
        }
        return (await self._complete(request, _ScoreReply)).choices[0].prompt_logprobs

    async def load_adapter(self, adapter: AdapterVersion) -> None:
        """Load a version under its own name. Raises SyncFailed if vLLM refuses it.

        Versions never share a name: vLLM's in-place load would re-read the disk every step and keep stale
        blocks in the prefix cache.
        """
        reply = await self._adapters("load", load_request(adapter))
        if reply.status_code != httpx.codes.OK:
            # vLLM returns 500 for both an unusable adapter and a dead engine.
            kind = SyncFailed if await self.is_ready() else EngineFailed
            raise kind(f"{self.name} refused adapter {adapter.name}: {reason(reply)}")

    async def unload_adapter(self, name: str) -> None:
        """Unload a version that no request uses. No error if it is not loaded."""
        reply = await self._adapters("unload", {"lora_name": name})
        if reply.status_code not in (httpx.codes.OK, httpx.codes.NOT_FOUND):
            kind = EngineFailed if reply.is_server_error else SyncFailed
            raise kind(f"{self.name} could not unload adapter {name}: {reason(reply)}")

    async def sleep(self) -> None:
        """Give back what the spec says. vLLM drops its requests, and holds new ones back until `wake`."""
        await self._sleep_route(SLEEP, {"lends": self._lends})

    async def wake(self) -> None:
        """Take the memory again. No error if it does not sleep."""
        await self._sleep_route(WAKE)

    async def _sleep_route(self, path: str, body: dict[str, Any] | None = None) -> None:
        reply = await self._connections.send("POST", path, body, TURN_TIMEOUT_S)
        if reply.status_code != httpx.codes.OK:
            raise EngineFailed(f"{self.name} answered {path} with {reply.status_code}: {reason(reply)}")

    def _served_name(self, model: str) -> str:
        return self._base_name if model == BASE_NAME else model

    async def _adapters(self, verb: str, body: dict[str, Any]) -> httpx.Response:
        path = f"/v1/{verb}_lora_adapter"
        return await self._connections.send("POST", path, body, self._request_timeout_s)

    async def _complete(
        self, body: dict[str, Any], form: type[Reply], path: str = "/v1/completions"
    ) -> Reply:
        reply = await self._connections.send_prompt(path, body, self._request_timeout_s)
        if reply.status_code != httpx.codes.OK:
            # 404: a server that somebody restarted has lost the adapter.
            is_lost = reply.is_server_error or reply.status_code == httpx.codes.NOT_FOUND
            kind = EngineFailed if is_lost else RunFailed
            raise kind(f"{self.name} answered {path} with {reply.status_code}: {reason(reply)}")
        try:
            return form.model_validate_json(reply.content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part).strip("_") for part in first["loc"]) or "body"
            raise EngineFailed(
                f"{self.name} sent a malformed reply to {path}: {where}: {first['msg']}."
            ) from None

    def _to_sample(self, choice: _Choice, prompt: EncodedPrompt, sampling: Sampling, version: int) -> Call:
        """Convert a choice. Raises EngineFailed if its prompt or its lengths do not fit the request."""
        tokens, logprobs = choice.token_ids, choice.logprobs.token_logprobs
        if choice.prompt_token_ids != list(prompt.token_ids):
            raise EngineFailed(
                f"{self.name} sampled from another prompt than it was sent: "
                f"{_difference(choice.prompt_token_ids, prompt.token_ids)}. Its completion was discarded."
            )
        if len(tokens) != len(logprobs) or len(tokens) > sampling.max_tokens:
            raise EngineFailed(
                f"{self.name} returned a completion of {len(tokens)} tokens with {len(logprobs)} logprobs "
                f"for max_tokens={sampling.max_tokens}."
            )
        return Call(
            prompt_token_ids=choice.prompt_token_ids,
            completion_token_ids=tokens,
            sampling_logprobs=logprobs,
            finish_reason=choice.finish_reason,
            adapter_version=version,
            text=choice.text,
            images=prompt.images,
        )


def load_request(adapter: AdapterVersion) -> dict[str, Any]:
    """The body of /v1/load_lora_adapter."""
    # PEFT's form of experts: one pair of matrices for all. Says nothing about adapters without any.
    return {"lora_name": adapter.name, "lora_path": str(adapter.path), "is_3d_lora_weight": True}


def _of_images(prompt: EncodedPrompt) -> dict[str, Any]:
    """What GENERATE takes in place of a prompt: of the tokens of an image, the first."""
    inner = {i for image in prompt.images for i in range(image.start + 1, image.start + image.length)}
    return {
        "token_ids": [token for i, token in enumerate(prompt.token_ids) if i not in inner],
        "content_parts": [{"type": "image_url", "url": data_uri(image.data)} for image in prompt.images],
        "output_mode": "text",
    }


def _difference(got: Sequence[int], sent: Sequence[int]) -> str:
    """Where two prompts differ."""
    if len(got) != len(sent):
        return f"{len(got)} tokens instead of {len(sent)}"
    place = next(i for i, (a, b) in enumerate(zip(got, sent, strict=True)) if a != b)
    return f"token {place} is {got[place]} instead of {sent[place]}"


def reason(reply: httpx.Response) -> str:
    """The message in vLLM's error reply, shortened."""
    try:
        body = reply.json()
    except ValueError:
        return reply.text[:400]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:400]
