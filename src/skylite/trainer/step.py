"""One training step, the whole recipe: pack, precompute, credit; then per update a gradient and a move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skylite.trainer.metrics import MetricSums, step_metrics
from skylite.trainer.micro_batches import arrange
from skylite.trainer.rollout_gaps import rollout_gaps
from skylite.trainer.trainer import Trainer
from skylite.types import TrainingExample


def train_step(
    trainer: Trainer, examples: Sequence[TrainingExample], step: int, facts: dict[str, Any] | None = None
) -> dict[str, float]:
    """Train on a step's examples; every rank gets all of them. Returns metrics, the same on every rank.

    `facts` receives what the step file holds besides metrics.

    Up to rounding, the result does not depend on the number of micro-batches or ranks. Raises
    TrainingDiverged, and leaves the weights unchanged, if a gradient is not finite.
    """
    rates = trainer.start_step(step)
    table = arrange(examples, trainer.algorithm, trainer.config)
    packed = trainer.pack(table)
    sizes = [len(update) for update in packed]
    micro_batches = [trainer.forward(micro) for update in packed for micro in update]
    micro_batches = trainer.credit(table, micro_batches)

    sums = MetricSums()
    for index, size in enumerate(sizes):
        update, micro_batches = micro_batches[:size], micro_batches[size:]
        update = trainer.select_tokens(update, step, index)
        trainer.forward_backward("policy", update, sums)
        sums.grad_norms.append(trainer.optim_step("policy"))
        if trainer.critic is not None:
            trainer.forward_backward("critic", update, sums)
            sums.critic_grad_norms.append(trainer.optim_step("critic"))
        sums.is_first_update = False
    if facts is not None and examples[0].sampling_logprobs is not None:
        facts["rollout_gaps"] = rollout_gaps(table, sums.scored, step, trainer.config, trainer.dist)
    return step_metrics(table, sums, trainer.algorithm, trainer.config, trainer.dist) | rates
