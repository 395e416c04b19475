"""Times each Triton kernel of the trainer beside its torch form, and compares both with float64.

    python benchmarks/gpu_kernels.py --out FILE
    python benchmarks/gpu_kernels.py --out FILE --dry-run      (tiny, under triton's interpreter on a CPU)

It stops after `--until` seconds, the most valuable rows first. FILE is written after every row, so that a run
that ends early leaves what it measured. `difference` is the norm of the difference from float64, relative to
the norm of the float64 result.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

DRY_RUN = "--dry-run" in sys.argv
if DRY_RUN:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

# ruff: noqa: E402
import torch
from torch import Tensor, nn

from skylite.model import chunked_logprobs
from skylite.model.chunked_logprobs import head_logprobs
from skylite.model.fused_ops import gated_activation, rms_norm
from skylite.model.kernel_check import kernel_differences, relative_difference

GPU = not DRY_RUN
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
BF16 = torch.bfloat16
SHAPES = {"0.5b": (16176, 896, 4864, 14, 2, 64), "7b": (5392, 3584, 18944, 28, 4, 128)}
"""Tokens, hidden and inner size, heads, key-value heads and their size: micro-batches of Qwen2.5."""
HEADS = {"0.5b": (4096, 151936, 896), "7b": (4096, 151936, 3584)}
"""Rows, vocabulary, hidden size."""
if not GPU:
    SHAPES = {"tiny": (37, 96, 200, 4, 2, 16)}
    HEADS = {"tiny": (20, 1003, 32)}
CHECKED_ROWS = 256
"""Rows that float64 computes too."""
REPEATS = 7
CACHE = 1 << 28
"""Bytes written between two runs, so that none finds its inputs in the cache."""


class Report:
    """The rows so far, in a file."""

    def __init__(self, out: Path, until: float) -> None:
        self._out, self._started, self._until = out, time.monotonic(), until
        self.rows: dict[str, Any] = {}

    def late(self) -> bool:
        return time.monotonic() - self._started > self._until

    def part(self, name: str, run: Callable[[], dict[str, Any]]) -> None:
        """Add what `run` returns, or why it failed."""
        started = time.monotonic()
        if self.late():
            self.rows[name] = "no time left"
            return
        try:
            row = run()
        except Exception as error:  # noqa: BLE001 -- a compiler's errors are results
            row = {"failed": f"{type(error).__name__}: {error}"[:600]}
        self.rows[name] = row | {"part_s": round(time.monotonic() - started, 2)}
        self.rows["seconds"] = round(time.monotonic() - self._started, 1)
        self._out.write_text(json.dumps(self.rows, indent=1))
        print(json.dumps({name: self.rows[name]}), flush=True)
        if GPU:
            torch.cuda.empty_cache()


def milliseconds(run: Callable[[], Any]) -> float:
    """Median time of a run on the device, with a cold cache. The first run compiles and is not counted."""
    run()
    if not GPU:
        started = time.perf_counter()
        run()
        return round(1e3 * (time.perf_counter() - started), 3)
    cache, times = torch.empty(CACHE, dtype=torch.uint8, device=DEVICE), []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        cache.zero_()
        start.record()
        run()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return round(float(statistics.median(a.elapsed_time(b) for a, b in times)), 4)


def host_microseconds(run: Callable[[], Any]) -> float:
    """What a call costs Python, while the device has work."""
    count = 50 if GPU else 1
    if GPU:
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        run()
    return round(1e6 * (time.perf_counter() - started) / count, 1)


def compare(
    torch_form: Callable[..., Any],
    kernel: Callable[..., Any],
    inputs: Sequence[Tensor],
    num_bytes: tuple[int, int],
    reference: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Forward and backward of both forms: milliseconds, GB/s of `num_bytes`, differences from float64.

    float64 computes `reference`, or torch_form, for the first CHECKED_ROWS rows of the first dimension.
    """
    row: dict[str, Any] = {}
    grads: list[Tensor] = []
    rows = min(CHECKED_ROWS, len(inputs[0]))
    for name, form in (("torch", torch_form), ("triton", kernel)):
        leaves = [x.detach().requires_grad_() for x in inputs]
        outputs = listed(form(*leaves))
        grads = grads or [torch.randn_like(y) for y in outputs]
        results = torch.autograd.grad(outputs, leaves, grads, retain_graph=True)
        wide = [x[:rows].detach().double().requires_grad_() for x in inputs]
        right = listed((reference or torch_form)(*wide))
        right_grads = torch.autograd.grad(right, wide, [g[:rows].double() for g in grads])
        run_forward = partial(form, *leaves)
        forward = milliseconds(run_forward)
        backward = milliseconds(partial(torch.autograd.grad, outputs, leaves, grads, retain_graph=True))
        row[name] = {
            "forward_ms": forward,
            "backward_ms": backward,
            "forward_GBps": round(num_bytes[0] / forward / 1e6),
            "backward_GBps": round(num_bytes[1] / backward / 1e6),
            "difference": [
                float(f"{relative_difference(a[:rows], b):.2e}")
                for a, b in zip([*outputs, *results], [*right, *right_grads], strict=True)
            ],
        }
        if forward < 2:  # else the queue is full before the count is reached
            row[name]["forward_host_us"] = host_microseconds(run_forward)
    return row


def listed(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def make(*size: int) -> Tensor:
    return torch.randn(size, device=DEVICE, dtype=BF16)


def norm(tokens: int, width: int) -> dict[str, Any]:
    from skylite.model import triton_kernels as kernels

    weight, tensor = make(width), 2 * tokens * width
    return compare(
        lambda x: rms_norm(x, weight.to(x.dtype), 1e-6, False),
        lambda x: kernels.rms_norm(x, weight, 0, 1e-6, False),
        [make(tokens, width)],
        (2 * tensor, 3 * tensor),
    )


def norm_tiles(report: Report, tokens: int, width: int) -> dict[str, Any]:
    """GB/s of norm and gradient by the rows and warps of a program."""
    import triton

    from skylite.model import triton_kernels as kernels

    x, weight, grad = make(tokens, width), make(width), make(tokens, width)
    y, row, block = torch.empty_like(x), dict[str, Any](), triton.next_power_of_2(width)
    tiles = [(4096, 8), (4096, 4), (8192, 8), (4096, 16), (8192, 16), (2048, 4)]
    for rows, warps in [(max(1, size // block), warps) for size, warps in tiles if size >= block]:
        if report.late():
            break
        grid, sizes = (triton.cdiv(tokens, rows),), {"ROWS": rows, "BLOCK": block, "num_warps": warps}
        inputs = (x, weight, y, tokens, width, 1e-6, 0)
        forward = milliseconds(partial(kernels._normalize[grid], *inputs, **sizes))
        backward = milliseconds(partial(kernels._normalize_backward[grid], grad, *inputs, **sizes))
        rates = [round(count * 2 * x.numel() / ms / 1e6) for count, ms in ((2, forward), (3, backward))]
        row[f"{rows} rows, {warps} warps"] = rates
    return row


def gated(tokens: int, inner: int, gelu: bool) -> dict[str, Any]:
    from skylite.model import triton_kernels as kernels

    act, tensor = nn.GELU("tanh") if gelu else nn.SiLU(), 2 * tokens * inner
    return compare(
        lambda gate, up: gated_activation(gate, up, act, False),
        lambda gate, up: kernels.gated_activation(gate, up, gelu, False),
        [make(tokens, inner), make(tokens, inner)],
        (3 * tensor, 5 * tensor),
    )


def rotary(tokens: int, heads: int, kv_heads: int, size: int) -> dict[str, Any]:
    """From and to the memory layout of a layer's projections."""
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

    from skylite.model import triton_kernels as kernels

    angles = torch.outer(torch.arange(tokens), 1e4 ** -torch.linspace(0, 1, size // 2)).repeat(1, 2)
    cos, sin = (x[None].to(DEVICE, BF16) for x in (angles.cos(), angles.sin()))

    def rotated(form: Callable[..., Any]) -> Callable[..., Any]:
        def run(q: Tensor, k: Tensor) -> Any:
            x = [t.view(1, len(t), -1, size).transpose(1, 2) for t in (q, k)]
            return [y.transpose(1, 2).flatten(2)[0] for y in form(*x, cos[:, : len(q)], sin[:, : len(q)])]

        return run

    num_bytes = 2 * 2 * tokens * (heads + kv_heads) * size
    return compare(
        rotated(apply_rotary_pos_emb),
        rotated(kernels.rotary_embedding),
        [make(tokens, heads * size), make(tokens, kv_heads * size)],
        (num_bytes, num_bytes),
    )


def head(rows: int, vocab: int, hidden: int, entropy: bool) -> dict[str, Any]:
    """The LM head, matrix products included. With `entropy` a gradient goes through the entropies too."""
    weight = make(vocab, hidden) * 0.02
    targets = torch.randint(vocab, (rows,), device=DEVICE)
    index, outputs = torch.arange(rows, device=DEVICE), 1 + entropy

    def run(kernels: bool) -> Callable[[Tensor], Any]:
        return lambda x: head_logprobs(
            x, weight, None, index[: len(x)], targets[: len(x)], 1.0, None, np.arange(len(x) + 1), kernels
        )[:outputs]

    def reference(x: Tensor) -> Any:
        logprobs = (x @ weight.double().t()).log_softmax(-1)
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        return [logprobs[index[: len(x)], targets[: len(x)]], entropies][:outputs]

    product = 2 * rows * vocab * hidden
    row = compare(run(False), run(True), [4 * make(rows, hidden)], (product, product), reference)
    for form in ("torch", "triton"):  # TFLOP/s of one product each way, not bytes
        for way in ("forward", "backward"):
            row[form][f"{way}_product_TFLOPs"] = round(row[form].pop(f"{way}_GBps") / 1e3, 1)
    return row


def head_kernels(report: Report, rows: int, vocab: int) -> dict[str, Any]:
    """GB/s of the two kernels over a chunk's logits, by their tiles."""
    import triton

    from skylite.model import triton_kernels as kernels

    chunk = min(rows, 768)
    logits, first = make(chunk, vocab), torch.arange(chunk + 1, device=DEVICE)
    targets = torch.randint(vocab, (chunk,), device=DEVICE)
    logprobs, normalizers, entropies, grads = (torch.ones(chunk, device=DEVICE) for _ in range(4))
    row: dict[str, Any] = {"logprobs": {}, "gradient": {}}
    inputs = (logits, first, targets, logprobs, normalizers, entropies, 0, vocab, 1.0)
    for lanes, steps, warps in ((2048, 4, 8), (2048, 2, 8), (1024, 4, 4), (1024, 8, 4), (4096, 1, 8)):
        if not report.late():
            sizes = {"LANES": lanes, "STEPS": steps, "num_warps": warps}
            ms = milliseconds(partial(kernels._token_logprobs[(chunk,)], *inputs, **sizes))
            name = f"{lanes} lanes, {steps} steps, {warps} warps"
            row["logprobs"][name] = round(2 * logits.numel() / ms / 1e6)
    others = (first, targets, normalizers, entropies, grads, None, 0, vocab, 1.0)
    for block, warps in ((2048, 8), (4096, 8), (8192, 8)):
        if not report.late():
            grid, sizes = (chunk, triton.cdiv(vocab, block)), {"BLOCK": block, "num_warps": warps}
            ms = milliseconds(partial(kernels._logits_gradient[grid], logits, *others, **sizes))
            row["gradient"][f"{block} block, {warps} warps"] = round(4 * logits.numel() / ms / 1e6)
    return row


def head_products(vocab: int, hidden: int) -> dict[str, Any]:
    """Milliseconds for 1,000 rows of the head's products, by the rows of a chunk."""
    weight, row = make(vocab, hidden), dict[str, Any]()
    for size in (512, 768, 1024, 2048) if GPU else (8,):
        x, logits = make(size, hidden), make(size, vocab)
        products = {
            "logits": partial(nn.functional.linear, x, weight),
            "gradient in float32": partial(chunked_logprobs._float32_product, logits, weight),
            "gradient in bfloat16": partial(torch.mm, logits, weight),
        }
        row[f"{size} rows"] = {n: round(1e3 * milliseconds(run) / size, 3) for n, run in products.items()}
    return row


def check() -> dict[str, Any]:
    """What the trainer compares before it uses a kernel, in both dtypes."""
    widths = sorted({width for _, width, *_ in SHAPES.values()})
    return {str(dtype): kernel_differences(DEVICE, dtype, widths) for dtype in (torch.float32, BF16)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--until", type=float, default=15.0, help="seconds")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU")
    arguments = parser.parse_args()
    report = Report(arguments.out, arguments.until if GPU else 300)
    report.part("device", lambda: {"name": torch.cuda.get_device_name(0) if GPU else "CPU, interpreted"})
    report.part("check", check)
    for name, head_sizes in HEADS.items():
        report.part(f"head {name}", partial(head, *head_sizes, entropy=False))
    for name, (tokens, hidden, inner, heads, kv_heads, size) in SHAPES.items():
        report.part(f"norm {name}", partial(norm, tokens, hidden))
        report.part(f"rotary {name}", partial(rotary, tokens, heads, kv_heads, size))
        report.part(f"swiglu {name}", partial(gated, tokens, inner, False))
    for name, (_, vocab, hidden) in HEADS.items():
        report.part(f"head products {name}", partial(head_products, vocab, hidden))
    rows, vocab, hidden = next(iter(HEADS.values()))
    report.part("head kernels", partial(head_kernels, report, rows, vocab))
    for name, (tokens, hidden, *_) in SHAPES.items():
        report.part(f"norm tiles {name}", partial(norm_tiles, report, tokens, hidden))
    report.part("head with entropy", partial(head, rows, vocab, hidden, entropy=True))
    report.part("geglu", partial(gated, tokens, inner, True))


if __name__ == "__main__":
    main()
