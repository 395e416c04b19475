"""trainer.tokens_per_micro_batch = "auto": the largest pass that fits, from two passes of known size."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from skylite.config.train import RunConfig
from skylite.model.distributed import Dist
from skylite.model.packing import pack_tokens
from skylite.model.policy import Policy, score
from skylite.run.files import write_json
from skylite.run.run_dir import RunDir

PROBE_TOKENS = {"cpu": (256, 768), "cuda": (1024, 4096)}
"""About the tokens of the two passes."""
TOKEN_MULTIPLE = 64
MAX_TOKENS_PER_PASS = 65536
SAFETY = 0.85
"""Of the memory that is free: passes of other shapes, the optimizer's state and fragments need the rest."""
CPU_SHARE = 0.5
"""Of the machine's free memory: vLLM starts meanwhile, and other people may work here."""


@dataclass(frozen=True, slots=True)
class PassMemory:
    """What a forward and backward pass takes: bytes = fixed + per_token * tokens."""

    fixed: float
    per_token: float

    def max_tokens(self, limit: float) -> int:
        """The largest multiple of TOKEN_MULTIPLE tokens whose pass takes at most `limit` bytes; TOKEN_MULTIPLE where none does."""
        tokens = int((limit - self.fixed) / self.per_token) if self.per_token > 0 else MAX_TOKENS_PER_PASS
        return max(TOKEN_MULTIPLE, min(tokens, MAX_TOKENS_PER_PASS) // TOKEN_MULTIPLE * TOKEN_MULTIPLE)


def fit_pass_memory(sizes: tuple[int, int], peaks: tuple[float, float]) -> PassMemory:
    """The line through two measured passes (tokens, bytes)."""
    per_token = (peaks[1] - peaks[0]) / (sizes[1] - sizes[0])
    return PassMemory(fixed=max(0.0, peaks[0] - per_token * sizes[0]), per_token=per_token)


def measure_micro_batch_tokens(policy: Policy, run_config: RunConfig, dist: Dist) -> tuple[int, str]:
    """The tokens of a micro-batch, the same on every rank, and how they were found, in words. All ranks call it."""
    config, device = run_config.config, policy.device
    sizes = PROBE_TOKENS[device.type]
    # A padded row holds its prompt too, and what attention takes grows with the row.
    longest = config.rollout.max_completion_tokens + (
        config.rollout.max_prompt_tokens if policy.packing == "padded" else 0
    )
    completion = min(longest, sizes[0] // 2)
    small, large = (_measured_pass(policy, size, completion) for size in sizes)
    found = fit_pass_memory((small[0], large[0]), (small[1], large[1]))
    limit = SAFETY * _free_bytes(device, config.engine.gpu_memory_utilization, dist.dp_size)
    least = -dist.all_reduce_max_(torch.tensor([-found.max_tokens(limit)], device=device))
    tokens = int(least.item())
    reason = f"passes of {small[0]} and {large[0]} tokens say {found.per_token / 2**20:.2f} MiB a token; {limit / 2**30:.1f} GiB are free"
    return tokens, reason


def resolve_micro_batch_tokens(run: RunDir, run_config: RunConfig, policy: Policy, dist: Dist) -> RunConfig:
    """The config with a number where it says "auto": the one found before if this run was resumed, else measured now and recorded."""
    if run_config.config.trainer.tokens_per_micro_batch != "auto":
        return run_config
    known = torch.tensor(
        [int(run.read_json(run.micro_batch_path)["tokens"]) if run.micro_batch_path.exists() else 0],
        device=dist.device,
    )
    tokens = int(dist.broadcast_(known).item())
    if not tokens:
        tokens, reason = measure_micro_batch_tokens(policy, run_config, dist)
        if dist.is_main:
            write_json(run.micro_batch_path, {"tokens": tokens, "reason": reason})
            print(f"micro-batches of {tokens} tokens: {reason}", flush=True)
    config = run_config.config
    trainer = config.trainer.model_copy(update={"tokens_per_micro_batch": tokens})
    return run_config.model_copy(update={"config": config.model_copy(update={"trainer": trainer})})


def _measured_pass(policy: Policy, num_tokens: int, completion: int) -> tuple[int, float]:
    """Tokens computed by a forward and backward pass over about `num_tokens`, padding included, and the bytes it took at most."""
    count = num_tokens // (completion + 1)
    tokens = pack_tokens(
        [[1]] * count,
        [[2 + i] * completion for i in range(count)],
        list(range(count)),
        policy.packing,
        policy.device,
    )
    before = reset_peak_bytes(policy.device)
    logprobs, _ = score(policy, tokens, temperature=1.0)
    torch.autograd.grad(logprobs.sum(), list(policy.lora.values()), allow_unused=True)
    return tokens.num_nodes, peak_bytes(policy.device) - before


def _free_bytes(device: torch.device, engine_share: float, dp_size: int) -> float:
    """Memory this rank may still take, bytes."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # The engine may not have taken its share yet.
        return float(min(free, total * (1 - engine_share) - torch.cuda.memory_allocated(device)))
    return CPU_SHARE * _kib_line(Path("/proc/meminfo"), "MemAvailable") * 1024 / dp_size


def reset_peak_bytes(device: torch.device) -> float:
    """Start to count the peak_bytes anew; bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return float(torch.cuda.memory_allocated(device))
    # 5: the kernel sets the peak_bytes back to what is resident (proc(5), clear_refs).
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _kib_line(Path("/proc/self/status"), "VmRSS") * 1024


def peak_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return _kib_line(Path("/proc/self/status"), "VmHWM") * 1024


def _kib_line(path: Path, name: str) -> float:
    line = next(x for x in path.read_text(encoding="ascii").splitlines() if x.startswith(f"{name}:"))
    return float(line.split()[1])


CLEAN_ALL_BUFFERS = 0
"""Of <oneapi/tbb/scalable_allocator.h>."""


def release_cached_memory() -> bool:
    """Have TBB's allocator give its free blocks back; False where it is not there.

    It keeps them by their size, and every pass has sizes of its own: without this the blocks of one pass lie idle through the next.
    """
    clean = getattr(ctypes.CDLL(None), "scalable_allocation_command", None)
    if clean is None:
        return False
    clean(CLEAN_ALL_BUFFERS, None)
    return True
