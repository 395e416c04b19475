"""special_paths.py, the paths of vLLM: sampling an adapter, and verifying a version beside it."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lora_sampling
import psutil
from paired_rounds import (
    GROUP_SIZE,
    MAX_TOKENS,
    MODEL,
    NUM_PROMPTS,
    PROMPT_TOKENS,
    Figures,
    in_turns,
    variables,
)
from switched_off import SpecialPath

from skylite.engine.canary import MAX_TOKENS as MAX_CANARY_TOKENS
from skylite.engine.canary import NUM_SEQUENCES
from skylite.engine.server_command import BASE_NAME
from skylite.hub.resolve import resolve_model


def sample_turns(name: str, path: SpecialPath, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="skylite-") as text, ExitStack() as stack:
        folder, servers = Path(text), {}
        args, adapter = sampled_model(folder)
        install_plugin(folder / "plugin")
        for off in (False, True):
            env, flags = variables(name, path, off)
            here = [folder / "plugin", Path(__file__).parent, *filter(None, sys.path)]
            env |= {"PYTHONPATH": os.pathsep.join(map(str, here))}
            variant = lora_sampling.Variant(f"off-{off}", env=tuple(env.items()), flags=tuple(flags))
            servers[off] = stack.enter_context(lora_sampling.running(variant, args, folder, adapter))

        def measure(off: bool) -> Figures:
            rate = sample(servers[off], random_prompts(), lora_sampling.ADAPTER)
            mib = memory_of(str(folder / f"off-{off}.sock")) / 2**20
            return {"tokens/s": round(rate, 1), "MiB": round(mib)}

        measure(False), measure(True)
        return in_turns(measure, rounds)


def sampled_model(folder: Path, dtype: str = "float32") -> tuple[argparse.Namespace, Path]:
    args = argparse.Namespace(model=resolve_model(MODEL).path, dtype=dtype, rank=32)
    return args, lora_sampling.write_adapter(args.model, folder / lora_sampling.ADAPTER, args.rank)


def install_plugin(folder: Path) -> None:
    """A package whose vLLM plugin is `switch_off`: vLLM calls it in each of its processes."""
    info = folder / "special_paths-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: special_paths\nVersion: 0\n", "utf-8")
    text = "[vllm.general_plugins]\nspecial_paths = switched_off:switch_off\n"
    (info / "entry_points.txt").write_text(text, "utf-8")


def random_prompts() -> list[list[int]]:
    return [random_tokens(PROMPT_TOKENS) for _ in range(NUM_PROMPTS)]


def random_tokens(count: int) -> list[int]:
    return [random.randrange(100, 20000) for _ in range(count)]


def sample(http: Any, prompts: list[list[int]], model: str) -> float:
    """Completion tokens per second of a step: all groups at once."""
    body = {"model": model, "prompt": prompts, "n": GROUP_SIZE, "max_tokens": MAX_TOKENS}
    body |= {"temperature": 1.0, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    started = time.perf_counter()
    reply = http.post("/v1/completions", json=body).raise_for_status().json()
    return sum(len(c["token_ids"]) for c in reply["choices"]) / (time.perf_counter() - started)


def memory_of(socket: str) -> float:
    """Bytes (PSS) of a server and its descendants."""
    ours = psutil.Process().children(recursive=True)
    server = next(p for p in ours if socket in p.cmdline() and "-I" not in p.cmdline())
    return float(sum(p.memory_full_info().pss for p in [server, *server.children(recursive=True)]))


def verify_turns(name: str, path: SpecialPath, rounds: int) -> dict[str, Any]:
    """Off: the canary is scored before the step is sampled, on: at the same time."""
    versions = iter(range(2, 1000))
    with tempfile.TemporaryDirectory(prefix="skylite-") as text, ThreadPoolExecutor(80) as pool:
        args, adapter = sampled_model(Path(text), path.dtype)
        variant = lora_sampling.Variant("server")
        with lora_sampling.running(variant, args, Path(text), adapter) as http:

            def measure(off: bool) -> Figures:
                model = f"policy-{next(versions)}"
                body = {"lora_name": model, "lora_path": str(adapter)}
                started = time.perf_counter()
                http.post("/v1/load_lora_adapter", json=body).raise_for_status()
                canary = [pool.submit(http.post, "/v1/completions", json=b) for b in scored(model, path)]
                if off:
                    [one.result() for one in canary]
                verified = time.perf_counter() - started
                sample(http, random_prompts(), model)
                [one.result().raise_for_status() for one in canary]
                seconds = time.perf_counter() - started
                http.post("/v1/unload_lora_adapter", json={"lora_name": model}).raise_for_status()
                return {"s": round(seconds, 2), "s before sampling": round(verified, 3)}

            measure(False), measure(True)
            return in_turns(measure, rounds)


def scored(model: str, path: SpecialPath) -> list[dict[str, Any]]:
    """The canary's requests: bfloat16 also scores the base and the version before."""
    models = [model] if path.dtype == "float32" else [model, BASE_NAME, lora_sampling.ADAPTER]
    score = {"max_tokens": 1, "prompt_logprobs": 0}
    rows = [random_tokens(MAX_CANARY_TOKENS) for _ in range(NUM_SEQUENCES[path.dtype])]
    return [score | {"model": name, "prompt": row} for name in models for row in rows]
