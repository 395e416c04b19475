"""Published adapters: which of them the engines have loaded, and what is sampled from them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from skylite.engine.engine_pool import EnginePool
from skylite.engine.interface import BASE_NAME, Sampling
from skylite.errors import EngineFailed, SkyliteError
from skylite.processes.file_tree import remove_tree
from skylite.run.run_dir import AdapterVersion, adapter_name
from skylite.service.errors import Rejected
from skylite.service.requests import SampleRequest
from skylite.service.wire import Sample, write_samples
from skylite.types import EncodedPrompt

MOST_LOADED = 16
"""Adapters that the engines know by name. The one that was not used for longest makes room."""


@dataclass(slots=True)
class Samplers:
    """The engines, and the adapters that they have loaded."""

    pool: EnginePool
    folder: Path
    """Of the published adapters."""
    max_tokens: int
    """Of a prompt with its completion."""
    vocabulary: int
    _uses: dict[int, int] = field(default_factory=dict)
    """Loaded version -> requests that use it now; those used last stand at the end."""
    _loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def sample(self, version: int | None, request: SampleRequest) -> bytes:
        """Completions of a prompt, by an adapter version or the base. Raises Rejected."""
        prompt, sampling = self._checked(request)
        engine = min(self.pool.engines, key=lambda e: e.in_flight)
        try:
            async with self._using(version) as model:
                calls = await engine.generate(
                    model, EncodedPrompt(prompt), request.num_samples, sampling, version or 0
                )
                # Of both, the first place has no context.
                scores, top = None, None
                if request.prompt_logprobs:
                    scores = [float("nan")]
                    if len(prompt) > 1:
                        scores += await engine.score(model, EncodedPrompt(prompt))
                if width := request.topk_prompt_logprobs:
                    top = [list[tuple[int, float]]()]
                    if len(prompt) > 1:
                        top += await engine.top_tokens(model, prompt, width)
        except EngineFailed as error:
            raise Rejected(error.what, 500) from None
        except SkyliteError as error:
            raise Rejected(str(error)) from None
        hidden = len(prompt) - (request.prompt_logprobs_last_n or len(prompt))
        if scores is not None:
            scores[:hidden] = [float("nan")] * hidden
        if top is not None:
            top[:hidden] = [[] for _ in range(hidden)]
        samples = [
            Sample(
                token_ids=call.completion_token_ids,
                logprobs=call.sampling_logprobs,
                is_stopped=call.finish_reason == "stop",
            )
            for call in calls
        ]
        return write_samples(samples, scores, top, width)

    async def forget(self, version: int) -> bool:
        """Delete a version, unless a request uses it. Returns whether it is gone."""
        async with self._loading:
            if self._uses.get(version, 0):
                return False
            await self._unload(version)
            return await asyncio.to_thread(remove_tree, self._adapter(version).path) is None

    def _checked(self, request: SampleRequest) -> tuple[list[int], Sampling]:
        """Raises Rejected."""
        if any(chunk.type != "encoded_text" for chunk in request.prompt.chunks):
            raise Rejected("The prompt has an image or audio chunk. This service samples from text alone.")
        prompt, params = [token for c in request.prompt.chunks for token in c.tokens], request.sampling_params
        room = self.max_tokens - len(prompt)
        if not prompt or room < 1 or max(prompt) >= self.vocabulary:
            raise Rejected(
                f"The prompt has {len(prompt):,} tokens. Between 1 and {self.max_tokens - 1:,} are allowed, "
                f"with ids below {self.vocabulary}."
            )
        if params.max_tokens is not None and params.max_tokens > room:
            raise Rejected(
                f"max_tokens={params.max_tokens} with a prompt of {len(prompt):,} tokens is more than "
                f"the {self.max_tokens:,} tokens of this service's sequences."
            )
        if request.prompt_logprobs_last_n is not None and not (
            request.prompt_logprobs and request.prompt_logprobs_last_n < len(prompt)
        ):
            raise Rejected("prompt_logprobs_last_n needs prompt_logprobs, and a longer prompt.")
        stop = params.stop if isinstance(params.stop, list) else [params.stop] if params.stop else []
        if any(text == "" for text in stop):
            raise Rejected("A stop text is empty.")
        return prompt, Sampling(
            temperature=params.temperature,
            top_p=params.top_p if params.temperature else 1.0,
            top_k=max(0, params.top_k) if params.temperature else 0,
            max_tokens=params.max_tokens or room,
            stop_token_ids=tuple(token for token in stop if isinstance(token, int)),
            stop=tuple(text for text in stop if isinstance(text, str)),
            ignore_eos=params.stop == [],
            seed=secrets.randbelow(2**31) if params.seed is None else params.seed % 2**31,
        )

    @asynccontextmanager
    async def _using(self, version: int | None) -> AsyncIterator[str]:
        """The name of the model in the engines, which have loaded and verified it."""
        if version is None:
            yield BASE_NAME
            return
        async with self._loading:
            if version not in self._uses:
                await self._load(version)
            self._uses[version] = self._uses.pop(version) + 1
        try:
            yield adapter_name(version)
        finally:
            self._uses[version] -= 1

    async def _load(self, version: int) -> None:
        adapter = self._adapter(version)
        if not adapter.path.is_dir():
            raise Rejected("These weights are gone: only the newest unnamed ones of a policy are kept.", 410)
        idle = [v for v, count in self._uses.items() if not count]
        if len(self._uses) >= MOST_LOADED and idle:
            await self._unload(idle[0])
        await self.pool.load(adapter)
        await self.pool.verify(adapter)
        self._uses[version] = 0

    async def _unload(self, version: int) -> None:
        if version in self._uses:
            del self._uses[version]
            await self.pool.unload(self._adapter(version))

    def _adapter(self, version: int) -> AdapterVersion:
        return AdapterVersion(version, self.folder / adapter_name(version))
