"""Parts of `make gpu-check` that time single kernels: attention with a mask, and Liger's norms and MLPs."""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib import metadata
from typing import TYPE_CHECKING, Any

import gpu_sizes
import gpu_train

if TYPE_CHECKING:
    import torch
    from gpu_check import Report

# (queries, keys): pieces of prefix trees. Real trees have a new shape for almost every branch.
SHAPES = [
    *((137, 393), (256, 512), (333, 897), (512, 1024), (777, 1337), (1024, 1536)),
    *((1111, 2222), (1536, 2048), (2047, 2560), (2048, 4096), (3001, 3777), (4096, 4608)),
]
HEADS, HEAD_SIZE = 28, 128
# Shape, queries, dtype, with gradients, softcap; the most valuable first. The first two would use torch's
# flex decoding: fewer than 128 queries, and a power of two of heads for each key-value head.
FLEX = [
    ("llama3.2-1b", 99, "bfloat16", True, None),
    ("llama3.2-1b", 45, "float32", False, None),
    ("llama3.2-1b", 300, "bfloat16", True, 50.0),
    ("qwen2.5-1.5b", 300, "bfloat16", True, None),
]
FLEX_TOLERANCE = 0.05
"""Rounding to bfloat16 makes about 1 %."""
REPEATS = 5


def device_of() -> torch.device:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def timed(run: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds until the device has finished."""
    import torch

    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - started)


def first_and_median(run: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Milliseconds of the first call, which may build a plan or compile, and of later calls."""
    first = timed(run, device)
    later = [timed(run, device) for _ in range(REPEATS)]
    return {"first_ms": round(first, 3), "ms": round(statistics.median(later), 3)}


def attention(report: Report) -> None:
    """Forward and backward of torch's attention with a mask: its choice without cuDNN, and cuDNN alone.

    A row that fails is recorded with its reason.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    device = device_of()
    timed(lambda: torch.ones(1, device=device) + 1, device)  # the CUDA context
    torch.backends.cuda.enable_cudnn_sdp(False)
    for use_cudnn in (False, True):
        only = use_cudnn and device.type == "cuda"
        for queries, keys in SHAPES:
            if report.dry_run:
                queries, keys = queries // 64 + 1, keys // 64 + 1
            row: dict[str, Any] = {"cudnn": use_cudnn, "queries": queries, "keys": keys}
            try:
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if only else nullcontext():
                    row |= first_and_median(attention_pass(queries, keys, device), device)
            except RuntimeError as error:
                row["failed"] = f"{type(error).__name__}: {error}"[:400]
            report.add("rows", row)


def attention_pass(queries: int, keys: int, device: torch.device) -> Callable[[], None]:
    import torch

    q, k, v = (
        torch.randn(1, HEADS, n, HEAD_SIZE, device=device, dtype=torch.bfloat16, requires_grad=True)
        for n in (queries, keys, keys)
    )
    columns = -(-keys // 16) * 16
    mask = torch.zeros(queries, columns, device=device, dtype=torch.bfloat16)[:, :keys]

    def run() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        torch.autograd.grad(out.sum(), (q, k, v))

    return run


def flex(report: Report) -> None:
    """FlexAttention over a small prefix tree: times, and the largest differences from sdpa.

    A row that fails is recorded with its reason. A CPU has no backward pass, so a dry run leaves it out.
    """
    gpu_train.use_trainer_environment()
    for shape, queries, dtype, gradients, softcap in FLEX:
        heads, kv_heads = gpu_sizes.SHAPES[shape][3:5]
        row: dict[str, Any] = {
            "heads": f"{heads}/{kv_heads}",
            "queries": queries,
            "dtype": dtype,
            "gradients": gradients and not report.dry_run,
            "softcap": softcap,
        }
        try:
            row |= flex_row(shape, queries, dtype, row["gradients"], softcap)
        except Exception as error:  # noqa: BLE001 -- a compiler's errors are results
            row["failed"] = f"{type(error).__name__}: {error}"[:400]
        report.add("rows", row)


def flex_row(shape: str, queries: int, dtype: str, gradients: bool, softcap: float | None) -> dict[str, Any]:
    """Milliseconds of FlexAttention, and its differences from sdpa relative to sdpa's largest value.

    `failed` has the largest of them if it is above FLEX_TOLERANCE.
    """
    import torch

    from skylite.model.flex_attention import flex_tree_attention
    from skylite.model.prefix_tree import build_tree
    from skylite.model.tree_attention import ScoreSettings, tree_attention, tree_layout

    device, third = device_of(), queries // 3
    prompt = list(range(third))
    tree = build_tree([[*prompt, *[token] * third] for token in (-1, -2)], [0, 0])
    layout = tree_layout(tree, *(torch.from_numpy(x).to(device) for x in (tree.depths, tree.ends)))
    hidden, _, _, heads, kv_heads, *_ = gpu_sizes.SHAPES[shape]
    size = hidden // heads
    torch.manual_seed(0)
    inputs = [
        torch.randn(1, n, queries, size, device=device, dtype=getattr(torch, dtype), requires_grad=gradients)
        for n in (heads, kv_heads, kv_heads)
    ]
    settings = ScoreSettings(size**-0.5, None, softcap)

    def run(form: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        with torch.set_grad_enabled(gradients):
            out = form(*inputs, layout, settings)
        return [out, *(torch.autograd.grad(out.square().sum(), inputs) if gradients else [])]

    times = first_and_median(lambda: run(flex_tree_attention), device)
    pairs = zip(run(flex_tree_attention), run(tree_attention), strict=True)
    gaps = [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]
    row: dict[str, Any] = dict(zip(("gap", "query_gap", "key_gap", "value_gap"), gaps, strict=False))
    if not max(gaps) <= FLEX_TOLERANCE:
        row["failed"] = f"differs from sdpa by {max(gaps):.1%}"
    return times | row


def liger(report: Report) -> None:
    """RMS norm and gated activation at 7B width: skylite's, and Liger-Kernel's if it is installed."""
    import torch

    from skylite.model.fused_ops import gated_activation, rms_norm

    device = device_of()
    tokens, hidden, wide = (64, 64, 128) if report.dry_run else (16384, 3584, 18944)
    x, gate, up = (
        torch.randn(tokens, n, device=device, dtype=torch.bfloat16, requires_grad=True)
        for n in (hidden, wide, wide)
    )
    gain = torch.ones(hidden, device=device, dtype=torch.bfloat16)
    silu = torch.nn.functional.silu
    ours = {
        "norm": (lambda: rms_norm(x, gain, 1e-6, recompute=False), (x,)),
        "mlp": (lambda: gated_activation(gate, up, silu, recompute=False), (gate, up)),
    }
    report.put("off", {name: first_and_median(both_ways(*run), device) for name, run in ours.items()})
    if importlib.util.find_spec("liger_kernel") is None:
        report.put("on", "not installed")
        return
    report.put("version", metadata.version("liger-kernel"))
    liger_ops: Any = importlib.import_module("liger_kernel.transformers.functional")

    theirs = {
        "norm": (lambda: liger_ops.liger_rms_norm(x, gain, 1e-6), (x,)),
        # Its backward pass writes the gradients over `gate` and `up`. The seconds do not depend on values.
        "mlp": (lambda: liger_ops.liger_swiglu(gate, up), (gate, up)),
    }
    report.put("on", {name: first_and_median(both_ways(*run), device) for name, run in theirs.items()})


def both_ways(forward: Callable[[], torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    """A function that runs forward and backward."""
    import torch

    def run() -> None:
        y = forward()
        torch.autograd.grad(y, inputs, torch.ones_like(y))

    return run
