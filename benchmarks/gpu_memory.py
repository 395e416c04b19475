"""Part of `make gpu-check` that takes memory from the trainer in the middle of a step."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpu_train
from gpu_sizes import sizes_of, varied_groups

if TYPE_CHECKING:
    from gpu_check import Report

    from skylite.model.policy import Policy

SPARE_GIB = 3
"""Memory that the trainer may still take. A micro-batch of 16,384 tokens takes 16 GiB."""
DRY_RUN_TOKENS = 25


def out_of_memory(report: Report, shape: str) -> None:
    """Two steps with too little memory: the first must halve the micro-batches until it fits."""
    gpu_train.use_trainer_environment()  # the imports below load torch
    from skylite.config.train import Resolved, RunConfig
    from skylite.run.run_dir import RunDir
    from skylite.trainer import loop
    from skylite.trainer.optimizer import make_optimizer

    shape, sizes = sizes_of(shape, report.dry_run)
    config, policy, choices, dist = gpu_train.build(shape, sizes, "sdpa", "selective", "tree")
    resolved = Resolved(
        model_path="", model_fingerprint="", dtype="bfloat16", device=policy.device.type, lora_sync_path=""
    )
    optimizer = make_optimizer("policy", policy.lora, config.optim.lr, 1.0, config.optim)
    setattr(loop, "publish_version", lambda *_: {})  # noqa: B010 -- no engine waits for it
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        trainer = loop.Trainer(
            run=RunDir(Path(folder)),
            run_config=RunConfig(skylite_version="gpu-check", config=config, resolved=resolved),
            dist=dist,
            policy=policy,
            optimizer=optimizer,
            critic=None,
            canary_sequences=[],
            base_logprobs=[],
            choices=choices,
        )
        take_memory(policy)
        for step in (1, 2):
            trainer, result = loop.try_until_it_fits(trainer, varied_groups(sizes, step), step)
            tokens = trainer.config.trainer.tokens_per_micro_batch
            grad_norm = result.metrics.get("optim/grad_norm")
            row = {"step": step, "tokens_per_micro_batch": tokens, "grad_norm": grad_norm}
            row |= gpu_train.memory_of(policy.device)
            report.add("steps", row | {"warnings": list(result.warnings), "anomaly": result.anomaly})
    if not report.found["steps"][0]["warnings"]:
        raise RuntimeError("the first step did not run out of memory")


def take_memory(policy: Policy) -> None:
    """Leave the trainer SPARE_GIB on a GPU; on a CPU, fail for more than DRY_RUN_TOKENS tokens."""
    import torch

    from skylite.trainer import step

    if policy.device.type == "cuda":
        total = torch.cuda.get_device_properties(policy.device).total_memory
        limit = torch.cuda.memory_reserved(policy.device) + SPARE_GIB * 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), policy.device)
        return
    right = step.micro_batch_loss

    def limited(micro: Any, *args: Any) -> Any:
        if len(micro.token_weights) > DRY_RUN_TOKENS:
            raise MemoryError("a dry run's memory is full")
        return right(micro, *args)

    setattr(step, "micro_batch_loss", limited)  # noqa: B010
