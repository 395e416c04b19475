"""What does a sampled token cost vLLM's API process, with logprobs, as stock and in skylite's batches?

    python benchmarks/api_process.py --tokenizer FOLDER --out benchmarks/results/api_process_cpu.json

A made-up engine core feeds vLLM's own message coder, output processor and completions reply: 32 prompts x 8
completions, a step each STEP_S seconds of made-up time. Texts, token ids and logprobs of both forms are
compared. Reports CPU microseconds a token: in the engine core (hold, encode) and in the API process (decode,
process, reply).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
from shared import argument_parser, machine_info
from transformers import AutoTokenizer
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import IterationStats, PrefillStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from skylite.engine.vllm.plugin import batched_outputs
from skylite.run.files import write_json

PROMPTS, COMPLETIONS, PROMPT_TOKENS = 32, 8, 200
STEP_S = 0.008
"""Of 256 sequences at 32,000 tokens per second."""
IN_CORE, IN_API = ("hold", "encode"), ("decode", "process", "reply")
T = TypeVar("T")


class Queue(list[Any]):
    """Where the output processor puts a request's outputs."""

    put = list.append


class Clock:
    """CPU seconds of each part."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((*IN_CORE, *IN_API), 0.0)

    def __call__(self, part: str, work: Callable[[], T]) -> T:
        started = time.process_time()
        result = work()
        self.seconds[part] += time.process_time() - started
        return result


def main() -> None:
    args = parse_arguments()
    batched_outputs.install(api_process=True)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    rounds: list[dict[str, Any]] = []
    plain: list[Any] = []
    batched: list[Any] = []
    for _ in range(args.rounds):
        for batches, results in ((False, plain), (True, batched)):
            seconds, choices = feed(tokenizer, args.tokens, batches)
            results.append(choices)
            rounds.append({"batched": batches} | microseconds(seconds, args.tokens))
            print(json.dumps(rounds[-1]), flush=True)
    costs = {name: medians(rounds, name == "batched") for name in ("plain", "batched")}
    result = {"equal": plain == batched, "us_per_token": costs, **machine_info(), "rounds": rounds}
    print(json.dumps({key: result[key] for key in ("equal", "us_per_token")}, indent=1))
    if args.out:
        write_json(args.out, result)


def medians(rounds: list[dict[str, Any]], batches: bool) -> dict[str, float]:
    """Of each part, over the rounds of one form."""
    rows = [row for row in rounds if row["batched"] is batches]
    return {part: statistics.median(row[part] for row in rows) for part in rows[0] if part != "batched"}


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a model's tokenizer")
    parser.add_argument("--tokens", type=int, default=256, help="of each completion")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def feed(tokenizer: Any, tokens: int, batches: bool) -> tuple[dict[str, float], list[Any]]:
    """Sample all completions in the made-up core. Returns seconds of each part, and the replies' choices."""
    clock, processor = Clock(), OutputProcessor(tokenizer, log_stats=True)
    queues, requests = [Queue() for _ in range(PROMPTS)], dict[str, Any]()
    for index, queue in enumerate(queues):
        requests |= add_prompt(processor, index, queue, tokens, batches)
    encoder, decoder, held = (
        MsgpackEncoder(),
        MsgpackDecoder(EngineCoreOutputs),
        batched_outputs.HeldOutputs(),
    )
    text = np.array(tokenizer.encode(Path(__file__).read_text(encoding="utf-8")), dtype=np.int32)
    rng = np.random.default_rng(0)
    for step in range(tokens):
        outputs = sampled(step, tokens, list(requests), text, rng)
        if batches:
            outputs = clock("hold", lambda: held.exchange(outputs, requests, step * STEP_S))  # noqa: B023
        message = clock("encode", lambda: encoder.encode(EngineCoreOutputs(outputs=outputs)))  # noqa: B023
        received = clock("decode", lambda: decoder.decode(message)).outputs  # noqa: B023
        clock("process", lambda: processor.process_outputs(received, time.monotonic(), IterationStats()))  # noqa: B023
    bodies = [clock("reply", lambda: reply(queue[-1], tokens, tokenizer)) for queue in queues]  # noqa: B023
    return clock.seconds, [choices_of(body) for body in bodies]


def add_prompt(processor: Any, index: int, queue: Queue, tokens: int, batches: bool) -> dict[str, Any]:
    """Tell the output processor of a prompt's completions. Returns them as the scheduler knows them."""
    params = SamplingParams(
        n=COMPLETIONS,
        max_tokens=tokens,
        logprobs=0,
        seed=1,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={batched_outputs.MARK: 1} if batches else None,
    )
    name, prompt = f"request-{index}", list(range(100, 100 + PROMPT_TOKENS))
    parent = ParentRequest(SimpleNamespace(request_id=name, external_req_id=name, params=params))
    requests = {}
    for child in range(COMPLETIONS):
        child_id, child_params = parent.get_child_info(child)
        request = EngineCoreRequest(
            child_id, prompt, None, child_params, None, time.time(), None, None, None, external_req_id=name
        )
        processor.add_request(request, None, parent, child, queue)
        requests[child_id] = SimpleNamespace(sampling_params=child_params)
    return requests


def sampled(step: int, tokens: int, names: list[str], text: Any, rng: Any) -> list[Any]:
    """A step's outputs of the scheduler: a token of some text for each request, and a random logprob."""
    places = (np.arange(len(names)) * 37 + step) % len(text)
    logprobs = LogprobsLists(
        text[places][:, None],
        -rng.random((len(names), 1), dtype=np.float32),
        np.ones(len(names), dtype=np.int32),
    )
    finish = FinishReason.LENGTH if step + 1 == tokens else None
    first = PrefillStats() if step == 0 else None
    return [
        EngineCoreOutput(
            name,
            [int(text[place])],
            new_logprobs=logprobs.slice_request(row, 1),
            finish_reason=finish,
            prefill_stats=first,
        )
        for row, (name, place) in enumerate(zip(names, places, strict=True))
    ]


def reply(output: Any, tokens: int, tokenizer: Any) -> str:
    """The body that the server sends for a prompt."""
    serving = OpenAIServingCompletion.__new__(OpenAIServingCompletion)
    serving.return_tokens_as_token_ids = serving.enable_prompt_tokens_details = False
    serving.enable_force_include_usage = serving.enable_per_request_metrics = False
    serving.system_fingerprint = None
    request = CompletionRequest(
        model="m", prompt=[1], n=COMPLETIONS, max_tokens=tokens, logprobs=0, return_token_ids=True
    )
    made = serving.request_output_to_completion_response(
        [output], request, "id", 0, "m", tokenizer, SimpleNamespace(final_usage_info=None)
    )
    return json.dumps(made.model_dump(), ensure_ascii=False, separators=(",", ":"))


def choices_of(body: str) -> list[Any]:
    """What skylite reads of a reply."""
    read = ("index", "text", "token_ids", "prompt_token_ids", "finish_reason", "stop_reason")
    return [
        [choice["logprobs"]["token_logprobs"], *(choice[key] for key in read)]
        for choice in json.loads(body)["choices"]
    ]


def microseconds(seconds: dict[str, float], tokens: int) -> dict[str, float]:
    """Per sampled token: each part, and the sums of both processes."""
    count = PROMPTS * COMPLETIONS * tokens
    sums = {"core": sum(seconds[part] for part in IN_CORE), "api": sum(seconds[part] for part in IN_API)}
    return {part: round(1e6 * value / count, 2) for part, value in (seconds | sums).items()}


if __name__ == "__main__":
    main()
