"""Settings that skylite computes from data and machine, each with a note for config.json."""

from __future__ import annotations

import math
from fractions import Fraction

from skylite.config.train import TrainConfig
from skylite.data.prompt_order import steps_per_epoch
from skylite.processes.hardware import Device, cpu_cores, threads_per_rank

CPU_MICRO_BATCH_TOKENS = 2048
"""On a CPU larger micro-batches need more memory and are not faster."""


def epochs_to_steps(config: TrainConfig, num_prompts: int) -> tuple[TrainConfig, str]:
    """Compute num_steps from num_epochs, with a note. Raises DataError if a step takes more prompts."""
    if config.num_epochs is None:
        return config, ""
    per_step = config.rollout.prompts_per_step
    epoch = steps_per_epoch(num_prompts, per_step)
    # A Fraction of the decimal text is exact: in floating point, 0.1 * 30 steps would be rounded up to 4.
    num_steps = math.ceil(Fraction(str(config.num_epochs)) * epoch)
    note = (
        f"num_steps={num_steps}: num_epochs={config.num_epochs:g}, and an epoch of {num_prompts} prompts has "
        f"{epoch} steps (rollout.prompts_per_step={per_step})"
    )
    return config.model_copy(update={"num_steps": num_steps}), note


def device_defaults(config: TrainConfig, device: Device) -> tuple[TrainConfig, list[str]]:
    """Values for the device where nobody set one, with a note on each."""
    trainer, update, notes = config.trainer, {}, []
    if "tokens_per_micro_batch" not in trainer.model_fields_set:
        tokens, reason = trainer.tokens_per_micro_batch, "the default on a GPU"
        if device == "cpu":
            tokens, reason = CPU_MICRO_BATCH_TOKENS, "larger ones are slower on a CPU and need more memory"
        update["tokens_per_micro_batch"] = tokens
        notes.append(f"trainer.tokens_per_micro_batch={tokens}: {reason}")
    if trainer.num_threads is None:
        threads = threads_per_rank(trainer.num_ranks)
        notes.append(
            f"{threads} CPU threads per rank: {cpu_cores()} usable cores, {trainer.num_ranks} rank(s)"
        )
        if trainer.deterministic:  # their number affects rounding, so a resume elsewhere needs the same
            update["num_threads"] = threads
            notes[-1] += "; fixed, because trainer.deterministic is true"
    return config.model_copy(update={"trainer": trainer.model_copy(update=update)}), notes
