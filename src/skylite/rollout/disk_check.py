"""Check before a run starts that the disks can hold it. Every large write checks again (run/files.py)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from skylite.adapters.import_adapter import expand_adapter_path, warm_start_bytes
from skylite.config.resolved import Resolved
from skylite.config.train import TrainConfig
from skylite.errors import ConfigError
from skylite.hub.text_model import model_shapes
from skylite.run.files import RESERVE_BYTES, format_bytes, free_bytes
from skylite.run.run_dir import RunDir

logger = logging.getLogger(__name__)

TOKEN_BYTES = 8
"""Upper bound for one completion token in a rollout file: id, logprob and text, compressed."""
TOP_BYTES = 8
"""The same for one of a teacher's most likely tokens in its place: id and logprob."""
FLOAT32_BYTES = 4


def check_disk_space(run: RunDir, config: TrainConfig, resolved: Resolved) -> None:
    """Raise ConfigError if adapters and checkpoints cannot fit; warn if the rollouts of all steps may not."""
    adapter = adapter_bytes(resolved.model.path, config, resolved.placement.dtype)
    checkpoint = checkpoint_bytes(resolved.model.path, config)
    # One more of each: the new one is complete before the oldest is deleted.
    kept = config.sync.keep_last + config.checkpoint.keep_last + 2
    in_run = (config.checkpoint.keep_last + 1) * checkpoint
    adapters = {run.warm_start: config.lora.from_adapter, run.teacher: config.algorithm.teacher_folder}
    in_run += sum(
        warm_start_bytes(expand_adapter_path(source))
        for copied, source in adapters.items()
        if source is not None and not copied.exists()
    )
    needs = [(resolved.identity.lora_sync_path, kept * adapter), (run.root, in_run)]
    for paths, need, free in _needs_by_disk(needs):
        if free < need + RESERVE_BYTES:
            raise ConfigError(
                f"The run needs {format_bytes(need + RESERVE_BYTES)} in {paths} "
                f"for adapters and checkpoints, but only {format_bytes(free)} are free.",
                "Free disk space, choose another --run, or lower checkpoint.keep_last or sync.keep_last.",
            )
    rollouts, free = rollout_bytes(config), free_bytes(run.root)
    if free < rollouts + in_run:
        logger.warning(
            f"the rollouts of {config.num_steps} steps may take up to {format_bytes(rollouts)}, "
            f"but the disk of {run.root} has only {format_bytes(free)} free; "
            "if it fills up, the run stops cleanly and can be resumed"
        )


def adapter_bytes(model_path: Path, config: TrainConfig, dtype: str) -> int:
    """Maximum size of one published adapter: LoRA on every matrix except the embedding and the LM head."""
    return _lora_parameters(model_path, config.lora.max_rank) * (2 if dtype == "bfloat16" else FLOAT32_BYTES)


def checkpoint_bytes(model_path: Path, config: TrainConfig) -> int:
    """Maximum size of one checkpoint: LoRA and two AdamW moments in float32, for policy and critic.

    An average of the policy has no moments.
    """
    critic, own = config.critic_lora, config.lora.max_rank
    rank = own + (critic.rank if critic is not None else 0)
    average = _lora_parameters(model_path, own) if config.has_average else 0
    return FLOAT32_BYTES * (3 * _lora_parameters(model_path, rank) + average)


def rollout_bytes(config: TrainConfig) -> int:
    """Size of the rollout files of all steps if every completion reaches rollout.max_completion_tokens."""
    rollout = config.rollout
    return (
        config.num_steps
        * rollout.prompts_per_step
        * rollout.group_size
        * rollout.max_completion_tokens
        * (TOKEN_BYTES + TOP_BYTES * config.algorithm.teacher_top_k)
    )


def _lora_parameters(model_path: Path, rank: int) -> int:
    return sum(
        rank * sum(shape)
        for name, shape in model_shapes(model_path).items()
        if len(shape) == 2 and not any(part in name for part in ("embed", "lm_head"))
    )


def _needs_by_disk(needs: Sequence[tuple[Path, int]]) -> list[tuple[str, int, int]]:
    """(folders, bytes needed, bytes free) for each disk."""
    disks: dict[int, list[tuple[Path, int]]] = {}
    for path, need in needs:
        existing = next(p for p in (path, *path.parents) if p.exists())
        disks.setdefault(existing.stat().st_dev, []).append((path, need))
    return [
        (" and ".join(str(p) for p, _ in on_disk), sum(n for _, n in on_disk), free_bytes(on_disk[0][0]))
        for on_disk in disks.values()
    ]
