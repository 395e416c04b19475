"""Whether torch.compile pays in the train phase: forward and backward of one group, as the trainer computes it and with compiled layers.

    python benchmarks/compiled.py --out benchmarks/results/compiled_cpu.json

Four forms, each in a process of its own: with skylite's own operations for norms and MLPs or with the model's, each as it is and with
every decoder layer but its attention compiled (inductor, dynamic shapes). Median seconds, those of the first step (compiling), and over
the trainer's form.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import train_phase
from surroundings import about
from transformers import AttentionInterface

from skylite.hub.resolve import resolve_model
from skylite.model.attention_backends import BACKENDS, attend, implementation
from skylite.model.distributed import process_group, set_threads
from skylite.model.lm_head import plain_head
from skylite.model.loading import decoder_layers
from skylite.model.policy import Policy, load_policy
from skylite.model.probing import enable_fast_paths
from skylite.processes.machine import cpu_cores
from skylite.processes.torchrun import trainer_env
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
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
        command = [*torchrun, __file__, *sys.argv[1:], "--inner", form]
        done = subprocess.run(
            command, env=os.environ | trainer_env(cpu_cores()), stdout=subprocess.PIPE, text=True, check=True
        )
        rows.append({"form": form, **json.loads(done.stdout.splitlines()[-1])})
        if "seconds" in rows[0] and "seconds" in rows[-1]:
            rows[-1]["over_ours"] = round(rows[-1]["seconds"] / rows[0]["seconds"], 3)
        print(json.dumps(rows[-1]), flush=True)
    if args.out:
        write_json(args.out, about() | {"dtype": args.dtype, "counted_steps": args.steps - 2, "rows": rows})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--steps", type=int, default=5, help="a form; the first two are not counted, they compile"
    )
    parser.add_argument("--completion", type=int, default=128)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    return parser.parse_args()


def measured(args: argparse.Namespace, *, own: bool, compiled: bool) -> dict[str, Any]:
    """Seconds a step of one form, in a rank."""
    folder = (
        args.model if Path(args.model).is_dir() else str(resolve_model(args.model, say=lambda _: None).path)
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = [
        "--model",
        args.model,
        "--dtype",
        args.dtype,
        "--steps",
        str(args.steps),
        "--completion",
        str(args.completion),
    ]
    sizes = train_phase.parse_arguments([*words, "--prompts", "1", "--budget", "8192"])
    config, where = train_phase.settings(sizes, folder, device)
    set_threads(None)
    with process_group(device) as dist:
        policy = load_policy(where, config, dist)
        policy = (
            enable_fast_paths(policy, list(range(20, 60)))[0] if own else with_the_models_own_parts(policy)
        )
        if compiled:
            # Attention over a tree is Python over its branches' lengths, which the compiler does not take.
            AttentionInterface.register(
                implementation("sdpa"), torch.compiler.disable(partial(attend, BACKENDS["sdpa"]))
            )
            for layer in decoder_layers(policy.model.get_base_model()):
                layer.compile(dynamic=True)
        optimizer = make_optimizer(
            "policy", policy.lora, config.optim.lr, config.optim.max_grad_norm, config.optim
        )
        seconds = []
        for step in range(1, args.steps + 1):
            samples = train_phase.made_up(sizes, step)
            started = time.perf_counter()
            try:
                train_step(policy, optimizer, samples, step, config, dist)
            except Exception as error:  # noqa: BLE001 whatever the compiler raises is the finding
                return {"device": device, "failed": f"{type(error).__name__}: {error}"[:300]}
            seconds.append(time.perf_counter() - started)
    peak = round(train_phase.peak_gib(policy), 2)
    return {
        "device": device,
        "seconds": round(statistics.median(seconds[2:]), 3),
        "first_s": round(seconds[0], 2),
        "peak_gib": peak,
    }


def with_the_models_own_parts(policy: Policy) -> Policy:
    """Tree and head in chunks as always, norms and MLPs as transformers has them."""
    base = policy.model.get_base_model()
    base.set_attn_implementation(implementation("sdpa"))
    return replace(policy, packing="tree", head=plain_head(base))


if __name__ == "__main__":
    main()
