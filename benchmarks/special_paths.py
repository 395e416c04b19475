"""What does each special path for speed buy? Each is switched off and on in turns, in one run.

    python benchmarks/special_paths.py --out benchmarks/results/special_paths_cpu.json
    python benchmarks/special_paths.py --only "fused norms" --rounds 3

switched_off.py names the paths. SmolLM2-135M, rank 32, 4 prompts x 8 completions of at most 128 tokens:

- train: the train phase (train_phase.py): seconds of the step after the first, and the process's peak MiB
- sync: publishing an adapter with its canary: milliseconds, both sides in one process
- sample: two vLLM servers with an adapter: tokens per second and MiB (PSS) of each
- verify: one server loads a version, verifies it and samples a step: seconds
- read: a process reads a rollout file for the first time: seconds and MiB
- start: `skylite train` to its first rollout request (startup.py): seconds

`ratio` is off / on of the medians. Compare figures of one row only: the machine's speed changes between rows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import command_line
import lora_sampling
import psutil
import startup
import train_phase
from command_line import argument_parser, under_torchrun
from machine_info import commit, machine_info
from switched_off import PATHS, SWITCH, SpecialPath, apply, switch_off

from skylite.hub.resolve import resolve_model
from skylite.processes import torchrun
from skylite.run.files import write_json

MODEL, NUM_PROMPTS, GROUP_SIZE, PROMPT_TOKENS, MAX_TOKENS = "smollm2-135m", 4, 8, 106, 128
TRAIN = ("--model", MODEL, "--checkpointing=selective", "--packing=tree", "--budget=1200", "--steps=2")
Figures = dict[str, float]
Measure = Callable[[bool], Figures]
"""Figures with the path off (True) or on."""


def main() -> None:
    if sys.argv[1:2] == ["--run"]:  # as a process of skylite: --run MODULE ARGUMENTS
        as_process_of_skylite(sys.argv[2:])
        return
    args = parse_arguments()
    if args.inner:
        INNER[args.inner](args.words)
        return
    found = json.loads(args.out.read_text("utf-8"))["paths"] if args.out and args.out.exists() else {}
    for name in args.only or PATHS:
        path = PATHS[name]
        found[name] = {"kind": path.kind, "commit": commit()} | MEASURES[path.kind](name, path, args.rounds)
        print(name, json.dumps(found[name]), flush=True)
        if args.out:
            write_json(args.out, machine_info() | {"paths": found})


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", action="append", choices=PATHS, help="a path; may be given several times")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file; paths that are not measured now stay in it")
    parser.add_argument("--inner", choices=INNER, help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args()


def in_turns(measure: Measure, rounds: int) -> dict[str, Any]:
    """Medians, ratios and rounds of every figure. The order of the sides alternates."""
    rows: dict[bool, list[Figures]] = {False: [], True: []}
    for index in range(rounds):
        for off in (index % 2 == 1, index % 2 == 0):
            rows[off].append(measure(off))
    result = {}
    for unit in rows[False][0]:
        on, off_ = (statistics.median(row[unit] for row in rows[side]) for side in (False, True))
        sides = {"on": [r[unit] for r in rows[False]], "off": [r[unit] for r in rows[True]]}
        result[unit] = {"on": on, "off": off_, "ratio": round(off_ / on, 3), "rounds": sides}
    return result


def variables(name: str, path: SpecialPath, off: bool) -> tuple[dict[str, str], list[str]]:
    """Environment and flags of a side."""
    names = [path.without] * bool(path.without) + [name] * off
    env = {key: value for n in names for key, value in PATHS[n].env}
    return env | {SWITCH: "+".join(names)}, [flag for n in names for flag in PATHS[n].flags]


def in_rank(name: str, path: SpecialPath, off: bool, inner: str, words: list[str]) -> Any:
    """What `--inner` prints as the one rank of a trainer."""
    env, flags = variables(name, path, off)
    values = torchrun.trainer_env(torchrun_threads()) | env
    command_line.trainer_env = lambda _: {key: value for key, value in values.items() if value}
    return under_torchrun(__file__, ["--inner", inner, "--", *words, *flags])


def torchrun_threads() -> int:
    from skylite.processes.machine import cpu_cores

    return cpu_cores()


def train_turns(name: str, path: SpecialPath, rounds: int) -> dict[str, Any]:
    def measure(off: bool) -> Figures:
        row = in_rank(name, path, off, "train", list(TRAIN))
        return {"s per step": row["seconds"], "peak MiB": round(row["peak_gib"] * 1024)}

    return in_turns(measure, rounds)


def train_once(words: list[str]) -> None:
    """train_phase.py with every second completion cut short, as lengths differ in a real step."""
    switch_off()
    full = train_phase.random_groups
    train_phase.random_groups = lambda args, seed: [
        replace(group, trajectories=tuple(shortened(k, i, t) for i, t in enumerate(group.trajectories)))
        for k, group in enumerate(full(args, seed))
    ]
    train_phase.inner(train_phase.parse_arguments(words))


def shortened(group: int, index: int, trajectory: Any) -> Any:
    kept = MAX_TOKENS - index % 2 * (17 * (index + GROUP_SIZE * group) % 89)
    (sample,) = trajectory.samples
    ids, logprobs = sample.completion_token_ids[:kept], sample.rollout_logprobs[:kept]
    return replace(
        trajectory, samples=(replace(sample, completion_token_ids=ids, rollout_logprobs=logprobs),)
    )


def sync_turns(name: str, path: SpecialPath, rounds: int) -> dict[str, Any]:
    return in_rank(name, path, False, "sync", [name, str(max(rounds, 9))])  # type: ignore[no-any-return]


def sync_rounds(words: list[str]) -> None:
    from skylite.adapters.manifest import Canary
    from skylite.config.train import RunConfig
    from skylite.model.distributed import process_group, set_threads
    from skylite.model.policy import load_policy
    from skylite.model.probing import enable_fast_paths
    from skylite.trainer import loop, publish

    path, tokens, versions = PATHS[words[0]], [list(range(20, 44)), list(range(60, 84))], iter(range(1000))
    set_threads(None)
    with process_group("cpu") as dist, tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        args = train_phase.parse_arguments(list(TRAIN))
        config, where = train_phase.settings(args, train_phase.model_folder(MODEL), "cpu")
        policy, _ = enable_fast_paths(load_policy(where, config, dist), tokens[0])
        where = where.model_copy(update={"lora_sync_path": folder})
        run_config = RunConfig(skylite_version="benchmark", config=config, resolved=where)

        def canary() -> Canary:
            with loop.half_the_threads():
                found = publish.canary_logprobs(policy, tokens)
            return Canary(sequences=tokens, policy_logprobs=found, base_logprobs=found)

        def measure(off: bool) -> Figures:
            undo = apply(path.off() if off else {})
            started = time.perf_counter()
            done = publish.publish(policy, run_config, next(versions), canary)
            seconds = time.perf_counter() - started
            undo()
            return {"ms with canary": round(seconds * 1e3, 1), "ms written": round(done.seconds * 1e3, 1)}

        measure(False), measure(True)
        print(json.dumps(in_turns(measure, int(words[1]))))


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
    return [[random.randrange(100, 20000) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]


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
    """Off: the two canary sequences are scored before the step is sampled, on: at the same time."""
    versions = iter(range(2, 1000))
    with tempfile.TemporaryDirectory(prefix="skylite-") as text, ThreadPoolExecutor(2) as pool:
        args, adapter = sampled_model(Path(text))
        variant = lora_sampling.Variant("server")
        with lora_sampling.running(variant, args, Path(text), adapter) as http:

            def measure(off: bool) -> Figures:
                model = f"policy-{next(versions)}"
                body = {"lora_name": model, "lora_path": str(adapter)}
                started = time.perf_counter()
                http.post("/v1/load_lora_adapter", json=body).raise_for_status()
                score = {"model": model, "max_tokens": 1, "prompt_logprobs": 0}
                bodies = [score | {"prompt": p[:24]} for p in random_prompts()[:2]]
                canary = [pool.submit(http.post, "/v1/completions", json=b) for b in bodies]
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


def read_turns(name: str, path: SpecialPath, rounds: int) -> dict[str, Any]:
    from skylite.run.rollout_file import write_rollouts

    args = train_phase.parse_arguments(list(TRAIN))
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        file = Path(folder, "rollouts.parquet")
        groups = train_phase.random_groups(args, 0)
        write_rollouts(
            file,
            [
                replace(g, prompt=replace(g.prompt, messages=[{"role": "user", "content": "?"}]))
                for g in groups
            ],
        )
        return in_turns(lambda off: in_rank(name, path, off, "read", [str(file)]), rounds)


def read_once(words: list[str]) -> None:
    from skylite.run.rollout_file import read_rollouts

    switch_off()
    before, started = train_phase.rss_gib("now"), time.perf_counter()
    read_rollouts(Path(words[0]))
    seconds = time.perf_counter() - started
    mib = round((train_phase.rss_gib("now") - before) * 1024)
    print(json.dumps({"s": round(seconds, 3), "MiB": mib}))


def start_turns(name: str, path: SpecialPath, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        data, count = Path(folder, "data"), iter(range(1000))
        prepare = [*command_line.SKYLITE, "prepare", "gsm8k", "--synthetic", "--out", str(data)]
        subprocess.run(prepare, check=True)
        command_line.SKYLITE = [sys.executable, __file__, "--run", "skylite.cli"]

        def measure(off: bool) -> Figures:
            os.environ |= variables(name, path, off)[0]
            seconds = startup.run_start(MODEL, data, Path(folder, f"run{next(count)}"))
            return {"s": seconds["sampling_started_s"], "s to the tokenizer": seconds["tokenizer_ready_s"]}

        return in_turns(measure, rounds)


def as_process_of_skylite(words: list[str]) -> None:
    """Run a module's main with the paths of the environment switched off, and its trainer in the same way."""
    command = torchrun.trainer_command

    def trainer_command(*args: Any, **kwargs: Any) -> list[str]:
        found = command(*args, **kwargs)
        module = found.index("skylite.trainer.worker")
        return [*found[: module - 1], __file__, "--run", *found[module:]]

    torchrun.trainer_command = trainer_command
    switch_off()
    sys.argv = words
    import_module(words[0]).main()


MEASURES = {
    "train": train_turns,
    "sync": sync_turns,
    "sample": sample_turns,
    "verify": verify_turns,
    "read": read_turns,
    "start": start_turns,
}
INNER = {"train": train_once, "sync": sync_rounds, "read": read_once}

if __name__ == "__main__":
    main()
