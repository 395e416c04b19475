"""The trainer's memory: its limit and peak, how many tokens fit into a micro-batch, and running out of it.

A step that runs out of memory is computed again with micro-batches of half the size. The result of a step
does not depend on its micro-batches, up to rounding. The size stays for the rest of the run, and
micro_batch.json keeps it for a resume.
"""

from __future__ import annotations

import ctypes
import gc
import resource
from pathlib import Path

import torch

from skylite.config.resolved import MemoryPlan
from skylite.config.train import RunConfig
from skylite.errors import OutOfMemory, RunFailed
from skylite.model.lora_linear import forget_outputs
from skylite.model.packing import pack_tokens
from skylite.model.policy import Policy, score
from skylite.model.process_group import Dist
from skylite.processes.hardware import available_memory
from skylite.run.files import write_json
from skylite.run.run_dir import RunDir
from skylite.trainer.canary import longest_prompt
from skylite.types import completion_example

PROBE_TOKENS = {"cpu": (256, 768), "cuda": (1024, 4096)}
"""Approximate tokens of the two measured passes, by device type."""
TOKEN_MULTIPLE = 64
"""The measured number of tokens is rounded down to a multiple of this."""
MAX_TOKENS_PER_PASS = 65536
SAFETY = 0.85
"""Share of the free memory to use. Other shapes, the optimizer's state and fragmentation need the rest."""
CPU_SHARE = 0.5
"""Share of the machine's free memory to use. An engine starts at the same time, and others need memory."""


SMALLEST_MICRO_BATCH = 16
"""Tokens; the smallest that trainer.tokens_per_micro_batch allows."""
FAILED_ALLOCATIONS = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",  # a CUDA call outside torch's allocator, such as the load of a kernel
    "CUDA driver error: out of memory",  # expandable segments
    "Triton Error [CUDA]: out of memory",
    "_STATUS_ALLOC_FAILED",  # the workspaces of cuBLAS, cuDNN and cuSOLVER
)
"""torch raises these as RuntimeError or its subclass AcceleratorError, not as OutOfMemoryError."""


def most_tokens(sizes: tuple[int, int], peaks: tuple[float, float], limit: float) -> tuple[int, float]:
    """The most tokens whose pass takes at most `limit` bytes, and bytes per token.

    On the line through two measured passes, given by their tokens and peak bytes. The tokens are a multiple
    of TOKEN_MULTIPLE, never 0.
    """
    per_token = (peaks[1] - peaks[0]) / (sizes[1] - sizes[0])
    fixed = max(0.0, peaks[0] - per_token * sizes[0])
    tokens = int((limit - fixed) / per_token) if per_token > 0 else MAX_TOKENS_PER_PASS
    return max(TOKEN_MULTIPLE, min(tokens, MAX_TOKENS_PER_PASS) // TOKEN_MULTIPLE * TOKEN_MULTIPLE), per_token


def measure_micro_batch_tokens(
    policy: Policy, run_config: RunConfig, longest_prompt: int, dist: Dist
) -> tuple[int, str]:
    """Tokens per micro-batch, the same on every rank, and a sentence with the reason. All ranks call it.

    The measured passes have the longest prompt and the longest completions: attention's memory grows with
    both. The second pass has no more completions than certainly fit.
    """
    device, completion = policy.device, run_config.config.source.completion_after(longest_prompt)
    sizes = PROBE_TOKENS[device.type]
    fewest = max(1, sizes[0] // completion)
    limit = -_largest(-SAFETY * _free_bytes(device, run_config.resolved.memory, dist.dp_size), dist)
    small = _measured_pass(policy, fewest, longest_prompt, completion)
    count = min(max(fewest + 2, sizes[1] // completion), _most_sequences(fewest, small[1], limit, dist))
    if count > fewest:
        large = _measured_pass(policy, count, longest_prompt, completion)
        passes = f"passes of {small[0]} and {large[0]} tokens"
    else:
        large = (2 * small[0], 2 * small[1])
        passes = f"a pass of {small[0]} tokens, beside which no second one fits,"
    tokens, per_token = most_tokens((small[0], large[0]), (small[1], large[1]), limit)
    reason = f"{passes} took {per_token / 2**20:.2f} MiB per token; {limit / 2**30:.1f} GiB are free"
    return -int(_largest(-tokens, dist)), reason


def _most_sequences(count: int, peak: float, limit: float, dist: Dist) -> int:
    """How many sequences fit into `limit` bytes for sure if `count` take `peak`, on every rank.

    A part of `peak` does not grow with them, so n sequences take at most n / count of it.
    """
    return int(limit * count / max(1.0, _largest(peak, dist)))


def _largest(value: float, dist: Dist) -> float:
    """The maximum over ranks."""
    return float(dist.all_reduce_max_(torch.tensor([value], dtype=torch.float64, device=dist.device)).item())


def resolve_micro_batch_tokens(run: RunDir, run_config: RunConfig, policy: Policy, dist: Dist) -> RunConfig:
    """Fix the tokens per micro-batch: as recorded for this setting, else as set, or measured for "auto".

    An earlier start of the run has recorded a measurement, or a smaller size after it ran out of memory.
    """
    setting = run_config.config.trainer.tokens_per_micro_batch
    known = torch.tensor([recorded_tokens(run, setting) if dist.is_main else 0], device=dist.device)
    tokens = int(dist.broadcast_(known).item())
    if not tokens and setting != "auto":
        if dist.is_main:  # halve_micro_batches would keep the old setting of this record
            run.micro_batch_path.unlink(missing_ok=True)
        return run_config
    if not tokens:
        longest = dist.share(longest_prompt(run) if dist.is_main else None)
        tokens, reason = measure_micro_batch_tokens(policy, run_config, longest, dist)
        if dist.is_main:
            write_json(run.micro_batch_path, {"tokens": tokens, "reason": reason, "setting": setting})
            print(f"micro-batches of {tokens} tokens: {reason}", flush=True)
    return with_micro_batch_tokens(run_config, tokens)


def recorded_tokens(run: RunDir, setting: int | str) -> int:
    """The tokens in micro_batch.json if it was made for this setting, else 0."""
    record = run.read_json(run.micro_batch_path) if run.micro_batch_path.exists() else {}
    return run.read_count(run.micro_batch_path, "tokens") if record.get("setting") == setting else 0


def with_micro_batch_tokens(run_config: RunConfig, tokens: int) -> RunConfig:
    """`run_config` with trainer.tokens_per_micro_batch replaced."""
    config = run_config.config
    trainer = config.trainer.model_copy(update={"tokens_per_micro_batch": tokens})
    return run_config.model_copy(update={"config": config.model_copy(update={"trainer": trainer})})


def _measured_pass(policy: Policy, count: int, prompt: int, completion: int) -> tuple[int, float]:
    """Run a pass, forward and backward, over a group. Returns its tokens with padding, and peak bytes."""
    examples = [completion_example([1] * prompt, [2 + i] * completion, trajectory=i) for i in range(count)]
    tokens = pack_tokens(examples, policy.packing, policy.device)
    before = reset_peak_bytes(policy.device)
    logprobs, _ = score(policy, tokens, temperature=1.0)
    torch.autograd.grad(logprobs.sum(), list(policy.lora.values()), allow_unused=True)
    return tokens.num_nodes, peak_bytes(policy.device) - before


def _free_bytes(device: torch.device, memory: MemoryPlan, dp_size: int) -> float:
    """Bytes that this rank may still allocate."""
    if device.type == "cuda":
        if memory.trainer_bytes is not None:
            return float(memory.trainer_bytes - torch.cuda.memory_allocated(device))
        return float(torch.cuda.mem_get_info(device)[0])
    return CPU_SHARE * available_memory() / dp_size


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: on a GPU, in torch's CPU allocator, or in Python.

    Also if a user's function raised it, which its error names as the cause.
    """
    if error.__cause__ is not None and is_out_of_memory(error.__cause__):
        return True
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in FAILED_ALLOCATIONS)
    )


def halve_micro_batches(run: RunDir, run_config: RunConfig, step: int, reason: str) -> RunConfig:
    """Halve the micro-batches, free what the failed attempt left, and record the new size.

    Any rank may call it. Raises RunFailed if they are as small as they can be.
    """
    tokens = run_config.config.trainer.tokens_per_micro_batch
    assert tokens != "auto", "resolve_micro_batch_tokens replaces it before the first step"
    half = tokens // 2
    if half < SMALLEST_MICRO_BATCH:
        raise RunFailed(
            f"Step {step} ran out of memory with micro-batches of only {tokens} tokens: {reason}",
            "Set trainer.checkpointing=full, lower rollout.max_completion_tokens, use more ranks "
            "(trainer.num_ranks), or give the engine less (engine.gpu_memory_utilization).",
        )
    record = run.read_json(run.micro_batch_path) if run.micro_batch_path.exists() else {}
    setting = record.get("setting", tokens)
    note = f"step {step} ran out of memory with {tokens} tokens per micro-batch: {reason}"
    write_json(run.micro_batch_path, {"tokens": half, "reason": note, "setting": setting})
    free_memory()
    return with_micro_batch_tokens(run_config, half)


def free_memory() -> None:
    """Give back what a failed attempt, or a policy that has left, held. Call it where no frame holds it."""
    forget_outputs()
    gc.collect()
    release_cached_memory()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def lost_to_memory(run_config: RunConfig, step: int, reason: str) -> OutOfMemory:
    """The error for a run of several ranks, after `halve_micro_batches`.

    The other ranks wait for this one in a collective, so the trainer ends and resumes from its checkpoint.
    """
    return OutOfMemory(
        f"step {step} ran out of memory ({reason}). It is computed again with "
        f"trainer.tokens_per_micro_batch={run_config.config.trainer.tokens_per_micro_batch}.",
        "",
    )


def first_line(error: BaseException) -> str:
    """What failed, without torch's statistics and stack."""
    return (str(error).splitlines() or [type(error).__name__])[0].strip()


def limit_gpu_memory(memory: MemoryPlan, device: torch.device) -> None:
    """Keep torch out of the memory of the engines on this rank's GPU: an engine may start at any time."""
    if device.type == "cuda" and memory.trainer_bytes is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory.trainer_bytes / total), device)


def reset_peak_bytes(device: torch.device) -> float:
    """Reset the peak to the bytes in use now, and return them."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return float(torch.cuda.memory_allocated(device))
    # 5 resets the peak to the resident size (proc(5), clear_refs).
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _bytes_of_this_process("VmRSS")


def peak_bytes(device: torch.device) -> float:
    """Peak memory since `reset_peak_bytes`."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return _bytes_of_this_process("VmHWM")


def memory_so_far(device: torch.device) -> dict[str, float]:
    """The largest memory of this rank as metrics; on a GPU also what torch's tensors took there.

    getrusage counts KiB on Linux. `reset_peak_bytes` resets the GPU's peak, before the first step only.
    """
    own = {"mem/rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0}
    if device.type == "cuda":
        own["mem/gpu_peak_bytes"] = float(torch.cuda.max_memory_allocated(device))
    return own


def _bytes_of_this_process(name: str) -> float:
    """A line of /proc/self/status, which counts KiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return float(next(x for x in lines if x.startswith(f"{name}:")).split()[1]) * 1024


CLEAN_ALL_BUFFERS = 0
"""Command from <oneapi/tbb/scalable_allocator.h>."""


def release_cached_memory() -> bool:
    """Make TBB's allocator return its free blocks to the system. False if TBB's allocator is not loaded.

    It caches blocks by size, and every pass has other sizes: the next pass cannot reuse the blocks. Without
    this call the peak of a train phase is 36 % higher.
    """
    clean = getattr(ctypes.CDLL(None), "scalable_allocation_command", None)
    if clean is None:
        return False
    clean(CLEAN_ALL_BUFFERS, None)
    return True
