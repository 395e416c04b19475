"""Sampled tokens and their logprobs leave vLLM's engine in batches, and its API process stores floats.

Stock vLLM sends every token as soon as it is sampled. With logprobs each costs the API process three numpy
arrays to decode, a dictionary, a decoded string and its part of the reply. That is 40 to 75 us of Python: a
small model on a GPU waits for it. Here the scheduler holds the tokens of a request until it ends, for at most
HOLD_S, which is how often the watchdog sees progress. The API process appends a batch of logprobs in one go.

Only requests with MARK in `vllm_xargs` change, and only if nothing needs their tokens sooner: they are not
streamed, have no stop strings, and ask for the logprobs of the sampled tokens alone. Their completions are
equal, but the reply's `logprobs` has `token_logprobs` only.

Buys time: see benchmarks/api_process.py.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MARK = "skylite_batched"
SWITCH = "SKYLITE_BATCHED_OUTPUTS"
"""Environment variable, "1" in servers of runs. A public server answers as stock vLLM does."""
TESTED = ("0.26.", "0.32.")
"""vLLM versions whose scheduler, logprobs and replies this is tested with."""
HOLD_S = 0.5
"""Longest time that a sampled token waits in the scheduler."""
LEAST_LOGPROB = -9999.0
"""vLLM's stand-in for -inf, which JSON does not have."""


class SampledLogprobs(list[float]):
    """Logprobs of the sampled tokens, in place of vLLM's dictionary for each."""


class HeldOutputs:
    """The outputs for one API process that its scheduler has not sent yet."""

    def __init__(self) -> None:
        self._held: dict[str, list[Any]] = {}
        self._sent = 0.0

    def exchange(self, outputs: Sequence[Any], requests: Mapping[str, Any], now: float) -> list[Any]:
        """Take a step's outputs and return those to send, each request's tokens in order.

        Args:
            outputs: vLLM's EngineCoreOutput.
            requests: the scheduler's unfinished requests by id.
            now: monotonic seconds.
        """
        ready = []
        for output in outputs:
            held = self._held.get(output.request_id)
            if held is None:
                ready.append(output)
                request = requests.get(output.request_id)
                if (
                    output.finish_reason is None
                    and request is not None
                    and is_marked(request.sampling_params)
                ):
                    self._held[output.request_id] = []
                continue
            held.append(output)
            if output.finish_reason is None and output.events is None and output.prefill_stats is None:
                continue
            ready.append(joined(held))
            held.clear()
            if output.finish_reason is not None:
                del self._held[output.request_id]
        if now - self._sent >= HOLD_S:
            ready += [joined(held) for held in self._held.values() if held]
            # Without the requests that a client aborted.
            self._held = {request_id: [] for request_id in self._held if request_id in requests}
            self._sent = now
        return ready


def is_marked(params: Any) -> bool:
    """Whether a request with these SamplingParams takes its outputs in batches."""
    return (
        params is not None
        and MARK in (params.extra_args or ())
        and params.output_kind.name == "FINAL_ONLY"
        and params.logprobs == 0
        and params.prompt_logprobs is None
        and not params.stop
    )


def joined(outputs: list[Any]) -> Any:
    """One output for several of a request: the last one, with the tokens of all."""
    last = outputs[-1]
    if len(outputs) > 1:
        last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
        parts = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
        if parts:
            # [n, 1]. Token ids and ranks stay those of the last part: _install_readers does not read them.
            last.new_logprobs = parts[-1]._replace(logprobs=np.concatenate([part.logprobs for part in parts]))
    return last


def untested(version: str | None) -> str:
    """Why this vLLM keeps its own way, for a message; empty if it is tested or unknown."""
    if version is None or version.startswith(TESTED):
        return ""
    return (
        f"vLLM {version} sends every sampled token by itself: skylite's batches are tested with "
        f"{' and '.join(f'{release}x' for release in TESTED)}. Small models sample slower on GPUs."
    )


def install(*, api_process: bool) -> None:
    """Change vLLM's scheduler and, in its API process, what reads its outputs. Safe to call again."""
    from vllm.v1.core.sched.scheduler import Scheduler

    if hasattr(Scheduler, "_skylite_update"):
        return
    Scheduler._skylite_update = Scheduler.update_from_output
    Scheduler.update_from_output = _update_from_output
    if api_process:
        _install_readers()


def _update_from_output(scheduler: Any, *step: Any) -> dict[int, Any]:
    """Scheduler.update_from_output: one EngineCoreOutputs for each API process."""
    by_client: dict[int, Any] = scheduler._skylite_update(*step)
    now = time.monotonic()
    held = scheduler.__dict__.setdefault("_skylite_held", defaultdict(HeldOutputs))
    for client, outputs in by_client.items():
        outputs.outputs = held[client].exchange(outputs.outputs, scheduler.requests, now)
    return by_client


def _install_readers() -> None:
    from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.v1.engine.logprobs import LogprobsProcessor

    stock_processor = LogprobsProcessor.from_new_request
    stock_update = LogprobsProcessor._update_sample_logprobs
    stock_reply = OpenAIServingCompletion._create_completion_logprobs

    def from_new_request(cls: Any, tokenizer: Any, request: Any) -> Any:
        processor = stock_processor(tokenizer=tokenizer, request=request)
        if is_marked(request.sampling_params):
            processor.logprobs = SampledLogprobs()
        return processor

    def update(processor: Any, logprobs: Any) -> None:
        if isinstance(processor.logprobs, SampledLogprobs):
            processor.logprobs += logprobs[1][:, 0].tolist()
        else:
            stock_update(processor, logprobs)

    def reply(serving: Any, *args: Any, top_logprobs: Any, **kwargs: Any) -> Any:
        if isinstance(top_logprobs, SampledLogprobs):
            return CompletionLogProbs(token_logprobs=[max(value, LEAST_LOGPROB) for value in top_logprobs])
        return stock_reply(serving, *args, top_logprobs=top_logprobs, **kwargs)

    LogprobsProcessor.from_new_request = classmethod(from_new_request)
    LogprobsProcessor._update_sample_logprobs = update
    OpenAIServingCompletion._create_completion_logprobs = reply
