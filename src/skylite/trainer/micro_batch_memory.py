"""Measures how many tokens fit into a micro-batch (tokens_per_micro_batch=auto), from two passes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from skylite.config.train import Resolved, RunConfig
from skylite.model.packing import pack_tokens
from skylite.model.policy import Policy, score
from skylite.model.process_group import Dist
from skylite.processes.hardware import available_memory
from skylite.run.files import write_json
from skylite.run.run_dir import RunDir
from skylite.trainer.canary import longest_prompt
from skylite.trainer.process_memory import peak_bytes, reset_peak_bytes

PROBE_TOKENS = {"cpu": (256, 768), "cuda": (1024, 4096)}
"""Approximate tokens of the two measured passes, by device type."""
TOKEN_MULTIPLE = 64
"""The measured number of tokens is rounded down to a multiple of this."""
MAX_TOKENS_PER_PASS = 65536
SAFETY = 0.85
"""Share of the free memory to use. Other shapes, the optimizer's state and fragmentation need the rest."""
CPU_SHARE = 0.5
"""Share of the machine's free memory to use. vLLM starts at the same time, and other users need memory."""


@dataclass(frozen=True, slots=True)
class PassMemory:
    """Peak memory of a forward and backward pass: bytes = fixed + per_token * tokens."""

    fixed: float
    per_token: float

    def max_tokens(self, limit: float) -> int:
        """The most tokens whose pass takes at most `limit` bytes: a multiple of TOKEN_MULTIPLE, never 0."""
        tokens = int((limit - self.fixed) / self.per_token) if self.per_token > 0 else MAX_TOKENS_PER_PASS
        return max(TOKEN_MULTIPLE, min(tokens, MAX_TOKENS_PER_PASS) // TOKEN_MULTIPLE * TOKEN_MULTIPLE)


def fit_pass_memory(sizes: tuple[int, int], peaks: tuple[float, float]) -> PassMemory:
    """The line through two measured passes, given by their tokens and peak bytes."""
    per_token = (peaks[1] - peaks[0]) / (sizes[1] - sizes[0])
    return PassMemory(fixed=max(0.0, peaks[0] - per_token * sizes[0]), per_token=per_token)


def measure_micro_batch_tokens(
    policy: Policy, run_config: RunConfig, longest_prompt: int, dist: Dist
) -> tuple[int, str]:
    """Tokens per micro-batch, the same on every rank, and a sentence with the reason. All ranks call it.

    The measured passes have the longest prompt and the longest completions: attention's memory grows with
    both.
    """
    device, completion = policy.device, run_config.config.rollout.max_completion_tokens
    sizes = PROBE_TOKENS[device.type]
    fewest = max(1, sizes[0] // completion)
    counts = (fewest, max(fewest + 2, sizes[1] // completion))
    small, large = (_measured_pass(policy, count, longest_prompt, completion) for count in counts)
    memory = fit_pass_memory((small[0], large[0]), (small[1], large[1]))
    limit = SAFETY * _free_bytes(device, run_config.resolved, dist.dp_size)
    least = -dist.all_reduce_max_(torch.tensor([-memory.max_tokens(limit)], device=device))
    tokens = int(least.item())
    reason = (
        f"passes of {small[0]} and {large[0]} tokens took {memory.per_token / 2**20:.2f} MiB per token; "
        f"{limit / 2**30:.1f} GiB are free"
    )
    return tokens, reason


def resolve_micro_batch_tokens(run: RunDir, run_config: RunConfig, policy: Policy, dist: Dist) -> RunConfig:
    """Fix the tokens per micro-batch: as recorded for this setting, else as set, or measured for "auto".

    An earlier start of the run has recorded a measurement, or a smaller size after it ran out of memory.
    """
    setting = run_config.config.trainer.tokens_per_micro_batch
    known = torch.tensor([recorded_tokens(run, setting)], device=dist.device)
    tokens = int(dist.broadcast_(known).item())
    if not tokens and setting != "auto":
        return run_config
    if not tokens:
        tokens, reason = measure_micro_batch_tokens(policy, run_config, longest_prompt(run), dist)
        if dist.is_main:
            write_json(run.micro_batch_path, {"tokens": tokens, "reason": reason, "setting": setting})
            print(f"micro-batches of {tokens} tokens: {reason}", flush=True)
    return with_micro_batch_tokens(run_config, tokens)


def recorded_tokens(run: RunDir, setting: int | str) -> int:
    """The tokens in micro_batch.json if it was made for this setting, else 0."""
    record = run.read_json(run.micro_batch_path) if run.micro_batch_path.exists() else {}
    return int(record["tokens"]) if record.get("setting") == setting else 0


def with_micro_batch_tokens(run_config: RunConfig, tokens: int) -> RunConfig:
    """`run_config` with trainer.tokens_per_micro_batch replaced."""
    config = run_config.config
    trainer = config.trainer.model_copy(update={"tokens_per_micro_batch": tokens})
    return run_config.model_copy(update={"config": config.model_copy(update={"trainer": trainer})})


def _measured_pass(policy: Policy, count: int, prompt: int, completion: int) -> tuple[int, float]:
    """Run a pass, forward and backward, over a group. Returns its tokens with padding, and peak bytes."""
    tokens = pack_tokens(
        [[1] * prompt] * count,
        [[2 + i] * completion for i in range(count)],
        [0] * count,
        policy.packing,
        policy.device,
    )
    before = reset_peak_bytes(policy.device)
    logprobs, _ = score(policy, tokens, temperature=1.0)
    torch.autograd.grad(logprobs.sum(), list(policy.lora.values()), allow_unused=True)
    return tokens.num_nodes, peak_bytes(policy.device) - before


def _free_bytes(device: torch.device, resolved: Resolved, dp_size: int) -> float:
    """Bytes that this rank may still allocate."""
    if device.type == "cuda":
        if resolved.trainer_memory_bytes is not None:
            return float(resolved.trainer_memory_bytes - torch.cuda.memory_allocated(device))
        return float(torch.cuda.mem_get_info(device)[0])
    return CPU_SHARE * available_memory() / dp_size
