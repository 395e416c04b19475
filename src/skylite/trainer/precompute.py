"""What a step computes before it updates the policy: forward passes, advantages, the choice of tokens.

Old logprobs come from the training pass where they can. Without that a train phase takes 35 % longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from skylite.algorithms.advantages import moments, score_norms, whiten
from skylite.algorithms.interface import Algorithm
from skylite.algorithms.losses import LossInputs
from skylite.model.chunked_divergence import Divergence, TeacherStates, TeacherTop
from skylite.model.packing import upload
from skylite.model.policy import REF, TEACHER, Policy, frozen_policy, score, score_and_squares, states
from skylite.model.process_group import Dist
from skylite.trainer.critic import Critic, predict_values
from skylite.trainer.micro_batches import MicroBatch, Table, number_and_place


@torch.no_grad()
def precompute(
    policy: Policy, critic: Critic | None, micro: MicroBatch, algorithm: Algorithm, temperature: float
) -> MicroBatch:
    """The micro-batch with the model's outputs that the step needs before its first update."""
    old_logprobs = entropies = kl_penalty = norms = None
    if algorithm.compares_tokens:
        old_logprobs, entropies, squares = score_and_squares(policy, micro.tokens, temperature)
        norms = score_norms(old_logprobs, squares)
    elif algorithm.needs_old_logprobs:
        old_logprobs, entropies = score(policy, micro.tokens, temperature)
    if algorithm.penalises_kl:
        assert old_logprobs is not None
        kl_penalty = algorithm.kl_penalty(old_logprobs, ref_logprobs(policy, micro, temperature))
    values = None if critic is None else predict_values(policy, critic, micro.tokens)
    return replace(
        micro,
        old_logprobs=old_logprobs,
        entropies=entropies,
        norms=norms,
        kl_penalty=kl_penalty,
        values=values,
    )


@torch.no_grad()
def ref_logprobs(policy: Policy, micro: MicroBatch, temperature: float) -> Tensor:
    """[C] logprobs of the reference policy."""
    with frozen_policy(policy, REF) as ref:
        return score(ref, micro.tokens, temperature)[0]


@torch.no_grad()
def teacher_logprobs(policy: Policy, micro: MicroBatch, temperature: float) -> Tensor:
    """[C] logprobs of the teacher; NaN for tokens that it does not teach."""
    with frozen_policy(policy, TEACHER) as teacher:
        if micro.teacher_tokens is None:
            return score(teacher, micro.tokens, temperature)[0]
        assert micro.taught is not None
        scored = score(teacher, micro.teacher_tokens, temperature)[0]
    nothing = torch.full_like(micro.token_weights, torch.nan)
    return nothing.index_copy_(0, micro.taught, scored)


def teacher_states(policy: Policy, micro: MicroBatch, divergence: Divergence) -> TeacherStates:
    """What the teacher computes for the tokens that it teaches, before the LM head."""
    with frozen_policy(policy, TEACHER) as teacher:
        tokens = micro.tokens if micro.teacher_tokens is None else micro.teacher_tokens
        return TeacherStates(states(teacher, tokens), micro.taught, divergence)


def teacher_top(micro: MicroBatch, divergence: Divergence) -> TeacherTop:
    """What the teacher's server said of the tokens that it teaches."""
    assert micro.teacher_logprobs is not None
    assert micro.teacher_top_ids is not None
    assert micro.teacher_top_logprobs is not None
    return TeacherTop(
        micro.teacher_top_ids, micro.teacher_top_logprobs, micro.teacher_logprobs, micro.taught, divergence
    )


def credit(
    table: Table, micro_batches: Sequence[MicroBatch], algorithm: Algorithm, dist: Dist
) -> list[MicroBatch]:
    """The micro-batches with the advantages of their tokens, and the critic's returns. All ranks call it."""
    if algorithm.credits_tokens:
        return _credit_tokens(micro_batches, algorithm, dist)
    if algorithm.compares_tokens:
        return _compare_tokens(table, micro_batches, algorithm, dist)
    by_group = table.advantages
    if algorithm.penalises_kl:
        rewards = table.rewards - _kl_of_trajectories(table, micro_batches, dist)
        by_group = algorithm.credit(rewards, table.lengths, table.components)
    if by_group is None:
        return list(micro_batches)
    by_number = by_group.float().flatten().numpy()
    numbers = [np.array(m.numbers, dtype=np.int64) for m in micro_batches]
    by_token = [np.repeat(by_number[n], m.lengths) for n, m in zip(numbers, micro_batches, strict=True)]
    advantages = upload(by_token, dist.device)
    return [replace(m, advantages=x) for m, x in zip(micro_batches, advantages, strict=True)]


def _kl_of_trajectories(table: Table, micro_batches: Sequence[MicroBatch], dist: Dist) -> Tensor:
    """[N, G] KL penalty, summed over the tokens of each trajectory and over ranks."""
    total = torch.zeros(table.rewards.numel(), device=dist.device)
    numbers = upload([np.array(m.numbers, dtype=np.int64) for m in micro_batches], dist.device)
    for micro, own in zip(micro_batches, numbers, strict=True):
        assert micro.kl_penalty is not None
        total.index_add_(0, own[micro.tokens.segments], micro.kl_penalty)
    return dist.all_reduce_sum_(total).cpu().view_as(table.rewards)


def _credit_tokens(micro_batches: Sequence[MicroBatch], algorithm: Algorithm, dist: Dist) -> list[MicroBatch]:
    """For reinforce++ and gae: advantages along each trajectory, whitened over the step, and returns.

    Computed on the CPU for all micro-batches at once. So it waits for the device twice: for the tokens'
    columns, and for the moments that whiten.
    """
    sizes = [len(m.token_weights) for m in micro_batches]
    nothing = [torch.zeros_like(m.token_weights) for m in micro_batches]
    kl, values, weights = _on_cpu(
        [x if m.kl_penalty is None else m.kl_penalty for x, m in zip(nothing, micro_batches, strict=True)],
        [x if m.values is None else m.values for x, m in zip(nothing, micro_batches, strict=True)],
        [m.token_weights for m in micro_batches],
    )
    advantages = _along_trajectories(micro_batches, -kl, values, algorithm)
    sums = dist.all_reduce_sum_(moments(advantages[weights > 0]).to(dist.device)).cpu()
    both = torch.stack([whiten(advantages, sums), advantages + values]).to(dist.device)
    whitened, returns = (torch.split(x, sizes) for x in both)
    return [
        replace(m, advantages=a, returns=None if m.values is None else r)
        for m, a, r in zip(micro_batches, whitened, returns, strict=True)
    ]


def _compare_tokens(
    table: Table, micro_batches: Sequence[MicroBatch], algorithm: Algorithm, dist: Dist
) -> list[MicroBatch]:
    """For otb: advantages from all tokens of a group, which several ranks may have.

    Each rank writes its own tokens into those of the step, and after the sum over ranks reads the others'.
    """
    lengths = table.lengths.to(dist.device, torch.int64).flatten()
    starts = lengths.cumsum(dim=0) - lengths
    places = [starts[number] + place for number, place in (number_and_place(m.keys) for m in micro_batches)]
    of_step = torch.zeros(2, int(table.lengths.sum()), dtype=torch.float64, device=dist.device)
    earned = torch.split(_earned(micro_batches).to(dist.device), [len(m.keys) for m in micro_batches])
    for micro, own, reward in zip(micro_batches, places, earned, strict=True):
        assert micro.norms is not None
        penalty = 0.0 if micro.kl_penalty is None else micro.kl_penalty
        of_step[:, own] = torch.stack([reward - penalty, micro.norms]).double()
    advantages = _by_group(dist.all_reduce_sum_(of_step).cpu(), table.lengths, algorithm).to(dist.device)
    return [replace(m, advantages=advantages[own]) for m, own in zip(micro_batches, places, strict=True)]


def _by_group(of_step: Tensor, lengths: Tensor, algorithm: Algorithm) -> Tensor:
    """Float32 advantages of a step's tokens, from their rewards and norms [2, tokens]. `lengths`: [N, G].

    On the CPU: a group at a time would make a GPU wait for the host.
    """
    trajectories, advantages = iter(torch.split(of_step.T, lengths.flatten().int().tolist())), list[Tensor]()
    for own in lengths:
        group = [next(trajectories) for _ in own]
        rewards, norms = pad_sequence(group, batch_first=True).unbind(dim=2)
        compared = algorithm.compare_tokens(rewards, norms, own)
        advantages.append(compared[torch.arange(rewards.shape[1]) < own[:, None]])
    return torch.cat(advantages).float()


def _on_cpu(*columns: Sequence[Tensor]) -> Sequence[Tensor]:
    """For each column, the values of all micro-batches on the CPU."""
    rows = [torch.cat(list(parts)) if parts else torch.zeros(0) for parts in columns]
    return torch.unbind(torch.stack(rows).cpu())


def _along_trajectories(
    micro_batches: Sequence[MicroBatch], token_rewards: Tensor, values: Tensor, algorithm: Algorithm
) -> Tensor:
    """[C] advantages before whitening, from [C] KL penalties (negative) and values."""
    lengths = [length for m in micro_batches for length in m.lengths]
    if not lengths:
        return token_rewards
    rewards = token_rewards + _earned(micro_batches)
    padded = (pad_sequence(list(torch.split(x, lengths)), batch_first=True) for x in (rewards, values))
    advantages = algorithm.credit_tokens(*padded)
    return advantages[torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]]


def _earned(micro_batches: Sequence[MicroBatch]) -> Tensor:
    """[C] float32 of all micro-batches: the last token of a call gets what the call earned, others 0."""
    examples = [e for m in micro_batches for e in m.examples]
    lengths = [len(e.scored) for e in examples]
    earned = torch.zeros(sum(lengths))
    earned[np.cumsum(lengths, dtype=np.int64) - 1] = torch.tensor([e.reward for e in examples])
    return earned


@torch.no_grad()
def select_tokens(
    policy: Policy,
    micro_batches: Sequence[MicroBatch],
    algorithm: Algorithm,
    temperature: float,
    dist: Dist,
    seed: Sequence[int],
) -> list[MicroBatch]:
    """The micro-batches with the tokens of the next update, chosen by the current policy among all ranks'.

    `seed`: of the run, the step and the update, counted from 0.
    """
    chosen = [replace(m, weights=m.token_weights) for m in micro_batches]
    if not (algorithm.selects_by_entropy or algorithm.selects_by_cov):
        return chosen
    now = [_current(policy, m, temperature, is_first_update=seed[-1] == 0) for m in chosen]
    if algorithm.selects_by_entropy:
        entropies = _all([e[m.counted] for m, (_, e) in zip(chosen, now, strict=True)], dist)
        threshold = algorithm.entropy_threshold(entropies)
        chosen = [
            replace(m, weights=m.token_weights * (entropy >= threshold))
            for m, (_, entropy) in zip(chosen, now, strict=True)
        ]
    if algorithm.selects_by_cov:
        selected = _choose_by_cov(chosen, [p for p, _ in now], algorithm, dist, seed)
        chosen = [replace(m, selected=x) for m, x in zip(chosen, selected, strict=True)]
    return chosen


def _current(
    policy: Policy, micro: MicroBatch, temperature: float, *, is_first_update: bool
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies of the current policy. Before the first update, the precomputed ones."""
    if is_first_update and micro.old_logprobs is not None and micro.entropies is not None:
        return micro.old_logprobs, micro.entropies
    return score(policy, micro.tokens, temperature)


def _choose_by_cov(
    micro_batches: Sequence[MicroBatch],
    logprobs: Sequence[Tensor],
    algorithm: Algorithm,
    dist: Dist,
    seed: Sequence[int],
) -> list[Tensor]:
    """Bool [C] for each micro-batch. Every rank sees all tokens in the same order, so all ranks agree."""
    inputs = [loss_inputs(m, p, m.entropies) for m, p in zip(micro_batches, logprobs, strict=True)]
    clipped = [algorithm.is_clipped(x) for x in inputs]
    columns = [[m.keys for m in micro_batches], [x.advantages for x in inputs], logprobs, clipped]
    counted = [m.counted for m in micro_batches]
    keys, adv, policy, is_out = (
        _all([x[c] for x, c in zip(column, counted, strict=True)], dist) for column in columns
    )
    order = torch.argsort(keys)
    generator = torch.Generator().manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
    chosen = algorithm.select_by_cov(adv[order], policy[order], is_out[order].bool(), generator)
    keys = keys[order][chosen]
    return [torch.isin(m.keys, keys) for m in micro_batches]


def loss_inputs(
    micro: MicroBatch,
    logprobs: Tensor,
    entropies: Tensor | None,
    ref: Tensor | None = None,
    teacher: Tensor | None = None,
    divergences: Tensor | None = None,
) -> LossInputs:
    """What a loss sees of a micro-batch."""
    return LossInputs(
        policy_logprobs=logprobs,
        old_logprobs=logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs,
        advantages=torch.zeros_like(micro.token_weights) if micro.advantages is None else micro.advantages,
        segments=micro.tokens.segments,
        num_segments=micro.tokens.num_segments,
        selected=micro.selected,
        sampling_logprobs=micro.sampling_logprobs,
        ref_logprobs=ref,
        teacher_logprobs=teacher,
        divergences=divergences,
        kl_penalty=micro.kl_penalty,
        entropies=entropies,
        token_weights=micro.token_weights,
        weights=micro.token_weights if micro.weights is None else micro.weights,
        size=micro.size,
    )


def _all(parts: list[Tensor], dist: Dist) -> Tensor:
    """The values of all micro-batches of all ranks, float64."""
    empty = torch.zeros(0, dtype=torch.float64, device=dist.device)
    return dist.all_gather(torch.cat([p.double() for p in parts]) if parts else empty)
