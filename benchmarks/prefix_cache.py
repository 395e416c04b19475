"""How much of a conversation's history does vLLM find in its prefix cache? Real calls with an adapter.

    python benchmarks/prefix_cache.py --out benchmarks/results/prefix_cache_cpu.json

--groups prompts, --trajectories conversations of each, all at once. Each turn samples --sampled tokens and
reads --observed random ones. Of the prompt tokens that vLLM was asked for:

    hit        found in its cache (vllm:prefix_cache_hits over vllm:prefix_cache_queries)
    history    begin an earlier call of the same conversation: the most that turns can share
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import lora_sampling
from command_line import argument_parser
from machine_info import machine_info
from special_paths_sampling import random_tokens, sampled_model

from skylite.run.files import write_json


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--turns", nargs="+", type=int, default=[2, 6, 12])
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--trajectories", type=int, default=4, help="of each group")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the first prompt")
    parser.add_argument("--sampled", type=int, default=24, help="tokens a turn")
    parser.add_argument("--observed", type=int, default=8, help="tokens a turn")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="skylite-") as text:
        folder = Path(text)
        model, adapter = sampled_model(folder)
        with lora_sampling.running(lora_sampling.Variant("server"), model, folder, adapter) as http:
            conversations(args, 2, http)  # warm up
            rows = [figures(args, turns, http) for turns in args.turns]
    if args.out is not None:
        sizes = {n: getattr(args, n) for n in ("groups", "trajectories", "prompt", "sampled", "observed")}
        write_json(args.out, machine_info() | {"sizes": sizes, "rows": rows})


def figures(args: argparse.Namespace, turns: int, http: httpx.Client) -> dict[str, Any]:
    asked, found = counters(http)
    started = time.perf_counter()
    history = conversations(args, turns, http)
    seconds = time.perf_counter() - started
    asked_after, found_after = counters(http)
    prompt_tokens = asked_after - asked
    row = {
        "turns": turns,
        "calls": args.groups * args.trajectories * turns,
        "prompt_tokens": round(prompt_tokens),
        "hit_frac": round((found_after - found) / prompt_tokens, 3),
        "history_frac": round(history / prompt_tokens, 3),
        "seconds": round(seconds, 2),
    }
    print(json.dumps(row), flush=True)
    return row


def conversations(args: argparse.Namespace, turns: int, http: httpx.Client) -> int:
    """Play them all at once. Returns the prompt tokens that begin an earlier call of their conversation."""
    prompts = [random_tokens(args.prompt) for _ in range(args.groups)]
    starts = [prompt for prompt in prompts for _ in range(args.trajectories)]
    with ThreadPoolExecutor(len(starts)) as pool:
        return sum(pool.map(lambda start: conversation(args, start, turns, http), starts))


def conversation(args: argparse.Namespace, prompt: list[int], turns: int, http: httpx.Client) -> int:
    shared, earlier = 0, 0
    for _ in range(turns):
        shared += earlier
        body = {"model": lora_sampling.ADAPTER, "prompt": prompt, "max_tokens": args.sampled}
        body |= {"temperature": 1.0, "ignore_eos": True, "return_token_ids": True}
        body |= {"seed": random.randrange(1 << 30)}
        reply = http.post("/v1/completions", json=body).raise_for_status().json()
        prompt = [*prompt, *reply["choices"][0]["token_ids"]]
        earlier = len(prompt)
        prompt += random_tokens(args.observed)
    return shared


def counters(http: httpx.Client) -> tuple[float, float]:
    """Prompt tokens looked up in the prefix cache since the start, and those found."""
    text = http.get("/metrics").raise_for_status().text
    asked, found = (
        sum(map(float, re.findall(rf"^vllm:prefix_cache_{name}_total\S* (\S+)$", text, re.MULTILINE)))
        for name in ("queries", "hits")
    )
    return asked, found


if __name__ == "__main__":
    main()
