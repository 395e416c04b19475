"""One training step, the whole recipe: pack, precompute, credit; then per update a gradient and a move.

Consumes: a step's examples, the same on every rank. Waits for: the other ranks, at each reduction.
Produces: updated policy and critic, metrics. Unblocks: the publish of the step's version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from skylite.model.policy import is_top_token, score
from skylite.trainer.metrics import MetricSums, step_metrics
from skylite.trainer.micro_batches import arrange
from skylite.trainer.precompute import loss_inputs, ref_logprobs
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
    rates |= trainer.algorithm.learned_metrics(table.components)
    return step_metrics(table, sums, trainer.algorithm, trainer.config, trainer.dist) | rates


@torch.no_grad()
def held_out_metrics(trainer: Trainer, examples: Sequence[TrainingExample]) -> dict[str, float]:
    """The algorithm's metrics of held-out rows as one batch, without an update. All ranks call it."""
    policy, algorithm, temperature = trainer.policy, trainer.algorithm, trainer.temperature
    table = arrange(examples, algorithm, trainer.config, num_updates=1)
    sums = {name: torch.zeros((), device=trainer.dist.device).double() for name in algorithm.held_out}
    for micro in trainer.pack(table)[0]:
        ref = ref_logprobs(policy, micro, temperature) if algorithm.needs_reference else None
        logprobs, entropies = score(policy, micro.tokens, temperature)
        is_top = is_top_token(policy, micro.tokens) if algorithm.counts_top_tokens else None
        _, metrics = algorithm.loss(replace(loss_inputs(micro, logprobs, entropies, ref), is_top=is_top))
        for name, of_loss in algorithm.held_out.items():
            sums[name] += metrics[of_loss]
    reduced = trainer.dist.all_reduce_sum_(torch.stack(list(sums.values())))
    return dict(zip(sums, reduced.tolist(), strict=True))
