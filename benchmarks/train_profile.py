"""Where the train phase spends its time on a CPU: one step of one group under torch's profiler, by kind of work.

    python benchmarks/train_profile.py --out benchmarks/results/train_profile_cpu.json

Shares of the operations' own time. Matrix products are told apart by their shapes: batched ones are attention's, a side as long as the
head's blocks of words is the head's, one no longer than the rank (or the ranks of siblings together) is LoRA's, the rest are those with
the base. The profiler itself slows the step; `seconds` are without it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import train_phase
from surroundings import about

from skylite.hub.resolve import resolve_model
from skylite.model.chunked_logprobs import BLOCK_VOCAB
from skylite.model.distributed import process_group, set_threads
from skylite.model.policy import load_policy
from skylite.model.probing import enable_fast_paths
from skylite.processes.machine import cpu_cores
from skylite.processes.torchrun import trainer_env
from skylite.run.files import write_json
from skylite.trainer.optimizer import make_optimizer
from skylite.trainer.step import train_step

PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_")
BATCHED = ("aten::bmm", "aten::baddbmm", "aten::baddbmm_")
RANK, SIBLINGS = 32, 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inner:
        print(json.dumps(profile(args.model)))
        return
    # The trainer's own environment, its allocator included, which has to be there before Python starts.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command = [*torchrun, __file__, "--inner", "--model", args.model]
    done = subprocess.run(
        command, env=os.environ | trainer_env(cpu_cores()), stdout=subprocess.PIPE, text=True, check=True
    )
    result = about() | json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(result, indent=1))
    if args.out:
        write_json(args.out, result)


def profile(model: str) -> dict[str, Any]:
    """Seconds of a step of one group, and the shares of its kinds of work."""
    folder = str(resolve_model(model, say=lambda _: None).path)
    words = [
        "--model",
        model,
        "--rank",
        str(RANK),
        "--prompts",
        "1",
        "--budget",
        "1200",
        "--checkpointing",
        "selective",
    ]
    sizes = train_phase.parse_arguments(words)
    config, where = train_phase.settings(sizes, folder, "cpu")
    set_threads(None)
    with process_group("cpu") as dist:
        policy, _ = enable_fast_paths(load_policy(where, config, dist), list(range(20, 60)))
        optimizer = make_optimizer(
            "policy", policy.lora, config.optim.lr, config.optim.max_grad_norm, config.optim
        )
        samples, seconds = train_phase.made_up(sizes, 1), []
        for step in range(1, sizes.steps + 1):
            started = time.perf_counter()
            train_step(policy, optimizer, samples, step, config, dist)
            seconds.append(time.perf_counter() - started)
        with torch.profiler.profile(
            record_shapes=True, activities=[torch.profiler.ProfilerActivity.CPU]
        ) as profiler:
            train_step(policy, optimizer, samples, 5, config, dist)
        peak = train_phase.matrix_peak(policy)
    spent: Counter[str] = Counter()
    for event in profiler.key_averages(group_by_input_shape=True):
        spent[kind(event.key, event.input_shapes)] += event.self_cpu_time_total
    total = spent.total()
    return {
        "seconds": round(sorted(seconds[1:])[len(seconds[1:]) // 2], 3),
        "matrix_gflops": round(peak / 1e9, 1),
        "shares": {name: round(us / total, 4) for name, us in spent.most_common(16)},
    }


def kind(name: str, shapes: list[list[int]]) -> str:
    """What an operation is for."""
    if name in BATCHED:
        return "products of attention"
    if name not in PRODUCTS:
        return name
    sides = {side for shape in shapes if len(shape) >= 2 for side in shape[-2:]}
    if BLOCK_VOCAB in sides:
        return "products of the head"
    return "products of LoRA" if min(sides) <= RANK * SIBLINGS else "products with the base"


if __name__ == "__main__":
    main()
