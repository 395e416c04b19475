"""What a training step asks of the host: operations, launches, waits, and the time in which the GPU has
nothing to do. Random models of real shapes; nothing is downloaded.

    python benchmarks/host_time.py --shape qwen2.5-0.5b --attention flex --out FILE       (needs a GPU)
    python benchmarks/host_time.py --shape qwen2.5-0.5b --layers 2 --budget 512 --groups 1 --narrow

On a CPU, operations are counted by the line of code that calls them. On a GPU, torch's profiler counts the
kernels, the calls that wait, and the gaps between kernels. `--narrow` keeps the layers and makes the matrices
tiny: what remains of a step's time is the host's.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpu_sizes
import gpu_train
from shared import argument_parser, machine_info

from skylite.run.files import write_json

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

NARROW = {"hidden": 64, "intermediate": 128, "heads": 4, "kv_heads": 2, "vocab": 512}
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls after which the host knows what the GPU has done. cudaMemcpyAsync is none of them: torch waits for
one with cudaStreamSynchronize."""
VIEWS = {
    *("view", "_unsafe_view", "reshape", "t", "transpose", "permute", "slice", "select", "expand", "alias"),
    *("unsqueeze", "squeeze", "detach", "split", "split_with_sizes", "unbind", "as_strided", "unfold"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "lift_fresh"),
    *("_reshape_alias", "_local_scalar_dense", "promote_types"),
}
"""Operations that launch nothing."""
GAPS_US = (10, 100, 1000)
Span = tuple[float, float, str]
"""Start and end in microseconds, and a name."""


def main() -> None:
    args = parse_arguments()
    gpu_train.use_trainer_environment()  # before torch
    if args.threads:
        import torch

        torch.set_num_threads(args.threads)
    row = measure(args)
    print_row(row)
    if args.out:
        write_json(args.out, machine_info() | row)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=sorted(gpu_sizes.SHAPES))
    parser.add_argument("--narrow", action="store_true", help="the shape's layers with tiny matrices")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--attention", choices=["sdpa", "flex"], default="sdpa")
    parser.add_argument("--checkpointing", choices=["none", "selective", "full"], default="selective")
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="measured; two before them are not")
    parser.add_argument("--threads", type=int, help="of torch on a CPU")
    parser.add_argument("--top", type=int, default=30)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of steps, and the counts of one more step."""
    import torch

    from skylite.run.rollout_file import examples_of
    from skylite.trainer.step import train_step
    from skylite.trainer.trainer import make_trainer

    name = shape_to_build(args)
    vocab = gpu_sizes.SHAPES[name][5]
    sizes = replace(gpu_sizes.REAL, budget=args.budget, vocab=min(gpu_sizes.REAL.vocab, vocab))
    if args.narrow:
        sizes = replace(sizes, prompt=8, median=4, longest=8)
    config, policy, choices, dist = gpu_train.build(name, sizes, args.attention, args.checkpointing, "tree")
    trainer = make_trainer(policy, config, dist)
    examples = examples_of(gpu_sizes.varied_groups(sizes, 1)[: args.groups])
    on_gpu, seconds = policy.device.type == "cuda", list[float]()
    clock = time.perf_counter if on_gpu else time.process_time
    metrics = dict[str, float]()
    for step in range(1, args.steps + 3):
        started = clock()
        metrics = train_step(trainer, examples, step)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(clock() - started)
    layers, last = gpu_sizes.SHAPES[name][2], args.steps + 3
    counts = (on_the_gpu if on_gpu else on_the_cpu)(lambda: train_step(trainer, examples, last), args.top)
    row = {
        "shape": name,
        "attention": args.attention,
        "checkpointing": args.checkpointing,
        "layers": layers,
        "tokens": metrics["tokens/unique"],
        "choices": choices,
        "clock": "wall" if on_gpu else "CPU time of the process",
        "seconds": [round(s, 4) for s in seconds[2:]],
        "ms_per_layer": round(1000 * min(seconds[2:]) / layers, 3),
        **counts,
    }
    for what in ("operations", "kernels"):
        if what in row:
            row[f"{what}_per_layer"] = round(row[what] / layers, 1)
    return row


def shape_to_build(args: argparse.Namespace) -> str:
    """The shape's name in SHAPES; a changed shape is added there."""
    hidden, intermediate, layers, heads, kv_heads, vocab, tied = gpu_sizes.SHAPES[args.shape]
    if args.narrow:
        hidden, intermediate, heads, kv_heads, vocab = NARROW.values()
    name: str = (
        args.shape + (" narrow" if args.narrow else "") + (f" {args.layers} layers" if args.layers else "")
    )
    shape = (hidden, intermediate, args.layers or layers, heads, kv_heads, vocab, tied)
    gpu_sizes.SHAPES[name] = shape
    return name


def on_the_cpu(run: Callable[[], Any], top: int) -> dict[str, Any]:
    """Operations of a call that would be kernels on a GPU, by name and by the line that calls them."""
    with counting() as counter:
        run()
    by_place = [f"{n} {name} {place}" for (name, place), n in counter.places.most_common(top)]
    return {"operations": counter.places.total(), "by_place": by_place}


def counting() -> Any:
    """A mode inside which torch's operations are counted in `places`: (operation, line) -> calls."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        supports_higher_order_operators = True

        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.places = Counter[tuple[str, str]]()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            space, _, rest = str(func).partition(".")
            name = rest.partition(".")[0] if space == "aten" else str(func)
            if name not in VIEWS and space != "prim":
                self.places[name, calling_line()] += 1
            return func(*args, **(kwargs or {}))

    return Counting()


@cache
def counted_folders() -> list[Path]:
    """Of the packages whose lines count. Not by their names: a checkout may be called skylite, too."""
    specs = map(find_spec, ("skylite", "transformers", "peft", "torch.optim"))
    return [Path(spec.origin).parent for spec in specs if spec is not None and spec.origin is not None]


def calling_line() -> str:
    """The innermost line of skylite, transformers or an optimizer; for autograd's own operations its node."""
    import torch

    frame: Any = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if any(folder in path.parents for folder in counted_folders()):
            break
        frame = frame.f_back
    else:
        return "?"
    node = torch._C._current_autograd_node()
    if node is not None and frame.f_code.co_name == "_policy_pass":
        return str(node.name())
    return f"{path.name}:{frame.f_lineno} {frame.f_code.co_name}"


def on_the_gpu(run: Callable[[], Any], top: int) -> dict[str, Any]:
    """Kernels, waits, busy seconds and gaps of a call, from torch's profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    on_device, host = list[Span](), list[Span]()
    for event in profiler.events() or []:
        spans = on_device if "CUDA" in str(event.device_type) else host
        spans.append((event.time_range.start, event.time_range.end, event.name))
    # The device's timeline also has a span around the kernels of each annotation of the host.
    annotations = {name for *_, name in host}
    kernels = [span for span in on_device if span[2] not in annotations]
    waits = Counter(name for *_, name in host if name in WAITS)
    waited = sum(end - start for start, end, name in host if name in WAITS)
    return {
        "operations": sum(name.startswith("aten::") for *_, name in host),
        "kernels": len(kernels),
        "waits": dict(waits),
        "items": sum(name == "aten::_local_scalar_dense" for *_, name in host),
        "waited_ms": round(waited / 1000, 2),
        **timeline(kernels),
        "by_kernel": by_kernel(kernels, top),
        "by_operation": by_operation(host, top),
    }


def timeline(kernels: list[Span]) -> dict[str, Any]:
    """Busy and idle time, and the longest gaps with the kernels around them."""
    if not kernels:
        return {}
    spans = sorted(kernels)
    busy, gaps, end, before = 0.0, [], spans[0][0], "start"
    for start, stop, name in spans:
        if start > end:
            gaps.append((start - end, (end - spans[0][0]) / 1000, before, name))
        if stop > end:
            busy += stop - max(start, end)
            end, before = stop, name
    bounds = [0.0, *GAPS_US, float("inf")]
    classes = {
        f"{a:g} to {b:g} us": {"gaps": len(x), "ms": round(sum(x) / 1000, 2)}
        for a, b in pairwise(bounds)
        for x in [[gap for gap, *_ in gaps if a <= gap < b]]
    }
    longest = [
        f"{gap / 1000:.2f} ms at {at:.1f} ms, between {short(x)} and {short(y)}"
        for gap, at, x, y in sorted(gaps, reverse=True)[:12]
    ]
    return {
        "span_ms": round((end - spans[0][0]) / 1000, 2),
        "busy_ms": round(busy / 1000, 2),
        "idle_ms": round(sum(gap for gap, *_ in gaps) / 1000, 2),
        "gaps": classes,
        "longest_gaps": longest,
    }


def by_kernel(kernels: list[Span], top: int) -> list[str]:
    """The kernels that take most: milliseconds, number, name."""
    spent, number = defaultdict[str, float](float), Counter[str]()
    for start, end, name in kernels:
        spent[short(name)] += end - start
        number[short(name)] += 1
    most = sorted(spent.items(), key=lambda item: -item[1])
    return [f"{us / 1000:.2f} ms {number[name]} {name}" for name, us in most[:top]]


def by_operation(host: list[Span], top: int) -> list[str]:
    """The operations and runtime calls that are called most often."""
    calls = Counter(short(name) for *_, name in host)
    return [f"{number} {name}" for name, number in calls.most_common(top)]


def short(name: str) -> str:
    return name[:100]


def print_row(row: dict[str, Any]) -> None:
    for key, value in row.items():
        if isinstance(value, list) and value and isinstance(value[0], str):
            print(f"{key}:", *value, sep="\n    ")
        else:
            print(f"{key}: {value}")


if __name__ == "__main__":
    main()
