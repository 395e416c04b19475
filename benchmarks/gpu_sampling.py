"""How fast does vLLM sample on a GPU: base and LoRA, without and with logprobs, as stock and in batches?

    python benchmarks/gpu_sampling.py --out FILE [--shape qwen2.5-0.5b] [--until 150] [--dry-run]

Starts one server as a run does, with random weights of the shape and a random adapter of rank 32, and sends
32 prompts of 200 tokens x 8 completions of 512 tokens, each kind in turn, until the seconds are over. Kinds
differ in their requests only: `in batches` carries the mark of skylite's plugin
(engine/vllm/plugin/batched_outputs.py). FILE is written after each: completion tokens per second, and
microseconds of CPU a token of vLLM's API process and engine core. vLLM's log is beside it. --env NAME=VALUE
changes the server, such as VLLM_LORA_ENABLE_DUAL_STREAM=1. --dry-run takes a tiny model on the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import httpx
import psutil
from gpu_sizes import SHAPES, make_model
from shared import argument_parser, machine_info, without_paths

from skylite.engine.connections import Address
from skylite.engine.interface import BASE_NAME, EngineSpec
from skylite.engine.vllm.launcher import VllmLauncher
from skylite.engine.vllm.plugin.batched_outputs import MARK
from skylite.processes.child import Child, ProcessSpec, child_died, kill, poll, start
from skylite.run.files import write_json
from tests.engines import TARGET_MODULES, write_random_adapter
from tests.tiny_models import make_tiny_model

ADAPTER, RANK = "policy-v000001", 32
GROUP = "vllm.general_plugins"
PLUGIN = "skylite_cpu_lora = skylite.engine.vllm.plugin:register"
LAST_S = 8.0
"""Kept for the end of the server and of the file."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a kind samples."""

    prompts: int
    prompt: int
    completions: int
    tokens: int


REAL, TINY = Load(32, 200, 8, 512), Load(4, 20, 2, 24)


@dataclass(frozen=True, slots=True)
class Kind:
    """What a request asks for."""

    model: str
    logprobs: bool
    batched: bool

    @property
    def name(self) -> str:
        words = ["base" if self.model == BASE_NAME else "LoRA", "+ logprobs" if self.logprobs else ""]
        return " ".join(filter(None, [*words, "in batches" if self.batched else ""]))


KINDS = [
    Kind(model, logprobs, batched)
    for model in (ADAPTER, BASE_NAME)
    for logprobs, batched in ((True, True), (True, False), (False, False))
]


def main() -> None:
    args = parse_arguments()
    deadline = time.monotonic() + args.until
    result: dict[str, Any] = {"shape": args.shape, "environment": dict(args.env), "kinds": {}}
    with tempfile.TemporaryDirectory(prefix="skylite-") as name:
        folder = Path(name)
        register_plugin(folder)
        model = (make_tiny_model if args.dry_run else partial(make_model, args.shape))(folder / "model")
        result |= {"prepared_s": round(args.until - (deadline - time.monotonic()), 1)}
        spec = engine_spec(model, folder, args.dry_run)
        try:
            with running(
                spec, dict(args.env), folder, args.out.with_suffix(".log"), deadline, result
            ) as child:
                measure(spec, child, deadline, TINY if args.dry_run else REAL, result, args)
        except (RuntimeError, httpx.HTTPError) as error:
            result["failed"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            write_json(args.out, without_paths(result | machine_info()))


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=sorted(SHAPES))
    parser.add_argument("--until", type=float, default=150.0, help="seconds for everything")
    parser.add_argument("--rounds", type=int, default=3, help="most rounds")
    parser.add_argument("--env", type=lambda word: tuple(word.split("=", 1)), action="append", default=[])
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_args()


def register_plugin(folder: Path) -> None:
    """Let vLLM find skylite's plugin also where skylite is on the path only, not installed."""
    if any(point.value == PLUGIN.partition(" = ")[2] for point in entry_points(group=GROUP)):
        return
    info = folder / "plugin" / "skylite_plugin-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: skylite-plugin\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{PLUGIN}\n")
    paths = [str(info.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def engine_spec(model: Path, folder: Path, dry_run: bool) -> EngineSpec:
    """A run's engine; all sequences decode at once."""
    return EngineSpec(
        name="sampling",
        model_path=model,
        device="cpu" if dry_run else "cuda",
        dtype="float32" if dry_run else "bfloat16",
        address=Address.of_socket(folder / "s.sock"),
        lora_rank=RANK,
        target_modules=TARGET_MODULES,
        max_loras=1,
        max_model_len=1024,
        max_num_seqs=REAL.prompts * REAL.completions,
        kv_cache_gib=0.25,
        gpu_memory_utilization=0.6,
        cpu_lora="dense",
        seed=0,
    )


@contextmanager
def running(
    spec: EngineSpec, env: dict[str, str], folder: Path, log: Path, deadline: float, result: dict[str, Any]
) -> Iterator[Child]:
    """The server with its adapter. Records its command line and its start."""
    launcher, started = VllmLauncher(), time.monotonic()
    argv = launcher.command(spec)
    result["arguments"] = argv[1:]
    variables = launcher.environment(spec) | env
    child = start(ProcessSpec(name=spec.name, argv=argv, env=variables, log_path=log))
    try:
        adapter = write_random_adapter(folder / ADAPTER, spec.model_path, rank=RANK, scale=0.1)
        with spec.address.client(60.0) as http:
            wait(child, http, deadline)
            result["start_s"] = round(time.monotonic() - started, 1)
            body = {"lora_name": ADAPTER, "lora_path": str(adapter)}
            http.post("/v1/load_lora_adapter", json=body).raise_for_status()
        yield child
    finally:
        kill(child)


def wait(child: Child, http: httpx.Client, deadline: float) -> None:
    """Until the server serves. Raises RuntimeError if it ends or takes too long."""
    while True:
        if poll(child) is not None:
            raise RuntimeError(f"{child_died(child)}\n{child_died(child).log_tail}")
        if time.monotonic() > deadline - LAST_S:
            raise RuntimeError("vLLM did not serve in time")
        try:
            if http.get("/health").status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)


def measure(
    spec: EngineSpec,
    child: Child,
    deadline: float,
    load: Load,
    result: dict[str, Any],
    args: argparse.Namespace,
) -> None:
    """Sample each kind in turn while the longest would still end in time."""
    rng = random.Random(0)
    for kind in KINDS[:2]:  # compiles what is left, without counting it
        asyncio.run(sample(spec.address, kind, Load(load.prompts, load.prompt, load.completions, 16), rng))
    longest = 0.0
    for _ in range(args.rounds):
        for kind in KINDS:
            if time.monotonic() + longest > deadline - LAST_S:
                return
            before, started = cpu_seconds(child), time.perf_counter()
            tokens, plain = asyncio.run(sample(spec.address, kind, load, rng))
            seconds = time.perf_counter() - started
            longest = max(longest, seconds)
            row = {"tokens_per_s": round(tokens / seconds), "seconds": round(seconds, 2), "tokens": tokens}
            row |= {
                f"{name}_cpu_us": round(1e6 * (now - before.get(name, 0.0)) / tokens, 1)
                for name, now in cpu_seconds(child).items()
            }
            if kind.logprobs and plain is kind.batched:
                row["wrong_form"] = True
            result["kinds"].setdefault(kind.name, []).append(row)
            print(kind.name, json.dumps(row), flush=True)
            write_json(args.out, without_paths(result))


async def sample(address: Address, kind: Kind, load: Load, rng: random.Random) -> tuple[int, bool]:
    """All prompts at once. Returns the tokens, and whether the replies have vLLM's own form of logprobs."""
    body: dict[str, Any] = {"model": kind.model, "n": load.completions, "max_tokens": load.tokens}
    body |= {"temperature": 1.0, "ignore_eos": True, "return_token_ids": True, "seed": rng.randrange(1 << 30)}
    body |= {"logprobs": 0} if kind.logprobs else {}
    body |= {"vllm_xargs": {MARK: 1}} if kind.batched else {}
    prompts = [[rng.randrange(250) for _ in range(load.prompt)] for _ in range(load.prompts)]
    transport = httpx.AsyncHTTPTransport(uds=str(address.socket), limits=httpx.Limits(max_connections=64))
    async with httpx.AsyncClient(transport=transport, base_url=address.base_url, timeout=300.0) as http:

        async def one(prompt: list[int]) -> httpx.Response:
            return (await http.post("/v1/completions", json=body | {"prompt": prompt})).raise_for_status()

        replies = await asyncio.gather(*map(one, prompts))
    choices = [choice for reply in replies for choice in reply.json()["choices"]]
    plain = any(choice["logprobs"] and choice["logprobs"]["tokens"] for choice in choices)
    return sum(len(choice["token_ids"]) for choice in choices), plain


def cpu_seconds(child: Child) -> dict[str, float]:
    """Of vLLM's API process and of its engine core, so far. The reaper above them has none."""
    seconds = {"api": 0.0, "core": 0.0}
    for process in psutil.Process(child.pid).children(recursive=True):
        try:
            times, words = process.cpu_times(), " ".join([process.name(), *process.cmdline()])
        except psutil.NoSuchProcess:
            continue
        seconds["core" if "EngineCore" in words else "api"] += times.user + times.system
    return seconds


if __name__ == "__main__":
    main()
