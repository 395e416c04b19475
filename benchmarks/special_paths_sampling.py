"""special_paths.py, the paths of vLLM: sampling an adapter."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
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


def sampled_model(folder: Path) -> tuple[argparse.Namespace, Path]:
    args = argparse.Namespace(model=resolve_model(MODEL).path, dtype="float32", rank=32)
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
