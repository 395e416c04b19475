"""What does each special path for speed buy? Each is switched off and on in turns, in one run.

    python benchmarks/special_paths.py --out benchmarks/results/special_paths_cpu.json
    python benchmarks/special_paths.py --only "fused norms" --rounds 3
    python benchmarks/special_paths.py --only "masks cached" --tokens 512  # longer completions

switched_off.py names the paths. SmolLM2-135M, rank 32, 4 prompts x 8 completions of at most 128 tokens:

- train: the train phase (train_phase.py): seconds of the step after the first, and the process's peak MiB
- sample: two vLLM servers with an adapter: tokens per second and MiB (PSS) of each
- start: `skylite train` to its first rollout request (startup.py): seconds

`ratio` is off / on of the medians. Compare figures of one row only: the machine's speed changes between rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import command_line
import startup
import train_phase
from command_line import argument_parser, under_torchrun
from machine_info import commit, machine_info
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
from special_paths_sampling import sample_turns
from switched_off import PATHS, SpecialPath, switch_off

from skylite.processes import torchrun
from skylite.processes.hardware import cpu_cores
from skylite.run.files import write_json

TRAIN = ("--model", MODEL, "--checkpointing=selective", "--packing=tree", "--steps=2")


def main() -> None:
    if sys.argv[1:2] == ["--instead-of"]:  # as a process of skylite: --instead-of MODULE ARGUMENTS
        as_process_of_skylite(sys.argv[2:])
        return
    args = parse_arguments()
    if args.inner:
        INNER[args.inner](args.words)
        return
    found = json.loads(args.out.read_text("utf-8"))["paths"] if args.out and args.out.exists() else {}
    for name in args.only or PATHS:
        path = PATHS[name]
        row = {"kind": path.kind, "commit": commit()}
        if path.kind == "train":
            row |= train_turns(name, path, args.rounds, args.tokens)
        else:
            row |= MEASURES[path.kind](name, path, args.rounds)
        label = name if args.tokens == MAX_TOKENS else f"{name}, {args.tokens} tokens"
        found[label] = row | {"machine": machine_info()["machine"]}
        print(label, json.dumps(found[label]), flush=True)
        if args.out:
            write_json(args.out, machine_info() | {"paths": found})


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", action="append", choices=PATHS, help="a path; may be given several times")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=MAX_TOKENS, help="of a completion; kind train only")
    parser.add_argument("--out", type=Path, help="JSON file; paths that are not measured now stay in it")
    parser.add_argument("--inner", choices=INNER, help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args()


def in_rank(name: str, path: SpecialPath, off: bool, inner: str, words: list[str]) -> Any:
    """What `--inner` prints as the one rank of a trainer."""
    env, flags = variables(name, path, off)
    values = torchrun.trainer_env(cpu_cores()) | env
    given = {key: value for key, value in values.items() if value}
    return under_torchrun(__file__, ["--inner", inner, "--", *words, *flags], env=given)


def train_turns(name: str, path: SpecialPath, rounds: int, tokens: int) -> dict[str, Any]:
    """A micro-batch holds one group. Longer completions have fewer prompts."""
    prompts, budget = NUM_PROMPTS * MAX_TOKENS // tokens, PROMPT_TOKENS + GROUP_SIZE * tokens + 70
    sizes = [f"--prompts={prompts}", f"--completion={tokens}", f"--budget={budget}"]

    def measure(off: bool) -> Figures:
        row = in_rank(name, path, off, "train", [*TRAIN, *sizes])
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
    (sample,) = trajectory.samples
    kept = len(sample.completion_token_ids) - index % 2 * (17 * (index + GROUP_SIZE * group) % 89)
    ids, logprobs = sample.completion_token_ids[:kept], sample.rollout_logprobs[:kept]
    return replace(
        trajectory, samples=(replace(sample, completion_token_ids=ids, rollout_logprobs=logprobs),)
    )


def start_turns(name: str, path: SpecialPath, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        data, count = Path(folder, "data"), iter(range(1000))
        prepare = [*command_line.SKYLITE, "prepare", "gsm8k", "--synthetic", "--out", str(data)]
        subprocess.run(prepare, check=True)
        command_line.SKYLITE = [sys.executable, __file__, "--instead-of", "skylite.cli"]

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
        return [*found[: module - 1], __file__, "--instead-of", *found[module:]]

    torchrun.trainer_command = trainer_command
    switch_off()
    sys.argv = words
    import_module(words[0]).main()


MEASURES = {
    "sample": sample_turns,
    "start": start_turns,
}
INNER = {"train": train_once}
if __name__ == "__main__":
    main()
