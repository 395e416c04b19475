"""Parts of `make gpu-check` that train: random models of real shapes, lack of memory, the process group."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import train_phase
from gpu_sizes import Sizes, model_config, sizes_of, varied_groups

from skylite.run.rollout_file import examples_of

if TYPE_CHECKING:
    import torch
    from gpu_check import Report

    from skylite.config.train import TrainConfig
    from skylite.model.policy import Policy
    from skylite.model.process_group import Dist

FLEX, SDPA = ("flex", "selective", "tree"), ("sdpa", "selective", "tree")
FULL, NONE = ("flex", "full", "tree"), ("flex", "none", "tree")
# For each shape: attention, checkpointing, packing; the most valuable first, because time may run out.
MODES = {
    "qwen2.5-7b": [FLEX, SDPA, FULL],
    "qwen2.5-0.5b": [NONE, FLEX, SDPA, ("sdpa", "selective", "padded"), FULL],
}
STEPS = 3
RANK = 32
GRADIENT_TOLERANCE = 0.02
"""Largest relative difference of a gradient norm between two kinds of attention in bfloat16."""
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
SUMMED = 1 << 20
SPARE_GIB = 3
"""Memory that the trainer may still take. A micro-batch of 16,384 tokens takes 9 GiB with flex."""
DRY_RUN_TOKENS = 25


def train(report: Report, shape: str) -> None:
    """Seconds, MFU and peak memory of training steps in every mode of the shape."""
    use_trainer_environment()
    modes = MODES[shape]
    shape, sizes = sizes_of(shape, report.dry_run)
    report.put("shape", shape)
    rate = device_rate(report.dry_run)
    report.put("matrix_tflops", round(rate / 1e12, 1))
    for attention, checkpointing, packing in modes:
        mode = {"attention": attention, "checkpointing": checkpointing, "packing_wanted": packing}
        try:
            row = measured(shape, sizes, rate, attention, checkpointing, packing)
        except Exception as error:  # noqa: BLE001 -- out of memory and compilers' errors are results
            row = {"failed": reason_of(error)}
        report.add("rows", mode | {"budget": sizes.budget} | row)
        if (attention, checkpointing, packing) == SDPA:
            report.put("flex_gradient", flex_gradient(report.found["rows"]))
        free_memory()


def reason_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:400]


def flex_gradient(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The first step's gradient norms of sdpa and flex, and `failed` with the reason if they differ."""
    found = {
        row["attention"]: row.get("grad_norms", [])[:1]
        for row in rows
        if (row["attention"], row["checkpointing"], row["packing_wanted"]) in (SDPA, FLEX)
        and row.get("packing") == row["packing_wanted"]
    }
    missing = [name for name in ("sdpa", "flex") if not found.get(name)]
    if missing:
        return {"failed": f"no gradient of a prefix tree with {' and '.join(missing)}"}
    sdpa, flex = found["sdpa"][0], found["flex"][0]
    difference = abs(flex - sdpa) / sdpa if sdpa else float("inf")
    result = {"sdpa": sdpa, "flex": flex, "difference": round(difference, 6)}
    if difference <= GRADIENT_TOLERANCE:
        return result
    return result | {"failed": f"flex's gradient norm differs from sdpa's by {difference:.1%}"}


@dataclass(slots=True)
class Measured:
    """The steps of one mode that ended."""

    seconds: list[float] = field(default_factory=list)
    flop: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)


def measured(
    shape: str, sizes: Sizes, rate: float, attention: str, checkpointing: str, packing: str
) -> dict[str, Any]:
    """The row of one mode, beside `rate` FLOP per second. The first step, which compiles, is not counted.

    A step that fails ends it: `failed` has the reason, and the steps before it keep their numbers.
    """
    import torch

    config, policy, choices, dist = build(shape, sizes, attention, checkpointing, packing)
    if policy.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    done, failed = Measured(), dict[str, Any]()
    try:
        run_steps(done, policy, sizes, config, dist)
    except Exception as error:  # noqa: BLE001 -- as in `train`
        failed = {"failed": reason_of(error)}
    row = {"packing": policy.packing, "choices": choices, **memory_of(policy.device), **failed}
    if not done.seconds:
        return row
    counted, flop = sum(done.seconds[1:]), sum(done.flop[1:])
    last = done.metrics[-1]
    row |= {
        "first_s": round(done.seconds[0], 3),
        "seconds": [round(s, 3) for s in done.seconds[1:]],
        "tokens_total": last["tokens/total"],
        "tokens_computed": last["tokens/unique"],
        "grad_norms": [m["optim/grad_norm"] for m in done.metrics],
    }
    if counted:
        row |= {"tflops": round(flop / counted / 1e12, 2), "mfu": round(flop / counted / rate, 5)}
    return row


def run_steps(done: Measured, policy: Policy, sizes: Sizes, config: TrainConfig, dist: Dist) -> None:
    """Train, and add each step to `done`."""
    from skylite.trainer.step import train_step
    from skylite.trainer.trainer import make_trainer

    trainer = make_trainer(policy, config, dist)
    weights = train_phase.count_weights(policy)
    for step in range(1, STEPS + 1):
        examples = examples_of(varied_groups(sizes, step))
        started = time.perf_counter()
        metrics = train_step(trainer, examples, step)
        done.seconds.append(time.perf_counter() - started)
        done.flop.append(train_phase.work(weights, metrics, policy.packing == "tree"))
        done.metrics.append(metrics)


def memory_of(device: torch.device) -> dict[str, float]:
    """Peak of the tensors in GiB; on a GPU also what torch holds, and what others do: CUDA and libraries."""
    import torch

    row = {"peak_gib": round(train_phase.peak_gib(device), 2)}
    if device.type != "cuda":
        return row
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return row | {
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
        "reserved_bytes": reserved,
        "outside_torch_bytes": total - free - reserved,
    }


def device_rate(dry_run: bool) -> float:
    """FLOP per second of a large matrix product in bfloat16; in float32 for a dry run, which a CPU can do."""
    import torch

    return train_phase.matrix_peak(torch.float32 if dry_run else torch.bfloat16, device_of())


def profile(report: Report, shape: str) -> None:
    """Where one micro-batch spends its time: the operations that take most, in milliseconds."""
    use_trainer_environment()
    import torch

    from skylite.trainer.step import train_step
    from skylite.trainer.trainer import make_trainer

    shape, sizes = sizes_of(shape, report.dry_run)
    report.put("budget", sizes.budget)
    on_gpu = torch.cuda.is_available()
    config, policy, _, dist = build(shape, sizes, "flex" if on_gpu else "sdpa", "selective", "tree")
    trainer = make_trainer(policy, config, dist)
    examples = examples_of(varied_groups(sizes, 1)[: 2 if report.dry_run else 3])
    for step in (1, 2):
        train_step(trainer, examples, step)
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if on_gpu else [])]) as profiler:
        started = time.perf_counter()
        metrics = train_step(trainer, examples, 3)
        seconds = time.perf_counter() - started
    spent, calls = Counter[str](), Counter[str]()
    for event in profiler.key_averages():
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if on_gpu and "CPU" in str(event.device_type):
            continue  # counted at its kernels
        spent[event.key[:100]] += us
        calls[event.key[:100]] += event.count
    rows = [{"name": n, "ms": round(us / 1e3, 3), "calls": calls[n]} for n, us in spent.most_common(30)]
    report.put("seconds_profiled", round(seconds, 3))
    report.put("busy_s", round(spent.total() / 1e6, 3))
    report.put("tokens_computed", metrics["tokens/unique"])
    report.put("operations", rows)


def collectives(report: Report) -> None:
    """The group of one rank as the trainer makes it, and a sum over it: NCCL on a GPU, else gloo.

    Raises RuntimeError if the sum is wrong.
    """
    use_trainer_environment()
    os.environ.update(TORCHRUN, TORCHELASTIC_RUN_ID="gpu-check")
    import torch

    from skylite.model.process_group import process_group

    on_gpu = torch.cuda.is_available()
    started = time.perf_counter()
    with (
        tempfile.TemporaryDirectory(prefix="skylite-") as folder,
        process_group("cuda" if on_gpu else "cpu", Path(folder)) as dist,
    ):
        report.put("backend", torch.distributed.get_backend())
        if on_gpu:
            report.put("nccl", torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
        values = torch.ones(SUMMED, device=dist.device)
        report.put("memory_before", memory_of(dist.device))
        total = float(dist.all_reduce_sum_(values).sum())
        report.put("seconds", round(time.perf_counter() - started, 3))
        report.put("memory_after", memory_of(dist.device))
    if total != SUMMED:
        raise RuntimeError(f"the sum over one rank is {total}, not {SUMMED}")


def out_of_memory(report: Report, shape: str) -> None:
    """Two steps with too little memory: the first must halve the micro-batches until it fits."""
    use_trainer_environment()  # the imports below load torch
    from skylite.config.train import RunConfig
    from skylite.run.run_dir import RunDir
    from skylite.trainer import loop
    from skylite.trainer.trainer import make_trainer
    from tests.decisions import resolved

    shape, sizes = sizes_of(shape, report.dry_run)
    config, policy, choices, dist = build(shape, sizes, "sdpa", "selective", "tree")
    decided = resolved(Path(), Path(), placement={"dtype": "bfloat16", "device": policy.device.type})
    setattr(loop, "publish_version", lambda *_: {})  # noqa: B010 -- no engine waits for it
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        state = loop.LoopState(
            run=RunDir(Path(folder)),
            run_config=RunConfig(skylite_version="gpu-check", config=config, resolved=decided),
            trainer=make_trainer(policy, config, dist),
            canary_sequences=[],
            base_logprobs=[],
            choices=choices,
        )
        take_memory(policy)
        for step in (1, 2):
            examples = examples_of(varied_groups(sizes, step))
            state, result = loop.try_until_it_fits(state, examples, step)
            tokens = state.config.trainer.tokens_per_micro_batch
            grad_norm = result.metrics.get("optim/grad_norm")
            row = {"step": step, "tokens_per_micro_batch": tokens, "grad_norm": grad_norm}
            row |= memory_of(policy.device)
            report.add("steps", row | {"warnings": list(result.warnings), "anomaly": result.anomaly})
    if not report.found["steps"][0]["warnings"]:
        raise RuntimeError("the first step did not run out of memory")


def take_memory(policy: Policy) -> None:
    """Leave the trainer SPARE_GIB on a GPU; on a CPU, fail for more than DRY_RUN_TOKENS tokens."""
    import torch

    from skylite.algorithms.policy_gradient import PolicyGradient

    if policy.device.type == "cuda":
        total = torch.cuda.get_device_properties(policy.device).total_memory
        limit = torch.cuda.memory_reserved(policy.device) + SPARE_GIB * 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), policy.device)
        return
    right = PolicyGradient.loss

    def limited(algorithm: Any, x: Any) -> Any:
        if len(x.policy_logprobs) > DRY_RUN_TOKENS:
            raise MemoryError("a dry run's memory is full")
        return right(algorithm, x)

    setattr(PolicyGradient, "loss", limited)  # noqa: B010


def build(
    shape: str, sizes: Sizes, attention: str, checkpointing: str, packing: str
) -> tuple[TrainConfig, Policy, list[str], Dist]:
    """A policy of random weights on this machine's device, with the shortcuts that its probes allow."""
    import torch

    from skylite.config.train import TrainConfig
    from skylite.model import policy as policy_module
    from skylite.model.fast_path_check import enable_shortcuts
    from tests.decisions import resolved
    from tests.one_rank import OneRank

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    config = TrainConfig.model_validate(
        {
            "num_steps": STEPS,
            "lora": {"rank": RANK, "alpha": RANK},
            "rollout": {"max_completion_tokens": sizes.longest},
            "trainer": {
                "tokens_per_micro_batch": sizes.budget,
                "checkpointing": checkpointing,
                "attention": attention,
            },
        }
    )
    decided = resolved(Path(), Path(), placement={"dtype": "bfloat16", "device": device.type})
    dist: Any = OneRank(device)
    with mock.patch.object(policy_module, "load_base", return_value=(random_base(shape, device), "")):
        policy = policy_module.load_policy(decided, config, dist)
    policy, choices = enable_shortcuts(policy, list(range(20, 60)))
    if packing == "padded":
        policy.model.get_base_model().set_attn_implementation("sdpa")
        policy = replace(policy, packing="padded")
    return config, policy, choices, dist


def random_base(shape: str, device: torch.device) -> Any:
    """A model of random bfloat16 weights. The real folders would have to be downloaded."""
    import torch
    from transformers import AutoModelForCausalLM

    from skylite.model.attention_backends import register_backends

    register_backends()
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(model_config(shape), dtype=torch.bfloat16).eval()


def device_of() -> torch.device:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def use_trainer_environment() -> None:
    """The environment variables that the trainer gets, set before torch is imported."""
    from skylite.processes.hardware import cpu_cores
    from skylite.processes.torchrun import trainer_env

    added = trainer_env(cpu_cores())
    os.environ.update({k: v for k, v in added.items() if k != "LD_PRELOAD"})  # too late for this process


def free_memory() -> None:
    import torch

    from skylite.model.lora_linear import forget_outputs

    forget_outputs()  # after a failed pass they hold the model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
