"""A teacher on a server: it scores the sampled tokens, and the rollout file keeps its logprobs.

So a replay or a resumed run does not ask it again for the same step.

Consumes: a step's groups. Waits for: the server. Produces: calls with the teacher's logprobs.
Unblocks: the step's rollout file.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from skylite.config.algorithm import AlgorithmConfig
from skylite.data.chat_tokenizer import ChatTokenizer
from skylite.engine.connections import Address, api_key
from skylite.engine.interface import BASE_NAME
from skylite.engine.same_tokenizer import tokenizer_difference
from skylite.engine.start_engines import TeacherEngine
from skylite.environments.patient_client import Patience, PatientClient
from skylite.environments.source import gather_or_cancel
from skylite.errors import ConfigError, RunFailed
from skylite.progress_reporting import long_work
from skylite.types import Call, Group, Trajectory
from skylite.untrusted_text import plain

MAX_CONCURRENT = 64
"""Completions that are scored at once."""
TIMEOUT_S = 1800.0
"""For one completion: it may queue behind others on a slow server."""
PATIENCE_S = 300.0
"""How long a request is repeated. After that the run ends; --resume continues it."""
LEAST_LOGPROB = -1000.0
"""Less is vLLM's stand-in for minus infinity, -9999."""
ROUNDING = 1e-3
"""A logprob is at most this."""


class Scores(NamedTuple):
    """What the teacher says of C tokens, in nats."""

    logprobs: list[float]
    """[C]"""
    top_ids: array[int]
    """[C * K] its most likely tokens in their places, the best first."""
    top_logprobs: array[float]


class TeacherServer:
    """An OpenAI-compatible server that gives the logprobs of prompts, as vLLM does."""

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        patience_s: float = PATIENCE_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        engine: TeacherEngine | None = None,
    ) -> None:
        """`engine`: the one that the run started for it; None: it is at a URL. `sleep`: tests replace it.

        Raises ConfigError if the variable with the key is not set.
        """
        self._shows_more, self.model = algorithm.shows_teacher_more, algorithm.teacher_model
        self._top_k = algorithm.teacher_top_k
        if engine is not None:
            self.model, self.name = BASE_NAME, f"teacher {algorithm.own_teacher}"
            address, how = engine.spec.address, _patience_with(engine, self.name, patience_s)
        else:
            url = algorithm.teacher_url
            assert url is not None, "the caller checks this"
            self.name = f"teacher {self.model} at {url}" if self.model else f"teacher at {url}"
            key = api_key("algorithm.teacher_key_env", algorithm.teacher_key_env, self.name)
            address, how = Address.parse(url, key), _patience_at_url(self.name, self._top_k, patience_s)
        self._client = PatientClient(address, how, sleep)

    async def aclose(self) -> None:
        await self._client.aclose()

    async def taught(self, groups: Sequence[Group]) -> tuple[list[Group], dict[str, float]]:
        """The groups of a step with the teacher's logprobs, and metrics.

        Raises RunFailed if the teacher gives none for long, or no logprobs.
        """
        started = time.monotonic()
        calls = [call for group in groups for t in group.trajectories for call in t.calls]
        shown = [call for call in calls if call.teacher_prompt_token_ids or not self._shows_more]
        with long_work("asking the teacher", len(shown)) as work:

            async def one(call: Call) -> Call:
                prompt = call.teacher_prompt_token_ids or call.prompt_token_ids
                found = await self.score([*prompt, *call.completion_token_ids], len(prompt))
                work.advance()
                return replace(
                    call,
                    teacher_logprobs=found.logprobs,
                    teacher_top_ids=found.top_ids,
                    teacher_top_logprobs=found.top_logprobs,
                )

            scored = await gather_or_cancel([asyncio.create_task(one(call)) for call in shown])
        by_id = {id(call): new for call, new in zip(shown, scored, strict=True)}

        def with_scores(trajectory: Trajectory) -> Trajectory:
            return replace(trajectory, calls=tuple(by_id.get(id(call), call) for call in trajectory.calls))

        taught = [replace(g, trajectories=tuple(map(with_scores, g.trajectories))) for g in groups]
        seconds = time.monotonic() - started
        repeated = float(self._client.take_repeated())
        return taught, {"time/teacher_server_s": seconds, "teacher/repeated": repeated}

    async def score(self, token_ids: Sequence[int], first: int) -> Scores:
        """Of the tokens from place `first` on, which is at least 1. Raises RunFailed."""

        def read(reply: Any) -> Scores:
            rows = reply["choices"][0].get("prompt_logprobs")
            if rows is None:
                raise RunFailed(
                    f"The {self.name} gives no logprobs of prompts (prompt_logprobs in /v1/completions).",
                    "Serve the teacher with vLLM: `vllm serve MODEL`, or `skylite serve` for an adapter.",
                )
            if len(rows) != len(token_ids):
                raise ValueError("another prompt")
            scores = Scores([], array("i"), array("f"))
            for row, token in zip(rows[first:], token_ids[first:], strict=True):
                scores.logprobs.append(self._checked(token, row[str(token)]["logprob"]))
                ids, logprobs = self._best(row) if self._top_k else ([], [])
                scores.top_ids.extend(ids)
                scores.top_logprobs.extend(logprobs)
            return scores

        body = {
            "model": self.model,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": self._top_k,
        }
        return await self._client.ask("v1/completions", body, read, "logprobs of all tokens of the prompt")

    def _best(self, row: dict[str, Any]) -> tuple[list[int], list[float]]:
        """The most likely tokens and their logprobs. The server adds the sampled token to them."""
        if len(row) < self._top_k:
            raise RunFailed(
                f"The {self.name} gives the logprobs of {len(row)} tokens, fewer than "
                f"algorithm.teacher_top_k={self._top_k}.",
                "Serve the teacher with vLLM, or lower algorithm.teacher_top_k.",
            )
        found = ((self._checked(int(token), entry["logprob"]), int(token)) for token, entry in row.items())
        best = sorted(found, key=lambda x: (-x[0], x[1]))[: self._top_k]
        return [token for _, token in best], [logprob for logprob, _ in best]

    def _checked(self, token: int, logprob: Any) -> float:
        if not isinstance(logprob, int | float) or not LEAST_LOGPROB < logprob < ROUNDING:
            raise RunFailed(
                f"The {self.name} gives token {token} the logprob {logprob}, which is none: its vocabulary "
                "lacks the token, or its --logprobs-mode is not one of logprobs.",
                "Serve a model with the same vocabulary, without that flag.",
            )
        return float(logprob)

    # Before a run

    async def choose_model(self) -> int:
        """Set `model` to the only one, if algorithm.teacher_model names none.

        Returns the tokens of its longest sequence; 0: unknown. Raises RunFailed or ConfigError.
        """
        wanted = self.model

        def read(reply: Any) -> dict[str, int]:
            return {str(model["id"]): int(model.get("max_model_len") or 0) for model in reply["data"]}

        models = await self._client.ask("v1/models", None, read, "list of models")
        name = wanted or (next(iter(models)) if len(models) == 1 else "")
        if name not in models:
            listed = ", ".join(map(plain, models)) or "no model"
            what = f", and not {wanted}" if wanted else ""
            raise ConfigError(
                f"The {self.name} serves {listed}{what}.", "Choose one with algorithm.teacher_model."
            )
        self.model = name
        return models[name]

    async def check_tokenizer(self, tokenizer: ChatTokenizer) -> None:
        """Raise ConfigError unless texts, special tokens and all token ids mean the same to the teacher."""

        async def ask(route: str, body: Mapping[str, Any], field: str) -> Any:
            return await self._client.ask(
                route, {"model": self.model, **body}, lambda reply: reply[field], f"reply of /{route}"
            )

        if how := await tokenizer_difference(ask, tokenizer):
            raise ConfigError(
                f"The {self.name} has another tokenizer than {tokenizer.model_path.name}: it {how}. A "
                "teacher scores the policy's own tokens.",
                "Serve a model of the same family (for Mistral's with --tokenizer-mode hf), or learn from "
                "its texts with algorithm.name=sft.",
            )


def _patience_at_url(name: str, top_k: int, patience_s: float) -> Patience:
    """Of a teacher that somebody else serves."""
    logprobs = (
        f", and give {top_k} logprobs (--max-logprobs, 20 by default, or lower algorithm.teacher_top_k)"
        if top_k
        else ""
    )
    return Patience(
        name=name,
        max_concurrent=MAX_CONCURRENT,
        timeout_s=TIMEOUT_S,
        patience_s=patience_s,
        if_silent="Start it again, and continue with --resume; at another address with --set "
        "algorithm.teacher=URL.",
        if_refused="Correct algorithm.teacher, teacher_model or teacher_key_env. The server must be vLLM's "
        f"(`vllm serve MODEL` or `skylite serve`){logprobs}.",
    )


def _patience_with(engine: TeacherEngine, name: str, patience_s: float) -> Patience:
    """Of a teacher on the run's own engine, which may start again meanwhile."""
    log = f"Its log is {engine.log}."
    return Patience(
        name=name,
        max_concurrent=MAX_CONCURRENT,
        timeout_s=TIMEOUT_S,
        patience_s=patience_s + engine.start_timeout_s,
        if_silent=f"{log} --resume continues the run.",
        if_refused=log,
        while_asked=engine.engine.asked,
    )


@contextlib.asynccontextmanager
async def teacher_running(
    algorithm: AlgorithmConfig, tokenizer: ChatTokenizer, *, is_new: bool, engine: TeacherEngine | None = None
) -> AsyncIterator[TeacherServer | None]:
    """The teacher of the settings, if it scores over HTTP. Raises ConfigError without its key.

    Args:
        is_new: the run is not resumed, so the plan has just checked the server.
        engine: the one that the run started for it. Its files are checked.
    """
    if not algorithm.has_teacher_server:
        yield None
        return
    server = TeacherServer(algorithm, engine=engine)
    try:
        if not is_new and engine is None:
            await server.choose_model()
            await server.check_tokenizer(tokenizer)
        yield server
    finally:
        await server.aclose()
