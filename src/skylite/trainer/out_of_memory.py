"""A step that runs out of memory is computed again with micro-batches of half the size.

The result of a step does not depend on its micro-batches, up to rounding. The size stays for the rest of the
run, and micro_batch.json keeps it for a resume.
"""

from __future__ import annotations

import gc

import torch

from skylite.config.train import RunConfig
from skylite.errors import OutOfMemory, RunFailed
from skylite.model.lora_linear import forget_outputs
from skylite.run.files import write_json
from skylite.run.run_dir import RunDir
from skylite.trainer.micro_batch_memory import with_micro_batch_tokens
from skylite.trainer.process_memory import release_cached_memory

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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: on a GPU, in torch's CPU allocator, or in Python."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in FAILED_ALLOCATIONS)
    )


def halve_micro_batches(run: RunDir, run_config: RunConfig, step: int, reason: str) -> RunConfig:
    """Halve the micro-batches, free what the failed attempt left, and record the new size.

    Any rank may call it. Raises RunFailed if they are as small as they can be.
    """
    tokens = run_config.config.trainer.tokens_per_micro_batch
    assert tokens != "auto", "trainer/micro_batch_memory.py replaces it before the first step"
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
    forget_outputs()
    gc.collect()
    release_cached_memory()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    return with_micro_batch_tokens(run_config, half)


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
