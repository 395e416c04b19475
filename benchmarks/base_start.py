"""Does compiling pay for a vLLM CPU server without adapters? Two servers, one compiled, sample in turns.

    python benchmarks/base_start.py --out benchmarks/results/base_start_cpu.json
    python benchmarks/base_start.py --dtype bfloat16

SmolLM2-135M, 4 prompts x 8 completions of 128 tokens a round. The servers start one after the other, with an
empty cache of compiled code. `ratio` is compiled / eager of the medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import lora_sampling
from command_line import argument_parser
from machine_info import machine_info

from skylite.engine.vllm.server_command import BASE_NAME, engine_command, engine_env
from skylite.hub.resolve import resolve_model
from skylite.processes.child import ProcessSpec, child_died, kill, poll, start
from skylite.run.files import write_json

EAGER = "--enforce-eager"
MODEL, NUM_PROMPTS, GROUP_SIZE, PROMPT_TOKENS, MAX_TOKENS = "smollm2-135m", 4, 8, 106, 128


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = {"dtype": args.dtype, "rounds": args.rounds, **measure(args), **machine_info()}
    print(json.dumps(result, indent=1))
    if args.out:
        write_json(args.out, result)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds until ready, and tokens per second of all rounds."""
    rates: dict[str, list[float]] = {"compiled": [], "eager": []}
    ready: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder, ExitStack() as stack:
        servers = {}
        for name in rates:
            began = time.perf_counter()
            servers[name] = stack.enter_context(running(name, args.dtype, Path(folder)))
            ready[name] = round(time.perf_counter() - began, 1)
            sample(servers[name], random_prompts())  # not counted
        for _ in range(args.rounds):
            for name, http in servers.items():
                rates[name].append(round(sample(http, random_prompts()), 1))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "ready_s": ready | {"ratio": round(ready["compiled"] / ready["eager"], 2)},
        "tokens_per_s": medians | {"ratio": round(medians["compiled"] / medians["eager"], 3)},
        "rates": rates,
    }


@contextmanager
def running(name: str, dtype: str, folder: Path) -> Iterator[httpx.Client]:
    """skylite's server without adapters; "compiled" leaves out the flag that forbids compiling."""
    args = argparse.Namespace(model=resolve_model(MODEL).path, dtype=dtype, rank=8)
    lora = lora_sampling.engine_spec(lora_sampling.Variant(name), args, folder)
    spec = dataclasses.replace(lora, enable_lora=False)
    argv = [word for word in engine_command(spec) if word != EAGER or name != "compiled"]
    env = engine_env(spec, {}) | {"VLLM_CACHE_ROOT": str(folder / f"{name}-cache")}
    child = start(ProcessSpec(name=name, argv=argv, env=env, log_path=folder / f"{name}.log"))
    transport = httpx.HTTPTransport(uds=str(spec.uds))
    try:
        with httpx.Client(transport=transport, base_url="http://engine", timeout=1800.0) as http:
            while not lora_sampling.is_ready(http):
                if poll(child) is not None:
                    raise SystemExit(f"{child_died(child)}\n{child_died(child).log_tail}")
                time.sleep(0.2)
            yield http
    finally:
        kill(child)


def random_prompts() -> list[list[int]]:
    return [[random.randrange(100, 20000) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]


def sample(http: httpx.Client, prompts: list[list[int]]) -> float:
    """Completion tokens per second of a step: all groups at once."""
    body = {"model": BASE_NAME, "prompt": prompts, "n": GROUP_SIZE, "max_tokens": MAX_TOKENS}
    body |= {"temperature": 1.0, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    started = time.perf_counter()
    reply = http.post("/v1/completions", json=body).raise_for_status().json()
    return sum(len(c["token_ids"]) for c in reply["choices"]) / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
