"""Does torch.compile make the train phase faster? Times training steps of one group with and without it.

    python benchmarks/compiled.py --out benchmarks/results/compiled_cpu.json

Four forms, each in its own process: norms and MLPs from skylite (`own`) or from the model (`models`), each
plain and with compiled decoder layers (inductor, dynamic shapes; attention stays uncompiled). Reports the
median step, the first step (which compiles) and the ratio to `own`, the trainer's form.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import train_phase
from command_line import argument_parser, under_torchrun
from machine_info import machine_info
from transformers import AttentionInterface

from skylite.model.attention_backends import BACKENDS, attend, implementation
from skylite.model.checked_shortcuts import enable_shortcuts
from skylite.model.lm_head import linear_head
from skylite.model.loading import decoder_layers
from skylite.model.policy import Policy, load_policy
from skylite.model.process_group import process_group, set_threads
from skylite.processes.hardware import Device
from skylite.run.files import write_json
from skylite.trainer.optimizer import make_optimizer
from skylite.trainer.step import train_step


def main() -> None:
    args = parse_arguments()
    if args.inner:
        print(json.dumps(measured(args, own="own" in args.inner, compiled="compiled" in args.inner)))
        return
    rows: list[dict[str, Any]] = []
    for form in ("own", "own,compiled", "models", "models,compiled"):
        rows.append({"form": form, **under_torchrun(__file__, [*sys.argv[1:], "--inner", form])})
        if "seconds" in rows[0] and "seconds" in rows[-1]:
            rows[-1]["over_ours"] = round(rows[-1]["seconds"] / rows[0]["seconds"], 3)
        print(json.dumps(rows[-1]), flush=True)
    if args.out:
        result = {"dtype": args.dtype, "counted_steps": args.steps - 2, "rows": rows}
        write_json(args.out, machine_info() | result)


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--steps", type=int, default=5, help="per form; the first two compile and are not counted"
    )
    parser.add_argument("--completion", type=int, default=128)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    return parser.parse_args()


def measured(args: argparse.Namespace, *, own: bool, compiled: bool) -> dict[str, Any]:
    """Seconds per step of one form, measured inside a rank."""
    folder = train_phase.model_folder(args.model)
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    words = ["--model", args.model, "--dtype", args.dtype, "--prompts=1", "--budget=8192"]
    words += [f"--steps={args.steps}", f"--completion={args.completion}"]
    sizes = train_phase.parse_arguments(words)
    config, where = train_phase.settings(sizes, folder, device)
    set_threads(None)
    with process_group(device) as dist:
        policy = load_policy(where, config, dist)
        policy = enable_shortcuts(policy, list(range(20, 60)))[0] if own else with_model_parts(policy)
        if compiled:
            # Attention over a prefix tree loops in Python over branch lengths, which inductor cannot compile.
            attention = torch.compiler.disable(partial(attend, BACKENDS["sdpa"]))  # type: ignore[no-untyped-call]
            AttentionInterface.register(implementation("sdpa"), attention)
            for layer in decoder_layers(policy.model.get_base_model()):
                layer.compile(dynamic=True)
        optimizer = make_optimizer(
            "policy", policy.lora, config.optim.lr, config.optim.max_grad_norm, config.optim
        )
        seconds = []
        for step in range(1, args.steps + 1):
            groups = train_phase.random_groups(sizes, step)
            started = time.perf_counter()
            try:
                train_step(policy, optimizer, groups, step, config, dist)
            except Exception as error:  # noqa: BLE001 any error of the compiler is a result
                return {"device": device, "failed": f"{type(error).__name__}: {error}"[:300]}
            seconds.append(time.perf_counter() - started)
    peak = round(train_phase.peak_gib(policy.device), 2)
    return {
        "device": device,
        "seconds": round(statistics.median(seconds[2:]), 3),
        "first_s": round(seconds[0], 2),
        "peak_gib": peak,
    }


def with_model_parts(policy: Policy) -> Policy:
    """The policy with norms and MLPs from transformers; prefix tree and chunked LM head stay."""
    base = policy.model.get_base_model()
    base.set_attn_implementation(implementation("sdpa"))
    return replace(policy, packing="tree", lm_head=linear_head(base))


if __name__ == "__main__":
    main()
