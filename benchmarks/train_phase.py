"""The train phase alone, on made-up samples of given sizes: seconds, tokens, peak memory, and the share of the machine's matrix peak.

    python benchmarks/train_phase.py --model smollm2-135m
    python benchmarks/train_phase.py --model smollm2-135m --prompts 4 --group-size 8 16 --completion 128 512 --rank 8 128 --out FILE
    python benchmarks/train_phase.py --model smollm2-135m --packing tree padded        (with and without sharing the prompt)

Every combination of the lists runs in a process of its own, so that its peak memory is its own; `--ranks 2` puts torchrun around it.

The share (model FLOPs utilisation) is arithmetic: forward and backward through frozen weights take 4 FLOP a weight and token that goes
through them (2 forward, 2 for the gradient of the input; none for that of the weight), LoRA's own 6 a weight and token, attention left
out; divided by seconds and by the rate of a [2048, 1024] x [1024, 4096] product on the same threads (on a GPU: of twenty products of
[8192, 8192] in a row), measured in the same process before and after.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from surroundings import about

from skylite.run.files import write_json

AXES = (
    "prompts",
    "group_size",
    "prompt",
    "completion",
    "rank",
    "budget",
    "packing",
    "checkpointing",
    "attention",
)


def main() -> None:
    args = parse_arguments()
    if args.inner:
        inner(args)
        return
    rows = []
    for values in itertools.product(*(getattr(args, axis) for axis in AXES)):
        rows.append(in_own_process(args, dict(zip(AXES, values, strict=True))))
        print(json.dumps(rows[-1]), flush=True)
    if args.out:
        write_json(args.out, about() | {"rows": rows})


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="smollm2-135m or a model folder")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    for axis, default in (
        ("prompts", 4),
        ("group-size", 8),
        ("prompt", 106),
        ("completion", 128),
        ("rank", 32),
        ("budget", 2048),
    ):
        parser.add_argument(f"--{axis}", nargs="+", type=int, default=[default])
    parser.add_argument("--packing", nargs="+", choices=["tree", "padded"], default=["tree"])
    parser.add_argument("--checkpointing", nargs="+", choices=["none", "selective", "full"], default=["none"])
    parser.add_argument(
        "--attention", nargs="+", choices=["sdpa", "flex"], default=["sdpa"], help="flex: on a GPU only"
    )
    parser.add_argument(
        "--offload",
        action="store_true",
        help="trainer.offload; on a CPU it measures nothing but that it works",
    )
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4, help="the first is not counted")
    parser.add_argument("--vocab", type=int, default=20000, help="made-up tokens are drawn below this")
    parser.add_argument("--publish", action="store_true", help="also time the adapter's way to the disk")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def in_own_process(args: argparse.Namespace, axes: dict[str, Any]) -> dict[str, Any]:
    from skylite.processes.machine import cpu_cores
    from skylite.processes.torchrun import trainer_env

    flags = [f"--{key.replace('_', '-')}={value}" for key, value in axes.items()]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={args.ranks}",
        __file__,
        "--inner",
    ]
    command += [
        "--model",
        args.model,
        "--dtype",
        args.dtype,
        f"--steps={args.steps}",
        f"--vocab={args.vocab}",
        *flags,
    ]
    command += [flag for flag, wanted in (("--publish", args.publish), ("--offload", args.offload)) if wanted]
    env = os.environ | trainer_env(max(1, cpu_cores() // args.ranks))
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return axes | {"ranks": args.ranks, "offload": args.offload} | found


def inner(args: argparse.Namespace) -> None:
    """One combination, in a rank."""
    import torch

    from skylite.hub.resolve import resolve_model
    from skylite.model.distributed import process_group, set_threads
    from skylite.model.policy import load_policy
    from skylite.model.probing import enable_fast_paths
    from skylite.trainer.optimizer import make_optimizer
    from skylite.trainer.step import train_step

    device = "cuda" if torch.cuda.is_available() else "cpu"
    set_threads(None)
    with process_group(device) as dist:
        # A folder is taken as it is: random weights have no tokenizer.
        folder = (
            args.model
            if Path(args.model).is_dir()
            else str(resolve_model(args.model, say=lambda _: None).path)
        )
        config, where = settings(args, folder, device, offload=args.offload)
        policy, _ = enable_fast_paths(load_policy(where, config, dist), list(range(20, 60)))
        if args.packing == ["padded"]:
            policy.model.get_base_model().set_attn_implementation("sdpa")
            policy = replace(policy, packing="padded")
        optimizer = make_optimizer(
            "policy",
            policy.lora,
            config.optim.lr,
            config.optim.max_grad_norm,
            config.optim,
            offload=args.offload,
        )
        weights = count_weights(policy)
        loaded, peak, seconds = rss_gib("now"), [matrix_peak(policy)], []
        for step in range(1, args.steps + 1):
            samples = made_up(args, step)
            started = time.perf_counter()
            metrics = train_step(policy, optimizer, samples, step, config, dist)
            seconds.append(time.perf_counter() - started)
        peak.append(matrix_peak(policy))
        median = statistics.median(seconds[1:])
        flop = work(weights, metrics, args.packing == ["tree"])
        rate = statistics.mean(peak)
        found = {
            "seconds": round(median, 3),
            "tokens_total": metrics["tokens/total"],
            "tokens_computed": metrics["tokens/unique"],
            "tokens_per_s": round(metrics["tokens/total"] / median, 1),
            "peak_gib": round(peak_gib(policy), 2),
            "loaded_gib": round(loaded, 2),
            "matrix_gflops": round(rate / 1e9, 1),
            "mfu": round(flop / median / dist.dp_size / rate, 3),
        }
        if args.publish:
            found |= published(policy, config, where)
        if dist.is_main:
            print(json.dumps(found))


def settings(args: argparse.Namespace, model: str, device: str, offload: bool = False) -> Any:
    from skylite.config.train import Resolved, TrainConfig

    config = TrainConfig.model_validate(
        {
            "num_steps": args.steps,
            "lora": {"rank": args.rank[0], "alpha": 32},
            "rollout": {
                "prompts_per_step": args.prompts[0],
                "group_size": args.group_size[0],
                "max_completion_tokens": args.completion[0],
            },
            "trainer": {
                "tokens_per_micro_batch": args.budget[0],
                "checkpointing": args.checkpointing[0],
                "attention": args.attention[0],
                "offload": offload,
            },
        }
    )
    return config, Resolved(
        model_path=model, model_fingerprint="", dtype=args.dtype, device=device, lora_sync_path=""
    )


def made_up(args: argparse.Namespace, seed: int) -> list[Any]:
    """Groups of random tokens; one trajectory in each is right, so that every group has a gradient."""
    from skylite.types import Group, Prompt, Sample, Trajectory

    rng = random.Random(seed)
    groups = []
    for number in range(args.prompts[0]):
        prompt = [rng.randrange(args.vocab) for _ in range(args.prompt[0])]
        completions = [
            [rng.randrange(args.vocab) for _ in range(args.completion[0])] for _ in range(args.group_size[0])
        ]
        trajectories = tuple(
            Trajectory(
                samples=(
                    Sample(
                        prompt_token_ids=prompt,
                        completion_token_ids=completion,
                        rollout_logprobs=[-10.0] * len(completion),
                    ),
                ),
                reward=float(index == 0),
            )
            for index, completion in enumerate(completions)
        )
        row = Prompt(id=f"random/{number}", messages=[], answer="", source="random")
        groups.append(Group(prompt=row, trajectories=trajectories))
    return groups


def count_weights(policy: Any) -> dict[str, int]:
    """Weights that every token goes through, those of the head (completion tokens alone), and LoRA's."""
    base = policy.model.get_base_model()
    head = base.get_output_embeddings().weight.numel()
    embedding = base.get_input_embeddings().weight.numel()
    tied = base.config.get_text_config().tie_word_embeddings
    total = sum(p.numel() for n, p in policy.model.named_parameters() if ".lora_" not in n)
    return {
        "body": total - embedding - (0 if tied else head),
        "head": head,
        "lora": sum(p.numel() for p in policy.lora.values()),
    }


def work(weights: dict[str, int], metrics: dict[str, float], is_tree: bool) -> float:
    """FLOP of a step over all ranks. The head is counted for forward and backward once; that we make its product twice is our loss."""
    tokens = metrics["tokens/unique"] if is_tree else metrics["tokens/total"]
    return (
        4.0 * weights["body"] * tokens
        + 4.0 * weights["head"] * metrics["tokens/completion"]
        + 6.0 * weights["lora"] * tokens
    )


def matrix_peak(policy: Any) -> float:
    """FLOP a second of large matrix products, the best of ten timings."""
    import torch

    on_gpu = torch.device(policy.device).type == "cuda"
    # A GPU does the CPU's product in some 30 us, no longer than starting it and asking for its result takes.
    rows, inner, columns, count = (8192, 8192, 8192, 20) if on_gpu else (2048, 1024, 4096, 1)
    a = torch.randn(rows, inner, dtype=policy.dtype, device=policy.device)
    b = torch.randn(inner, columns, dtype=policy.dtype, device=policy.device)
    best = float("inf")
    for _ in range(10):
        started = time.perf_counter()
        for _ in range(count):
            product = a @ b
        product[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - started)
    return 2 * rows * inner * columns * count / best


def published(policy: Any, config: Any, where: Any) -> dict[str, float]:
    """Median seconds, and bytes, of three publishes into a folder of its own: the files alone, no canary and no engine that loads them."""
    import tempfile

    from skylite.adapters.manifest import Canary
    from skylite.config.train import RunConfig
    from skylite.trainer.publish import publish

    seconds = []
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        run_config = RunConfig(
            skylite_version="benchmark",
            config=config,
            resolved=where.model_copy(update={"lora_sync_path": folder}),
        )
        for version in range(3):
            started = time.perf_counter()
            done = publish(
                policy,
                run_config,
                version,
                lambda: Canary(sequences=[], policy_logprobs=[], base_logprobs=[]),
            )
            seconds.append(time.perf_counter() - started)
    return {"publish_s": round(statistics.median(seconds), 3), "adapter_mb": round(done.num_bytes / 1e6, 1)}


def peak_gib(policy: Any) -> float:
    """Of the device that computes: the GPU's own count, or this process's memory."""
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if policy.device.type == "cuda" else rss_gib("peak")


def rss_gib(which: str) -> float:
    if which == "peak":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (
        int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize() / 2**30
    )


if __name__ == "__main__":
    main()
