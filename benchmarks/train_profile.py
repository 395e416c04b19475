"""Where does the train phase spend its time on a CPU? Profiles one step of one group, by kind of operation.

    python benchmarks/train_profile.py --out benchmarks/results/train_profile_cpu.json

Shares of the operations' own time, from torch's profiler. Shapes tell matrix products apart: batched ones
belong to attention, those with a side as long as a block of the vocabulary to the LM head, those with a side
of at most the LoRA rank (or several adapters' ranks side by side) to LoRA, the rest to the base. `seconds`
are measured without the profiler.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import train_phase
from command_line import argument_parser, under_torchrun
from machine_info import machine_info

from skylite.model.checked_shortcuts import enable_shortcuts
from skylite.model.chunked_logprobs import BLOCK_VOCAB
from skylite.model.policy import load_policy
from skylite.model.process_group import process_group, set_threads
from skylite.run.files import write_json
from skylite.trainer.optimizer import make_optimizer
from skylite.trainer.step import train_step

PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_")
BATCHED = ("aten::bmm", "aten::baddbmm", "aten::baddbmm_")
RANK, SIBLINGS = 32, 3


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inner:
        print(json.dumps(profile(args.model)))
        return
    result = machine_info() | under_torchrun(__file__, ["--inner", "--model", args.model])
    print(json.dumps(result, indent=1))
    if args.out:
        write_json(args.out, result)


def profile(model: str) -> dict[str, Any]:
    """Seconds of a step of one group, and the share of each kind of operation."""
    words = f"--rank {RANK} --prompts 1 --budget 1200 --checkpointing selective".split()
    sizes = train_phase.parse_arguments(["--model", model, *words])
    config, where = train_phase.settings(sizes, train_phase.model_folder(model), "cpu")
    set_threads(None)
    with process_group("cpu") as dist:
        policy, _ = enable_shortcuts(load_policy(where, config, dist), list(range(20, 60)))
        optimizer = make_optimizer(
            "policy", policy.lora, config.optim.lr, config.optim.max_grad_norm, config.optim
        )
        groups, seconds = train_phase.random_groups(sizes, 1), []
        for step in range(1, sizes.steps + 1):
            started = time.perf_counter()
            train_step(policy, optimizer, groups, step, config, dist)
            seconds.append(time.perf_counter() - started)
        with torch.profiler.profile(
            record_shapes=True, activities=[torch.profiler.ProfilerActivity.CPU]
        ) as profiler:
            train_step(policy, optimizer, groups, 5, config, dist)
        peak = train_phase.matrix_peak(policy.dtype, policy.device)
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
    """The kind of an operation; its name if it is no matrix product."""
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
