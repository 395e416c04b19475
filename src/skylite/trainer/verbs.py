"""The trainer's verbs for loops that others write: the service's clients, or a notebook.

All ranks call each verb with the same arguments, and get the same result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from skylite.algorithms.token_losses import TOKEN_LOSSES
from skylite.errors import ConfigError, TrainingDiverged
from skylite.model.packing import NO_TOKENS, PackedTokens, pack_tokens, tokens_before, upload
from skylite.model.policy import Policy, score
from skylite.trainer.micro_batch_memory import release_cached_memory
from skylite.trainer.micro_batches import plan_micro_batches
from skylite.trainer.trainer import Trainer
from skylite.types import IntArray, TrainingExample
from skylite.verbs import LOSS_FORMS, AdamParams, Datum, Scored


def forward_backward(
    trainer: Trainer,
    data: Sequence[Datum],
    loss: str,
    settings: Mapping[str, float],
    *,
    backward: bool = True,
) -> Scored:
    """Logprobs of the targets and the loss; with `backward`, its gradient is added to the policy's.

    Up to rounding, the result does not depend on the number of ranks or micro-batches. A call that fails,
    such as out of memory, leaves the gradient as it was.
    """
    before = trainer.optimizer.grads.clone() if backward else None
    try:
        return _forward_backward(trainer, data, loss, settings, backward=backward)
    except Exception:
        if before is not None:
            trainer.optimizer.grads.copy_(before)
        raise


def _forward_backward(
    trainer: Trainer,
    data: Sequence[Datum],
    loss: str,
    settings: Mapping[str, float],
    *,
    backward: bool,
) -> Scored:
    policy, dist = trainer.policy, trainer.dist
    budget = trainer.config.trainer.tokens_per_micro_batch
    assert budget != "auto", "trainer/shared_base.py replaces it"
    parts = plan_micro_batches(
        [[_example(index, datum)] for index, datum in enumerate(data)],
        budget,
        dist.dp_size,
        policy.packing,
        "token",
        policy.pair_cost if dist.dp_size > 1 else 0.0,
    )[dist.dp_rank]
    starts = [0, *accumulate(len(datum.targets) for datum in data)]
    logprobs = torch.zeros(starts[-1], device=policy.device)
    total = torch.zeros(1, dtype=torch.float64, device=policy.device)
    for part in parts:
        release_cached_memory()
        places = [example.trajectory for example in part]
        own, losses = _pass(policy, part, [data[i] for i in places], loss, settings, backward=backward)
        where = np.concatenate([NO_TOKENS, *(np.arange(starts[i], starts[i + 1]) for i in places)])
        logprobs[torch.from_numpy(where).to(policy.device)] = own
        total += losses
    release_cached_memory()
    values = dist.all_reduce_sum_(logprobs).cpu().numpy()
    return Scored(
        logprobs=[values[a:b] for a, b in pairwise(starts)], loss=float(dist.all_reduce_sum_(total).item())
    )


def optim_step(trainer: Trainer, params: AdamParams) -> float:
    """Sum the gradient over ranks, clip, update, and start a new gradient. Returns the norm.

    Raises ConfigError, and leaves the weights unchanged, if the gradient is not finite.
    """
    optimizer = trainer.optimizer
    for group in optimizer.adamw.param_groups:
        group["lr"], group["weight_decay"] = params.learning_rate, params.weight_decay
        group["betas"], group["eps"] = (params.beta1, params.beta2), params.eps
    try:
        return replace(optimizer, max_grad_norm=params.grad_clip_norm or math.inf).update(trainer.dist)
    except TrainingDiverged:
        raise ConfigError(
            "The gradient is not finite; the weights did not change, and a new gradient begins.",
            "Check advantages, logprobs and weights, or lower the learning rate.",
        ) from None
    finally:
        optimizer.grads.zero_()


def _example(index: int, datum: Datum) -> TrainingExample:
    """All places of the datum are scored, and predict targets of their own: the last token is never read."""
    weights = np.ones(len(datum.token_ids) + 1, dtype=np.float32)
    weights[0] = 0
    return TrainingExample(
        token_ids=np.append(datum.token_ids, 0), weights=weights, group=0, trajectory=index
    )


def _pass(
    policy: Policy,
    part: Sequence[TrainingExample],
    data: Sequence[Datum],
    loss: str,
    settings: Mapping[str, float],
    *,
    backward: bool,
) -> tuple[Tensor, Tensor]:
    """Logprobs [C] and the sum of the losses of a micro-batch, without their graph."""
    tokens = _with_targets(pack_tokens(part, policy.packing, policy.device), data)
    names = LOSS_FORMS[loss].inputs
    arrays = [np.concatenate([np.zeros(0, np.float32), *(d.inputs[name] for d in data)]) for name in names]
    inputs = dict(zip(names, upload(arrays, policy.device), strict=True))
    with torch.set_grad_enabled(backward):
        logprobs, _ = score(policy, tokens, temperature=1.0)
        total = TOKEN_LOSSES[loss](logprobs, inputs, settings).sum()
        if backward:
            total.backward()  # type: ignore[no-untyped-call]
    return logprobs.detach(), total.detach()


def _with_targets(tokens: PackedTokens, data: Sequence[Datum]) -> PackedTokens:
    """The same pass, with the data's targets in place of the next tokens."""
    targets: IntArray = np.concatenate([NO_TOKENS, *(datum.targets for datum in data)])
    rows: IntArray = tokens.rows.cpu().numpy()
    if any(datum.width > 1 for datum in data):
        rows = np.repeat(rows, np.concatenate([np.full(len(datum.token_ids), datum.width) for datum in data]))
    before = tokens_before(rows, len(tokens.tokens_before) - 1)
    rows_there, targets_there = upload([rows, targets], tokens.rows.device)
    return replace(tokens, rows=rows_there, targets=targets_there, tokens_before=before)
