"""Write "Results of make gpu-check" in docs/how-to/gpus.md from benchmarks/results/gpu.json.

python docs/generate_gpu_results.py        (or: make docs-reference)
python docs/generate_gpu_results.py --check        writes nothing, fails if the table is stale
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from write_or_check import ROOT, with_section, write_or_check

PAGE = Path(__file__).resolve().parent / "how-to" / "gpus.md"
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
H100_FLOPS = 989e12
"""Of an H100's and H200's data sheet, bfloat16 without sparsity: the field's unit for such figures."""
Row = tuple[str, str]
Found = dict[str, Any]


def table(results: dict[str, Any]) -> str:
    """The device with its versions, then a row for each thing that was measured, or why it was not."""
    parts = results["parts"]
    versions = results["versions"]
    names = [f"{name} {versions[name]}" for name in ("torch", "transformers", "vllm") if name in versions]
    head = (
        f"On {' and '.join(results['gpus'])}, {results['date']}, at {results['commit']}, {', '.join(names)}:"
    )
    lines = [head, "", "| part | result |", "|---|---|"]
    for name, part in parts.items():
        rows = list(READERS[name](part.get("found", {})))
        if part["status"] != "done":
            rows.append((name, f"{part['status']}: {part['reason']}"))
        lines += [f"| {what} | {result} |" for what, result in rows]
    return "\n".join(lines)


def machine(found: Found) -> Iterator[Row]:
    """Nothing: the line above the table names the device."""
    yield from ()


def kernels(found: Found) -> Iterator[Row]:
    """Each fused operation beside torch's own, forward and backward."""
    for name, row in found.items():
        if isinstance(row, dict) and {"torch", "triton"} <= row.keys():
            ours, torch = (row[kind]["forward_ms"] + row[kind]["backward_ms"] for kind in ("triton", "torch"))
            yield f"kernel: {name}", f"{ours:.2f} ms, torch {torch:.2f} ms"


def training(found: Found) -> Iterator[Row]:
    for row in found.get("rows", []):
        what = f"a training step, {found['shape']}, {row['attention']}, checkpointing {row['checkpointing']}"
        if row["packing_wanted"] != "tree":
            what += f", {row['packing_wanted']} rows"
        if "tflops" not in row:
            yield what, f"failed: {row.get('failed', 'one step only')}"
            continue
        share = row["tflops"] * 1e12 / H100_FLOPS
        seconds = statistics.median(row["seconds"])
        rate = f"{seconds:.2f} s, {row['tflops']:.0f} TFLOP/s ({share:.2f} of 989)"
        yield what, f"{rate}, peak {row['peak_gib']:.1f} GiB, {row['tokens_computed']:.0f} tokens"


def loop(found: Found) -> Iterator[Row]:
    """Each whole step of `skylite train`, and what its turns took."""
    for step in found.get("steps", []):
        times = ", ".join(
            f"{word} {step[f'time/{key}_s']:.1f}"
            for word, key in (
                ("sampling", "rollout"), ("training", "train"), ("sync", "sync"),
                ("sleep and wake", "engine_sleep"), ("copies of the base", "base_copies"),
            )
            if f"time/{key}_s" in step
        )  # fmt: skip
        rate = step["perf/completion_tokens_per_s"]
        turns = ", in turns" * ("time/engine_sleep_s" in step)
        yield (
            f"`skylite train` of 7B{turns}, step {step['step']}",
            f"{step['time/step_s']:.1f} s ({times}); {rate:,.0f} sampled tokens per second",
        )


def sampling(found: Found) -> Iterator[Row]:
    for kind, rows in found.get("kinds", {}).items():
        rate, api, core = (
            statistics.median(row[key] for row in rows)
            for key in ("tokens_per_s", "api_cpu_us", "core_cpu_us")
        )
        yield (
            f"vLLM alone, {found['shape']}, {kind}",
            f"{rate:,.0f} tokens per second; CPU a token: API {api:.0f} us, core {core:.0f} us",
        )


def out_of_memory(found: Found) -> Iterator[Row]:
    for step in found.get("steps", []):
        text = f"micro-batches of {step['tokens_per_micro_batch']} tokens; {len(step['warnings'])} warnings"
        yield f"too little memory, step {step['step']}", text


def profile(found: Found) -> Iterator[Row]:
    if "busy_s" in found:
        longest = ", ".join(f"`{row['name'][:40]}` {row['ms']:.0f} ms" for row in found["operations"][:3])
        yield "profile of 7B", f"busy {found['busy_s']:.2f} of {found['seconds_profiled']:.2f} s; {longest}"


def attention(found: Found) -> Iterator[Row]:
    """FlexAttention against plain rows, by family."""
    for name, row in found.get("compared", {}).items():
        if "gradient_gap" in row:
            gaps = f"logprobs {row['logprob_gap']:.1e}, gradients {row['gradient_gap']:.1e}"
            yield f"flex against rows: {name}", gaps


def collectives(found: Found) -> Iterator[Row]:
    if "backend" in found:
        nccl = ".".join(map(str, found.get("nccl", [])))
        yield "process group of one rank", f"{found['backend']}{f', NCCL {nccl}' if nccl else ''}"


READERS: dict[str, Callable[[Found], Iterator[Row]]] = {
    "machine": machine,
    "kernels": kernels,
    "train 0.5b": training,
    "train 7b": training,
    "attention": attention,
    "loop": loop,
    "loop 7b": loop,
    "turns 7b": loop,
    "sampling": sampling,
    "out of memory": out_of_memory,
    "profile 7b": profile,
    "collectives": collectives,
}


def pages() -> dict[Path, str]:
    """The page with the table of the newest results."""
    return with_section(PAGE, "gpu-check", table(json.loads(RESULTS.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    write_or_check(pages(), __doc__)
