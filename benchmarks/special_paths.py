"""What each special path for speed buys: every path is switched off and on again in turns, in one run.

    python benchmarks/special_paths.py --out benchmarks/results/special_paths_cpu.json
    python benchmarks/special_paths.py --only "fused norms" --rounds 3

Six kinds of measurement. SmolLM2-135M, rank 32, 4 prompts x 8 completions of at most 128 tokens:

- train: the train phase (train_phase.py), seconds a step and the process's peak MiB
- sample: a vLLM server with the adapter, tokens a second, and the MiB of its processes
- start: `skylite train` until its first rollout request (startup.py), seconds
- sync: writing one adapter beside the canary (trainer/publish.py), milliseconds; on and off in one process
- verify: a server loads a version, verifies it and samples a step, seconds
- read: a process reads a step's rollout file for the first time, seconds and MiB

`ratio` is off / on of the medians. Compare figures of one row only: the machine's speed changes between rows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import lora_sampling
import startup
import train_phase
from surroundings import about

from skylite.hub.resolve import resolve_model
from skylite.processes.machine import cpu_cores
from skylite.processes.torchrun import ALLOCATOR, trainer_env
from skylite.run.files import write_json

MODEL, PROMPTS, GROUP, PROMPT_TOKENS, TOKENS = "smollm2-135m", 4, 8, 106, 128
SWITCH = "SKYLITE_SWITCHED_OFF"
Patches = dict[str, Any]
"""`module:attribute` to what takes its place."""


@dataclass(frozen=True, slots=True)
class SpecialPath:
    """A special path and how it is switched off."""

    kind: str
    off: Callable[[], Patches] = dict
    flags: tuple[str, ...] = ()
    """Of train_phase.py, or of vLLM's server."""
    env: tuple[tuple[str, str], ...] = ()
    base: str = ""
    """Another path that is switched off on both sides: this one only acts without it."""


def nothing(*_: Any, **__: Any) -> None:
    return None


def attention_by_autograd() -> Patches:
    """Attention over a tree as other devices compute it."""
    import torch

    from skylite.model import tree_attention as tree

    class Plain:
        @staticmethod
        def apply(query: Any, key: Any, value: Any, layout: Any, biases: Any, scaling: float) -> Any:
            repeats = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
            queries, keys, values = (torch.split(x, layout.sizes, dim=2) for x in (query, key, value))
            outputs = [
                tree._attend(
                    queries[i],
                    tree._seen(keys, layout, i),
                    tree._seen(values, layout, i),
                    bias,
                    tree.Scoring(scaling),
                )
                for i, bias in enumerate(biases)
            ]
            return torch.cat(outputs, dim=2).transpose(1, 2)

    return {"skylite.model.tree_attention:_CpuTreeAttention": Plain}


def masks_made_again() -> Patches:
    from skylite.model import tree_attention as tree

    def masks(layout: Any, *args: Any) -> Any:
        layout.bias_cache.clear()
        return cached(layout, *args)

    cached = tree._additive_masks
    return {"skylite.model.tree_attention:_additive_masks": masks}


def logprobs_by_autograd() -> Patches:
    import torch

    def plain(logits: Any, rows: Any, targets: Any, temperature: float) -> Any:
        log_probs = torch.log_softmax(logits.float() / temperature, dim=1)
        entropies = -(log_probs.exp() * log_probs).sum(dim=1)
        return log_probs[rows, targets], entropies[rows]

    return {"skylite.model.policy:token_logprobs": plain}


def engines_after_the_trainer() -> Patches:
    """vLLM starts when the adapter's manifest names its modules."""
    from skylite.engine import startup as engines

    known: list[Any] = []

    @asynccontextmanager
    async def none_yet(*args: Any) -> Any:
        known.extend(args)
        yield []

    @asynccontextmanager
    async def now(*args: Any, wanted: list[str], **_: Any) -> Any:
        run_config, logs, _, supervisor, restarts = known
        opened = engines.open_engines(run_config, logs, wanted, supervisor, restarts)
        async with opened as watchdogs, engines.watched(watchdogs, supervisor) as ready:
            yield ready

    return {
        "skylite.orchestrator.run_session:open_engines": none_yet,
        "skylite.orchestrator.run_session:ready_engines": now,
    }


def pandas_read() -> Patches:
    import pyarrow.parquet as pq

    class File:
        def __init__(self, path: Any) -> None:
            self._path = path
            self.schema_arrow = pq.read_schema(path)
            self.read = lambda **kwargs: pq.read_table(path, **kwargs)

        def __enter__(self) -> Any:
            return self

        __exit__ = nothing

    return {"pyarrow.parquet:ParquetFile": File}


class InTurn:
    """A ThreadPoolExecutor whose work is done where it is submitted."""

    def __init__(self, *_: Any) -> None: ...
    def __enter__(self) -> InTurn:
        return self

    __exit__ = nothing

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(call(*args))
        return done


def plain_files() -> Patches:
    """An adapter written by safetensors and hashed then, before the canary, by all threads."""
    import hashlib

    from safetensors.torch import save

    def write(path: Path, tensors: Any) -> tuple[str, int]:
        data = save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"format": "pt"})
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return hashlib.sha256(data).hexdigest(), len(data)

    return {
        "skylite.trainer.publish:write_weights": write,
        "skylite.trainer.publish:ThreadPoolExecutor": InTurn,
    } | all_threads()


@contextmanager
def no_block() -> Iterator[None]:
    yield


def all_threads() -> Patches:
    names = ("skylite.model.distributed:half_the_threads", "skylite.trainer.loop:half_the_threads")
    return dict.fromkeys(names, no_block)


def joins_nothing() -> Patches:
    """A product with the A of each slice of a fused layer."""
    from torch.nn import functional

    from skylite.vllm_plugin import lora_math

    def add(self: Any, y: Any, x: Any, all_a: Any, all_b: Any, scale: float, widths: Any, **_: Any) -> None:
        y, x, start = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), 0
        for a, b, width in zip(all_a, all_b, widths, strict=True):
            for group in self._token_groups:
                shrunk = functional.linear(x[group.rows], a[group.slot, 0])
                lora_math.add_expanded(y.narrow(1, start, width), shrunk, b, group, scale)
            start += width

    return {"skylite.vllm_plugin.dense_lora:DensePunicaWrapperCPU.add_lora_linear": add}


def rows_gathered() -> Patches:
    import torch

    return {"skylite.vllm_plugin.lora_math:_compact": torch.tensor}


def product_by_torch() -> Patches:
    from torch.nn import functional

    return {
        "skylite.vllm_plugin.merged:packed": lambda weight: lambda x, bias: functional.linear(x, weight, bias)
    }


def no_torch_hidden() -> Patches:
    return {"skylite.data.tokenizer:_without_torch": no_block}


def patch(name: str, value: Any) -> Callable[[], Patches]:
    return lambda: {name: value}


PROBING = "skylite.model.probing:"
DENSE = "SKYLITE_CPU_LORA"
PATHS: dict[str, SpecialPath] = {
    "bf16 weights": SpecialPath("train", patch(f"{PROBING}hold_in_bf16", nothing)),
    "selective checkpointing": SpecialPath("train", flags=("--checkpointing=none",)),
    "fused norms": SpecialPath("train", patch(f"{PROBING}fuse_norms", nothing)),
    "fused MLPs": SpecialPath("train", patch(f"{PROBING}fuse_mlps", nothing)),
    "LoRA as one operation": SpecialPath("train", patch("skylite.model.policy:fuse", nothing)),
    "siblings' A joined": SpecialPath("train", patch("skylite.model.lora_linear:SIBLINGS", ())),
    "prefix tree": SpecialPath("train", flags=("--packing=padded",)),
    "attention's own backward": SpecialPath("train", attention_by_autograd),
    "blocks cut at branches": SpecialPath("train", patch("skylite.model.prefix_tree:CALL", 1 << 60)),
    "additive masks kept": SpecialPath("train", masks_made_again),
    "logits in blocks": SpecialPath("train", patch(f"{PROBING}plain_head", nothing)),
    "head's gradient made forward": SpecialPath(
        "train", patch("skylite.model.chunked_logprobs:_in_blocks", lambda *_: False)
    ),
    "logprobs of all logits": SpecialPath("train", logprobs_by_autograd, base="logits in blocks"),
    "old logprobs of the pass": SpecialPath(
        "train", patch("skylite.trainer.precompute:needs_old_logprobs", lambda _: True)
    ),
    "cached blocks released": SpecialPath(
        "train", patch("skylite.trainer.step:release_cached_memory", nothing)
    ),
    "TBB's allocator": SpecialPath("train", env=(("LD_PRELOAD", ""),)),
    "glibc keeps memory": SpecialPath(
        "train", env=(("LD_PRELOAD", ""), *((name, "") for name in ALLOCATOR)), base="TBB's allocator"
    ),
    "LoRA as one tensor": SpecialPath(
        "sync", patch("skylite.trainer.weights_file:_same_memory", lambda *_: False)
    ),
    "writes of 1 MiB": SpecialPath("sync", patch("skylite.trainer.weights_file:WRITE_BYTES", 1 << 40)),
    "hash beside the write": SpecialPath(
        "sync", patch("skylite.trainer.weights_file:ThreadPoolExecutor", InTurn)
    ),
    "write beside the canary": SpecialPath(
        "sync", patch("skylite.trainer.publish:ThreadPoolExecutor", InTurn)
    ),
    "half the threads beside a write": SpecialPath("sync", all_threads),
    "all of the sync's": SpecialPath("sync", plain_files),
    "weights merged": SpecialPath("sample", env=((DENSE, "dense"),)),
    "merged: vLLM's packed product": SpecialPath("sample", product_by_torch),
    "merged: copy in bfloat16": SpecialPath(
        "sample", patch("skylite.vllm_plugin.merged:compact", lambda weight: weight.clone())
    ),
    "dense: A of slices joined": SpecialPath("sample", joins_nothing, base="weights merged"),
    "dense: rows in a row": SpecialPath("sample", rows_gathered, base="weights merged"),
    "kernels for norms": SpecialPath("sample", patch("skylite.vllm_plugin.kernels:install", nothing)),
    "kernels for norms and rotary": SpecialPath(
        "sample", flags=("--compilation-config", '{"custom_ops": ["none"]}')
    ),
    "blocks of 32 tokens": SpecialPath("sample", flags=("--block-size", "128")),
    "verified beside sampling": SpecialPath("verify"),
    "half the threads at start": SpecialPath("start", all_threads),
    "tokenizer without torch": SpecialPath("start", no_torch_hidden),
    "parquet without pandas": SpecialPath("read", pandas_read),
    "vLLM beside the trainer": SpecialPath("start", engines_after_the_trainer),
    "Arrow by malloc": SpecialPath("read", env=(("ARROW_DEFAULT_MEMORY_POOL", ""),)),
}


def switch_off(names: str | None = None) -> None:
    """Put the replacements of paths in place. `names`: joined by `+`; None: those of the environment."""
    for name in filter(None, (os.environ.get(SWITCH, "") if names is None else names).split("+")):
        for place, value in PATHS[name].off().items():
            module, _, attribute = place.partition(":")
            owner = import_module(module)
            *owners, last = attribute.split(".")
            for part in owners:
                owner = getattr(owner, part)
            setattr(owner, last, value)


def main() -> None:
    if sys.argv[1:2] == ["--run"]:  # a process of skylite's: --run MODULE ARGUMENTS
        switch_off()
        sys.argv = sys.argv[2:]
        import_module(sys.argv[0]).main()
        return
    args = parse_arguments()
    if args.inner:
        {"sync": sync_rounds, "train": train_once, "read": read_once}[args.inner]()
        return
    chosen = {name: path for name, path in PATHS.items() if not args.only or name in args.only}
    found = json.loads(args.out.read_text("utf-8"))["paths"] if args.add else {}
    for name, path in chosen.items():
        found[name] = MEASURES[path.kind](name, path, args.rounds)
        print(name, json.dumps(found[name]), flush=True)
        if args.out:
            write_json(args.out, about() | {"paths": found})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", action="append", choices=PATHS, help="a path; may be given several times")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--add", action="store_true", help="keep the other paths that --out has already")
    parser.add_argument("--inner", choices=["train", "sync", "read"], help=argparse.SUPPRESS)
    return parser.parse_args()


def compared(on: list[dict[str, float]], off: list[dict[str, float]]) -> dict[str, Any]:
    """Medians of each figure, and off / on."""
    row: dict[str, Any] = {}
    for unit in on[0]:
        medians = [round(statistics.median(one[unit] for one in side), 4) for side in (on, off)]
        row[unit] = {
            "on": medians[0],
            "off": medians[1],
            "ratio": round(medians[1] / medians[0], 3),
            "rounds": [[one[unit] for one in on], [one[unit] for one in off]],
        }
    return row | {"commit": about()["commit"]}


def in_turns(measure: Callable[[bool], dict[str, float]], rounds: int) -> dict[str, Any]:
    """`measure(False)` has the path on, `measure(True)` off; the order changes from round to round."""
    sides: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for index in range(rounds):
        for off in (index % 2 == 1, index % 2 == 0):
            sides[off].append(measure(off))
    return compared(sides[False], sides[True])


def switched(name: str, path: SpecialPath, off: bool) -> tuple[str, tuple[str, ...], dict[str, str]]:
    """What is off, flags and environment."""
    names = [path.base] * bool(path.base) + [name] * off
    return (
        "+".join(names),
        tuple(flag for n in names for flag in PATHS[n].flags),
        {key: value for n in names for key, value in PATHS[n].env},
    )


def in_rank(inner: str, names: str, flags: tuple[str, ...], env: dict[str, str], file: str = "") -> Any:
    """The last line that this file prints as the one rank of a trainer, in the trainer's environment."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    values = os.environ | trainer_env(cpu_cores()) | env
    values |= {SWITCH: names, "SKYLITE_FLAGS": json.dumps(flags), "SKYLITE_FILE": file}
    done = subprocess.run(
        [*torchrun, __file__, "--inner", inner],
        env={key: value for key, value in values.items() if value or key == SWITCH},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def train_turns(name: str, path: SpecialPath, rounds: int) -> dict[str, Any]:
    def measure(off: bool) -> dict[str, float]:
        row = in_rank("train", *switched(name, path, off))
        return {"s a step": row["seconds"], "peak MiB": round(row["peak_gib"] * 1024)}

    return in_turns(measure, rounds)


def sizes() -> argparse.Namespace:
    flags = json.loads(os.environ.get("SKYLITE_FLAGS", "[]"))
    plain = ["--checkpointing=selective", "--packing=tree", "--budget=1200", "--steps=2"]
    words = [f for f in plain if not any(g.startswith(f.split("=")[0]) for g in flags)]
    return train_phase.parse_arguments(["--model", MODEL, *words, *flags])


def train_once() -> None:
    switch_off()
    train_phase.made_up, made_up = lambda *args: cut(made_up(*args)), train_phase.made_up
    train_phase.inner(sizes())


def cut(groups: list[Any]) -> list[Any]:
    """Every second completion ends early, each at another length."""

    def shorter(index: int, trajectory: Any) -> Any:
        (sample,) = trajectory.samples
        kept = TOKENS - index % 2 * (17 * index % 89)
        ids, logprobs = sample.completion_token_ids[:kept], sample.rollout_logprobs[:kept]
        return replace(
            trajectory, samples=(replace(sample, completion_token_ids=ids, rollout_logprobs=logprobs),)
        )

    return [
        replace(group, trajectories=tuple(shorter(i + 8 * k, t) for i, t in enumerate(group.trajectories)))
        for k, group in enumerate(groups)
    ]


def sync_turns(name: str, _: SpecialPath, rounds: int) -> dict[str, Any]:
    return in_rank("sync", name, (str(max(rounds, 5)),), {})  # type: ignore[no-any-return]


def sync_rounds() -> None:
    """Milliseconds of writing a version beside its canary, the path on and off in turns."""
    from skylite.adapters.manifest import Canary
    from skylite.config.train import RunConfig
    from skylite.model.distributed import process_group, set_threads
    from skylite.model.policy import load_policy
    from skylite.model.probing import choose_passes
    from skylite.trainer import loop, publish

    name, rounds = os.environ[SWITCH], int(json.loads(os.environ.pop("SKYLITE_FLAGS"))[0])
    set_threads(None)
    tokens = [list(range(20, 44)), list(range(60, 84))]
    with process_group("cpu") as dist, tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        model = str(resolve_model(MODEL, say=lambda _: None).path)
        config, where = train_phase.settings(sizes(), model, "cpu")
        policy, _ = choose_passes(load_policy(where, config, dist), tokens[0])
        where = where.model_copy(update={"lora_sync_path": folder})
        run_config = RunConfig(skylite_version="benchmark", config=config, resolved=where)
        version = 0

        def canary() -> Canary:
            with loop.half_the_threads():
                found = publish.canary_logprobs(policy, tokens)
            return Canary(sequences=tokens, policy_logprobs=found, base_logprobs=found)

        def measure(off: bool) -> dict[str, float]:
            nonlocal version
            version += 1
            with replaced(PATHS[name].off() if off else {}):
                started = time.perf_counter()
                done = publish.publish(policy, run_config, version, canary)
                seconds = time.perf_counter() - started
            return {"ms with canary": round(seconds * 1e3, 1), "ms written": round(done.seconds * 1e3, 1)}

        measure(False), measure(True)
        print(json.dumps(in_turns(measure, rounds)))


@contextmanager
def replaced(patches: Patches) -> Iterator[None]:
    places = [(import_module(m), a, v) for m, a, v in ((*k.split(":"), v) for k, v in patches.items())]
    before = [getattr(owner, name) for owner, name, _ in places]
    for owner, name, value in places:
        setattr(owner, name, value)
    yield
    for (owner, name, _), value in zip(places, before, strict=True):
        setattr(owner, name, value)


def sample_turns(name: str, path: SpecialPath, rounds: int) -> dict[str, Any]:
    """Two servers at once, asked in turns; the first step of each is not counted."""
    import random

    rng = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="skylite-") as text:
        folder = Path(text)
        args = argparse.Namespace(model=resolve_model(MODEL, say=print).path, dtype="float32", rank=32)
        adapter = lora_sampling.write_adapter(args.model, folder / lora_sampling.ADAPTER, args.rank)
        plugin(folder / "plugin")
        servers = {}
        with ExitStack() as stack:
            for off in (False, True):
                names, flags, env = switched(name, path, off)
                env |= {SWITCH: names, "PYTHONPATH": python_path(folder / "plugin")}
                variant = lora_sampling.Variant(f"off-{off}", env=tuple(env.items()), flags=flags)
                servers[off] = (
                    stack.enter_context(lora_sampling.running(variant, args, folder, adapter)),
                    str(folder / f"off-{off}.sock"),
                )

            def measure(off: bool) -> dict[str, float]:
                http, socket = servers[off]
                prompts = [[rng.randrange(100, 20000) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
                rate = sample(http, prompts)
                return {"tokens/s": round(rate, 1), "engine MiB": round(memory_of(socket) / 2**20)}

            measure(False), measure(True)
            return in_turns(measure, max(rounds, 3))


def sample(http: Any, prompts: list[list[int]], model: str = lora_sampling.ADAPTER) -> float:
    """Completion tokens a second of a step: every prompt's group at once."""
    body = {"model": model, "prompt": prompts, "n": GROUP, "max_tokens": TOKENS}
    body |= {"temperature": 1.0, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    started = time.perf_counter()
    reply = http.post("/v1/completions", json=body).raise_for_status().json()
    return sum(len(c["token_ids"]) for c in reply["choices"]) / (time.perf_counter() - started)


def memory_of(socket: str) -> float:
    """Bytes of the server on this socket and its processes, pages that several share counted once (PSS)."""
    import psutil

    ours = psutil.Process().children(recursive=True)
    server = next(p for p in ours if socket in p.cmdline() and "-I" not in p.cmdline())
    return sum(p.memory_full_info().pss for p in [server, *server.children(recursive=True)])


def plugin(folder: Path) -> None:
    """A package whose vLLM plugin is `switch_off`: vLLM calls it in every one of its processes."""
    info = folder / "special_paths-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: special_paths\nVersion: 0\n", "utf-8")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nspecial_paths = special_paths:switch_off\n", "utf-8"
    )


def python_path(*more: Path) -> str:
    return os.pathsep.join(map(str, [*more, Path(__file__).parent, *filter(None, sys.path)]))


def verify_turns(name: str, path: SpecialPath, rounds: int) -> dict[str, Any]:
    """Off: the two canary sequences are scored before the step is sampled, not beside it."""
    import random
    from concurrent.futures import ThreadPoolExecutor

    rng = random.Random(0)
    prompts = [[rng.randrange(100, 20000) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
    with tempfile.TemporaryDirectory(prefix="skylite-") as text, ThreadPoolExecutor(2) as pool:
        folder, version = Path(text), 1
        args = argparse.Namespace(model=resolve_model(MODEL, say=print).path, dtype="float32", rank=32)
        adapter = lora_sampling.write_adapter(args.model, folder / lora_sampling.ADAPTER, args.rank)
        with lora_sampling.running(lora_sampling.Variant("server"), args, folder, adapter) as http:

            def score(row: int, model: str) -> None:
                body = {"model": model, "prompt": prompts[row][:24], "max_tokens": 1, "prompt_logprobs": 0}
                http.post("/v1/completions", json=body).raise_for_status()

            def measure(off: bool) -> dict[str, float]:
                nonlocal version
                version += 1
                body = {"lora_name": f"policy-{version}", "lora_path": str(adapter)}
                started = time.perf_counter()
                http.post("/v1/load_lora_adapter", json=body).raise_for_status()
                canary = [pool.submit(score, row, body["lora_name"]) for row in range(2)]
                if off:
                    [one.result() for one in canary]
                verified = time.perf_counter() - started
                rate = sample(http, prompts, body["lora_name"])
                [one.result() for one in canary]
                seconds = time.perf_counter() - started
                http.post("/v1/unload_lora_adapter", json={"lora_name": body["lora_name"]})
                return {"s": round(seconds, 2), "s verified": round(verified, 2), "tokens/s": round(rate, 1)}

            measure(False), measure(True)
            return in_turns(measure, max(rounds, 3))


def read_turns(name: str, path: SpecialPath, rounds: int) -> dict[str, Any]:
    from skylite.run.rollout_file import write_rollouts
    from skylite.types import Group, Prompt, Sample, Trajectory

    ids, rates = list(range(PROMPT_TOKENS + TOKENS)), [-0.5 - 1 / (3 + k) for k in range(TOKENS)]
    sampled = Sample(
        prompt_token_ids=ids[:PROMPT_TOKENS], completion_token_ids=ids[-TOKENS:], rollout_logprobs=rates
    )
    one = Trajectory(samples=(sampled,), reward=1.0)
    row = Prompt(id="a", messages=[{"role": "user", "content": "a question"}], answer="7", source="made up")
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        file = Path(folder, "rollouts.parquet")
        write_rollouts(file, [Group(prompt=row, trajectories=(one,) * GROUP)] * PROMPTS)
        return in_turns(lambda off: in_rank("read", *switched(name, path, off), str(file)), max(rounds, 3))


def read_once() -> None:
    from skylite.run.rollout_file import read_rollouts

    switch_off()
    before, started = train_phase.rss_gib("now"), time.perf_counter()
    read_rollouts(Path(os.environ["SKYLITE_FILE"]))
    seconds = time.perf_counter() - started
    print(json.dumps({"s": round(seconds, 3), "MiB": round((train_phase.rss_gib("now") - before) * 1024)}))


def start_turns(name: str, path: SpecialPath, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        data, count = Path(folder, "data"), iter(range(100))
        subprocess.run([*startup.SKYLITE, "prepare", "gsm8k", "--synthetic", "--out", str(data)], check=True)
        startup.SKYLITE = [sys.executable, __file__, "--run", "skylite.cli"]

        def measure(off: bool) -> dict[str, float]:
            os.environ[SWITCH] = "+".join(["trainer by this file", *[name] * off])
            times = startup.run_start(MODEL, data, Path(folder, f"run{next(count)}"))
            del os.environ[SWITCH]
            return {"s": times["sampling_started_s"], "s until the tokenizer": times["tokenizer_ready_s"]}

        return in_turns(measure, rounds)


def trainer_by_this_file() -> Patches:
    from skylite.processes import torchrun

    def command(*args: Any, **kwargs: Any) -> list[str]:
        words = torchrun.trainer_command(*args, **kwargs)
        place = words.index("skylite.trainer.worker")
        return [*words[: place - 1], __file__, "--run", *words[place:]]

    return {"skylite.orchestrator.run_session:trainer_command": command}


PATHS["trainer by this file"] = SpecialPath("start", trainer_by_this_file)
MEASURES = {
    "train": train_turns,
    "sync": sync_turns,
    "sample": sample_turns,
    "verify": verify_turns,
    "read": read_turns,
    "start": start_turns,
}

if __name__ == "__main__":
    main()
