"""Time the train phase alone on random samples: seconds, tokens, peak memory and MFU.

    python benchmarks/train_phase.py --model smollm2-135m
    python benchmarks/train_phase.py --model smollm2-135m --group-size 8 16 --completion 128 512 --out FILE
    python benchmarks/train_phase.py --model smollm2-135m --packing tree padded     (shared prompts or not)

Every combination of the lists runs in its own process, so that peak memory belongs to it alone. `--ranks 2`
uses two ranks.

MFU (model FLOPs utilisation) = FLOP of a step / seconds / peak. A frozen weight costs 4 FLOP per token (2
forward, 2 for the gradient of its input), a LoRA weight 6; attention is not counted. Peak: the measured rate
of a large matrix product (`matrix_peak`) on the same threads, mean of before and after the steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shared import argument_parser, machine_info, under_torchrun

from skylite.processes.hardware import Device
from skylite.run.files import write_json

if TYPE_CHECKING:
    import torch

    from skylite.config.resolved import Resolved
    from skylite.config.train import TrainConfig
    from skylite.model.policy import Policy
    from skylite.model.process_group import Dist
    from skylite.trainer.optimizer import FlatAdamW
    from skylite.types import Group

SIZES = {"prompts": 4, "group_size": 8, "prompt": 106, "completion": 128, "rank": 32, "budget": 2048}
AXES = (*SIZES, "packing", "checkpointing", "attention")


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
        write_json(args.out, machine_info() | {"rows": rows})


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", required=True, help="smollm2-135m or a model folder")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    for axis, default in SIZES.items():
        parser.add_argument(f"--{axis.replace('_', '-')}", nargs="+", type=int, default=[default])
    parser.add_argument("--packing", nargs="+", choices=["tree", "padded"], default=["tree"])
    parser.add_argument("--checkpointing", nargs="+", choices=["none", "selective", "full"], default=["none"])
    parser.add_argument(
        "--attention", nargs="+", choices=["sdpa", "flex"], default=["sdpa"], help="flex needs a GPU"
    )
    parser.add_argument("--offload", action="store_true", help="trainer.offload; saves memory on GPUs only")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4, help="the first is not counted")
    parser.add_argument("--vocab", type=int, default=20000, help="random token ids are below this")
    parser.add_argument(
        "--publish", action="store_true", help="also time how long the adapter takes to publish"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def in_own_process(args: argparse.Namespace, axes: dict[str, Any]) -> dict[str, Any]:
    """Measure one combination under torchrun."""
    words = ["--inner", "--model", args.model, "--dtype", args.dtype, f"--steps={args.steps}"]
    words += [f"--vocab={args.vocab}", *(f"--{key.replace('_', '-')}={value}" for key, value in axes.items())]
    words += [flag for flag, wanted in (("--publish", args.publish), ("--offload", args.offload)) if wanted]
    found: dict[str, Any] = under_torchrun(__file__, words, args.ranks)
    return axes | {"ranks": args.ranks, "offload": args.offload} | found


def inner(args: argparse.Namespace) -> None:
    """One combination, inside a rank; rank 0 prints its numbers as JSON."""
    import torch

    from skylite.model.fast_path_check import enable_shortcuts
    from skylite.model.policy import load_policy
    from skylite.model.process_group import process_group, set_threads
    from skylite.trainer.optimizer import make_optimizer

    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    set_threads(None)
    with process_group(device) as dist:
        config, where = settings(args, model_folder(args.model), device, offload=args.offload)
        policy, _ = enable_shortcuts(load_policy(where, config, dist), list(range(20, 60)))
        if args.packing == ["padded"]:
            policy.model.get_base_model().set_attn_implementation("sdpa")
            policy = replace(policy, packing="padded")
        optim = config.optim
        optimizer = make_optimizer(
            "policy", policy.lora, optim.lr, optim.max_grad_norm, optim, offload=args.offload
        )
        loaded, peak = rss_gib("now"), [matrix_peak(policy.dtype, policy.device)]
        seconds, metrics = timed_steps(args, policy, optimizer, config, dist)
        peak.append(matrix_peak(policy.dtype, policy.device))
        rate = statistics.mean(peak)
        flop = work(count_weights(policy), metrics, args.packing == ["tree"])
        found = {
            "seconds": round(seconds, 3),
            "tokens_total": metrics["tokens/total"],
            "tokens_computed": metrics["tokens/unique"],
            "tokens_per_s": round(metrics["tokens/total"] / seconds, 1),
            "peak_gib": round(peak_gib(policy.device), 2),
            "loaded_gib": round(loaded, 2),
            "matrix_gflops": round(rate / 1e9, 1),
            "mfu": round(flop / seconds / dist.dp_size / rate, 3),
        }
        if args.publish:
            found |= published(policy, config, where)
        if dist.is_main:
            print(json.dumps(found))


def timed_steps(
    args: argparse.Namespace, policy: Policy, optimizer: FlatAdamW, config: TrainConfig, dist: Dist
) -> tuple[float, dict[str, float]]:
    """Median seconds of the steps after the first, and the last step's metrics."""
    from skylite.run.rollout_file import examples_of
    from skylite.trainer.step import train_step
    from skylite.trainer.trainer import Trainer

    trainer = Trainer(config=config, dist=dist, policy=policy, optimizer=optimizer)
    seconds: list[float] = []
    for step in range(1, args.steps + 1):
        examples = examples_of(random_groups(args, step))
        started = time.perf_counter()
        metrics = train_step(trainer, examples, step)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:]), metrics


def model_folder(model: str) -> str:
    """The folder of a model. An existing folder is not checked: random weights have no tokenizer."""
    from skylite.hub.resolve import resolve_model

    return model if Path(model).is_dir() else str(resolve_model(model).path)


def settings(
    args: argparse.Namespace, model: str, device: str, offload: bool = False
) -> tuple[TrainConfig, Resolved]:
    """Settings of a run with these sizes. The lists in `args` hold one value each."""
    from skylite.config.train import TrainConfig
    from tests.decisions import resolved

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
    return config, resolved(Path(model), Path(), placement={"dtype": args.dtype, "device": device})


def random_groups(args: argparse.Namespace, seed: int) -> list[Group]:
    """Groups of random tokens. One trajectory per group has reward 1, so that every group has a gradient."""
    from skylite.types import Call, Group, Prompt, Trajectory

    rng = random.Random(seed)
    groups = []
    for number in range(args.prompts[0]):
        prompt = [rng.randrange(args.vocab) for _ in range(args.prompt[0])]
        completions = [
            [rng.randrange(args.vocab) for _ in range(args.completion[0])] for _ in range(args.group_size[0])
        ]
        trajectories = tuple(
            Trajectory(
                calls=(
                    Call(
                        prompt_token_ids=prompt,
                        completion_token_ids=completion,
                        sampling_logprobs=[-10.0] * len(completion),
                    ),
                ),
                reward=float(index == 0),
            )
            for index, completion in enumerate(completions)
        )
        row = Prompt(id=f"random/{number}", messages=[], answer="", source="random")
        groups.append(Group(prompt=row, trajectories=trajectories))
    return groups


def count_weights(policy: Policy) -> dict[str, int]:
    """Weights that every token uses (body), those that completion tokens use (LM head), and LoRA's."""
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
    """FLOP of a step over all ranks. The LM head counts one forward, although it is recomputed."""
    tokens = metrics["tokens/unique"] if is_tree else metrics["tokens/total"]
    return (
        4.0 * weights["body"] * tokens
        + 4.0 * weights["head"] * metrics["tokens/completion"]
        + 6.0 * weights["lora"] * tokens
    )


def matrix_peak(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP per second of a large matrix product, the best of ten timings."""
    import torch

    on_gpu = device.type == "cuda"
    # On a GPU one such product is as short as its launch and the wait for it, so larger ones run in a row.
    rows, inner, columns, count = (8192, 8192, 8192, 20) if on_gpu else (2048, 1024, 4096, 1)
    a = torch.randn(rows, inner, dtype=dtype, device=device)
    b = torch.randn(inner, columns, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(10):
        started = time.perf_counter()
        for _ in range(count):
            product = a @ b
        product[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - started)
    return 2 * rows * inner * columns * count / best


def published(policy: Policy, config: TrainConfig, where: Resolved) -> dict[str, float]:
    """Median seconds of three publishes, and the size. Files only: no canary, and no engine loads them."""
    import tempfile

    from skylite.adapters.manifest import Canary
    from skylite.config.train import RunConfig
    from skylite.trainer.publish_adapter import write_adapter
    from tests.decisions import changed

    seconds = []
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        run_config = RunConfig(
            skylite_version="benchmark",
            config=config,
            resolved=changed(where, identity={"lora_sync_path": folder}),
        )
        for version in range(3):
            started = time.perf_counter()
            canary = Canary(sequences=[], policy_logprobs=[], base_logprobs=[])
            adapter = write_adapter(policy, run_config, version, canary)
            seconds.append(time.perf_counter() - started)
        num_bytes = adapter.weights_path.stat().st_size
    return {"publish_s": round(statistics.median(seconds), 3), "adapter_mb": round(num_bytes / 1e6, 1)}


def peak_gib(device: torch.device) -> float:
    """Peak memory in GiB: allocated on the GPU, or resident in this process on a CPU."""
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else rss_gib("peak")


def rss_gib(which: Literal["now", "peak"]) -> float:
    """Resident memory of this process in GiB."""
    if which == "peak":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (
        int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize() / 2**30
    )


if __name__ == "__main__":
    main()
