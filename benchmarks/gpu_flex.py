"""FlexAttention on a GPU: every kind of model against plain rows, and the times of its kernels' options.

    python benchmarks/gpu_flex.py --out FILE --until 180
    python benchmarks/gpu_flex.py --out FILE --dry-run     (tiny, on a CPU: not compiled, forward only)

Processes of their own compare the models and compile the options at the same time; then this one times the
options, alone on the GPU, from torch's cache. FILE is written after every row.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "src")]

from gpu_sizes import Sizes, varied_groups  # noqa: E402 -- the paths come first

PROCESSES = 12
ROUNDING = 1e-4
"""Largest difference in float32: of a log-probability, and of the gradient relative to its norm."""
BF16_ROUNDING = 0.02
"""Largest difference of a tensor, relative to its norm, from float32 attention of the same tensors."""
FAMILIES = (
    "qwen2_sliding", "gpt_oss", "gemma2", "deepseek_v3", "qwen2_moe", "llama4_text", "gemma3", "phimoe"
)  # fmt: skip
IN_BF16 = ("qwen2_sliding", "gpt_oss", "gemma2", "qwen2_moe")
"""Families that are also trained as on a GPU: in bfloat16, under autocast."""
TREE = Sizes(prompts=3, group_size=8, prompt=200, median=740, longest=1024, budget=0, vocab=20000)
TINY_TREE = Sizes(prompts=2, group_size=2, prompt=20, median=40, longest=90, budget=0, vocab=500)
HEADS = {"14/2 D64": (14, 2, 64), "28/4 D128": (28, 4, 128), "32/8 D128": (32, 8, 128)}
REPEATS = 7


def forward_options(m: int, n: int, warps: int, stages: int) -> dict[str, Any]:
    return {"fwd_BLOCK_M": m, "fwd_BLOCK_N": n, "fwd_num_warps": warps, "fwd_num_stages": stages}


def backward_options(m: int, n: int, warps: int, stages: int) -> dict[str, Any]:
    """Tiles of `m` queries by `n` keys for the gradients of keys, and the other way round for queries."""
    tiles = {"bwd_BLOCK_M1": m, "bwd_BLOCK_N1": n, "bwd_BLOCK_M2": n, "bwd_BLOCK_N2": m}
    return tiles | {"bwd_num_warps": warps, "bwd_num_stages": stages}


# The most promising first. `grouped`: query heads of a key head in one thread block, as torch does by itself.
# `whole blocks`: as many nodes as fill all blocks, and kernels that rely on it.
OPTIONS: dict[str, dict[str, Any]] = {
    "ours": {},
    "grouped": {},
    "64x64": forward_options(128, 64, 4, 3) | backward_options(64, 64, 4, 3),
    "more warps": forward_options(128, 128, 8, 2) | backward_options(64, 128, 8, 2),
    "fewer warps": forward_options(64, 64, 4, 3) | backward_options(64, 128, 4, 2),
    "whole blocks": {"IS_DIVISIBLE": True},
    "small tiles": forward_options(64, 128, 4, 3) | backward_options(32, 64, 4, 3),
    "tma": {"USE_TMA": True},
}


class Results:
    """What was found, in a file that is written after every row."""

    def __init__(self, path: Path, until: float) -> None:
        self.path, self.started, self.until = path, time.monotonic(), until
        self.rows: dict[str, Any] = {}

    def left(self) -> float:
        """Seconds."""
        return self.until - (time.monotonic() - self.started)

    def add(self, part: str, name: str, row: dict[str, Any]) -> None:
        self.rows.setdefault(part, {})[name] = row
        self.rows["seconds"] = round(time.monotonic() - self.started, 1)
        self.path.write_text(json.dumps(self.rows, indent=1) + "\n", encoding="utf-8")
        print(f"{part} {name}: {json.dumps(row)}", flush=True)


def attempted(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """The row, or `failed` with the reason: an error is a result. And its seconds."""
    started = time.monotonic()
    try:
        row = function(*args)
    except Exception as error:  # noqa: BLE001 -- compilers raise errors of every kind
        row = {"failed": f"{type(error).__name__}: {error}"[:1500]}
    return row | {"s": round(time.monotonic() - started, 1)}


def compare_model(family: str, dtype: str, dry_run: bool) -> dict[str, Any]:
    """Log-probabilities and LoRA's gradient through flex over a tree, against plain rows in float32."""
    import torch

    from skylite.model.packing import pack_tokens
    from skylite.model.policy import score
    from tests.rows import completions_of, random_samples
    from tests.tiny_models import make_tiny_model

    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cpu" if dry_run else "cuda")
    rows = random_samples(0, shared=48, num_groups=14)  # more nodes than two blocks
    examples = completions_of(
        [r.prompt_token_ids for r in rows], [r.completion_token_ids for r in rows], [r.group for r in rows]
    )
    found, row = list[list[Any]](), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder), family)
        for attention, number_type in (("sdpa", "float32"), ("flex", dtype)):
            policy, choices = tiny_policy(model, attention, number_type, device)
            if attention == "sdpa":  # the plain form: padded rows and the model's own attention
                policy.model.get_base_model().set_attn_implementation("eager")
                policy = replace(policy, packing="padded")
            else:
                if (policy.packing, policy.attention) != ("tree", "flex"):
                    return {"failed": "flex was not chosen", "choices": choices}
            tokens = pack_tokens(examples, policy.packing, device)
            with torch.no_grad() if dry_run else nullcontext():
                logprobs, _ = score(policy, tokens, temperature=1.0)
            weights = torch.linspace(-1, 1, len(logprobs), device=device)
            gradients = (
                [] if dry_run else torch.autograd.grad((logprobs * weights).sum(), list(policy.lora.values()))
            )
            found.append(
                [logprobs.detach(), *([torch.cat([g.flatten() for g in gradients])] if gradients else [])]
            )
    row |= {"nodes": tokens.num_nodes, "logprob_gap": float((found[1][0] - found[0][0]).abs().max())}
    if not dry_run:
        row["gradient_gap"] = relative(found[1][1], found[0][1])
    gaps = [value for name, value in row.items() if name.endswith("_gap")]
    if dtype == "float32" and not max(gaps) <= ROUNDING:
        row["failed"] = f"differs from plain rows by more than {ROUNDING}"
    return row


def relative(got: Any, expected: Any) -> float:
    return float((got.float() - expected).norm() / expected.norm())


def tiny_policy(model: Path, attention: str, dtype: str, device: Any) -> tuple[Any, list[str]]:
    """A policy with random LoRA weights, and its choices."""
    import torch

    from skylite.config.train import TrainConfig
    from skylite.model.fast_path_check import enable_shortcuts
    from skylite.model.policy import load_policy
    from tests.decisions import resolved
    from tests.one_rank import OneRank

    config = TrainConfig.model_validate(
        {"lora": {"rank": 4, "alpha": 8}, "trainer": {"attention": attention, "checkpointing": "none"}}
    )
    decided = resolved(model, model, placement={"dtype": dtype, "device": device.type})
    dist: Any = OneRank(device)
    policy = load_policy(decided, config, dist)
    generator = torch.Generator().manual_seed(1)
    for name, param in policy.lora.items():
        if "lora_B" in name:
            param.data.copy_(0.05 * torch.randn(param.shape, generator=generator))
    return enable_shortcuts(policy, list(range(20, 44)))


@contextmanager
def using(option: str) -> Iterator[None]:
    """flex_tree_attention with the kernels of an option."""
    from skylite.model import flex_attention as module

    compiled = module._compiled()
    with mock.patch.object(module, "KERNEL_OPTIONS", module.KERNEL_OPTIONS | OPTIONS[option]):
        if option != "grouped":
            yield
            return

        def grouped(*args: Any, **kwargs: Any) -> Any:
            return compiled(*args, **kwargs, enable_gqa=True)

        with (
            mock.patch.object(module, "group_by_key_head", lambda query, _: query),
            mock.patch.object(module, "_compiled", return_value=grouped),
        ):
            yield


def tree_inputs(heads: str, option: str, dry_run: bool) -> tuple[list[Any], Any, Any, int]:
    """Query, key and value in bfloat16, the output's gradient, the layout, and visible pairs of nodes."""
    import torch

    from skylite.model.prefix_tree import build_tree
    from skylite.model.tree_attention import tree_layout

    sequences, numbers = list[list[int]](), list[int]()
    for number, group in enumerate(varied_groups(TINY_TREE if dry_run else TREE, 1)):
        for trajectory in group.trajectories:
            for call in trajectory.calls:
                sequences.append([*call.prompt_token_ids, *call.completion_token_ids])
                numbers.append(number)
    if option == "whole blocks":
        missing = -len(build_tree(sequences, numbers).depths) % 128
        sequences, numbers = [*sequences, [-1 - i for i in range(missing)]], [*numbers, numbers[-1] + 1]
    tree, device = build_tree(sequences, numbers), "cpu" if dry_run else "cuda"
    layout = tree_layout(tree, *(torch.from_numpy(x).to(device) for x in (tree.depths, tree.ends)))
    query_heads, key_heads, size = HEADS[heads]
    torch.manual_seed(0)
    inputs = [
        torch.randn(1, len(tree.depths), n, size, device=device, dtype=torch.bfloat16).transpose(1, 2)
        for n in (query_heads, key_heads, key_heads)
    ]
    gradient = torch.randn(1, len(tree.depths), query_heads, size, device=device, dtype=torch.bfloat16)
    return inputs, gradient, layout, int(tree.depths.sum()) + len(tree.depths)


def compile_option(heads: str, option: str, dry_run: bool) -> dict[str, Any]:
    """Differences of an option's output and gradients from sdpa over the tree in float32."""
    import torch

    from skylite.model.flex_attention import flex_tree_attention
    from skylite.model.tree_attention import ScoreSettings, tree_attention

    torch.backends.cuda.matmul.allow_tf32 = False
    inputs, gradient, layout, _ = tree_inputs(heads, option, dry_run)
    settings = ScoreSettings(inputs[0].shape[-1] ** -0.5)

    def run(attention: Callable[..., Any], *tensors: Any) -> list[Any]:
        if dry_run:
            return [attention(*tensors, layout.for_one_pass(), settings)]
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = attention(*leaves, layout.for_one_pass(), settings)
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient.to(out.dtype))]

    with using(option) if not dry_run else nullcontext():
        ours = run(flex_tree_attention, *inputs)
    exact = run(tree_attention, *(x.float() for x in inputs))
    names = ("output_gap", "query_gap", "key_gap", "value_gap")
    row: dict[str, Any] = {n: relative(a, b) for n, a, b in zip(names, ours, exact, strict=False)}
    if not max(row.values()) <= BF16_ROUNDING:
        row["failed"] = f"differs from float32 by more than {BF16_ROUNDING}"
    return row


def time_option(heads: str, option: str) -> dict[str, Any]:
    """Milliseconds, TFLOP/s of visible pairs, and GB/s of each tensor once, forward and backward."""
    import torch

    from skylite.model.flex_attention import flex_tree_attention
    from skylite.model.tree_attention import ScoreSettings, tree_attention

    inputs, gradient, layout, pairs = tree_inputs(heads, option, dry_run=False)
    settings = ScoreSettings(inputs[0].shape[-1] ** -0.5)
    attention = tree_attention if option == "sdpa" else flex_tree_attention
    leaves = [x.detach().requires_grad_() for x in inputs]
    with using(option) if option != "sdpa" else nullcontext():
        query, key, value = leaves
        forward = milliseconds(lambda: attention(query, key, value, layout, settings))
        # A compiled backward frees what its forward kept, so that each needs a forward of its own.
        both = milliseconds(
            lambda: torch.autograd.grad(attention(query, key, value, layout, settings), leaves, gradient)
        )
    once = sum(x.nbytes for x in inputs) + gradient.nbytes
    multiply_adds = pairs * inputs[0].shape[1] * inputs[0].shape[-1]
    row: dict[str, Any] = {"nodes": gradient.shape[1], "visible_pairs": pairs}
    # Two products of the forward; five of the backward, which reads all and writes three of them.
    for name, ms, products, reads in (("forward", forward, 2, 1), ("backward", both - forward, 5, 2)):
        row[f"{name}_ms"] = round(ms, 3)
        row[f"{name}_tflops"] = round(2 * products * multiply_adds / ms / 1e9, 1)
        row[f"{name}_gb_per_s"] = round(reads * once / ms / 1e6)
    return row


def milliseconds(run: Callable[[], Any]) -> float:
    """The median time on the GPU, after two calls."""
    import torch

    run(), run()
    event: Any = torch.cuda.Event
    marks = [event(enable_timing=True) for _ in range(REPEATS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return float(statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)))


Task = tuple[str, str, Callable[..., dict[str, Any]], tuple[Any, ...]]
"""Part, name, function and arguments."""


def tasks() -> Iterator[Task]:
    """The most valuable first."""
    for family in FAMILIES[:4]:
        yield "models", f"{family} float32", compare_model, (family, "float32")
    for option in list(OPTIONS)[:4]:
        yield "compared", f"14/2 D64 {option}", compile_option, ("14/2 D64", option)
    for family in FAMILIES[4:]:
        yield "models", f"{family} float32", compare_model, (family, "float32")
    for option in list(OPTIONS)[:4]:
        yield "compared", f"28/4 D128 {option}", compile_option, ("28/4 D128", option)
    for family in IN_BF16:
        yield "models", f"{family} bfloat16", compare_model, (family, "bfloat16")
    for heads in ("14/2 D64", "28/4 D128"):
        for option in list(OPTIONS)[4:]:
            yield "compared", f"{heads} {option}", compile_option, (heads, option)
    for option in list(OPTIONS)[:2]:
        yield "compared", f"32/8 D128 {option}", compile_option, ("32/8 D128", option)


def run_tasks(results: Results, until: float, dry_run: bool, parts: list[str]) -> list[tuple[str, str]]:
    """Run the tasks of these parts in processes until `until` seconds are left; a dry run every tenth.

    Returns the options that were compiled.
    """
    compiled = list[tuple[str, str]]()
    pool = ProcessPoolExecutor(2 if dry_run else PROCESSES, mp_context=get_context("spawn"))
    waiting: dict[Future[dict[str, Any]], tuple[str, str, tuple[Any, ...]]] = {
        pool.submit(attempted, function, *args, dry_run): (part, name, args)
        for part, name, function, args in [t for t in tasks() if t[0] in parts][:: 10 if dry_run else 1]
    }
    processes = list(pool._processes.values())
    while waiting and results.left() > until:
        done, _ = wait(waiting, timeout=max(0.0, results.left() - until), return_when="FIRST_COMPLETED")
        for future in done:
            part, name, args = waiting.pop(future)
            row = future.result() if future.exception() is None else {"failed": repr(future.exception())}
            results.add(part, name, row)
            if part == "compared" and "output_gap" in row:
                compiled.append((args[0], args[1]))
    for name in (name for _, name, _ in waiting.values()):
        results.add("no time left", name, {})
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()  # in a compiler, perhaps
    return compiled


def main() -> None:
    from shared import argument_parser, machine_info

    parser = argument_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the results, as JSON")
    parser.add_argument("--until", type=float, default=180.0, help="seconds for all")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU")
    parser.add_argument("--parts", nargs="+", default=["models", "compared"], help="timed follows compared")
    args = parser.parse_args()
    # The processes are about as many as the cores.
    os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    results = Results(args.out, args.until)
    results.rows["machine"] = machine_info()
    compiled = run_tasks(results, 0.0 if args.dry_run else 0.3 * args.until, args.dry_run, args.parts)
    if args.dry_run:
        return
    order: Mapping[str, list[str]] = {h: [o for o in OPTIONS if (h, o) in compiled] for h in HEADS}
    for heads, option in ((h, o) for h in HEADS for o in [*order[h][:2], "sdpa", *order[h][2:]]):
        if results.left() > 0:
            results.add("timed", f"{heads} {option}", attempted(time_option, heads, option))


if __name__ == "__main__":
    main()
