"""Pack: turns a step's examples into the micro-batches that this rank computes, update by update."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from skylite.algorithms.advantages import Components, zero_std_groups
from skylite.algorithms.interface import Algorithm, KeepTogether
from skylite.algorithms.losses import BatchSize
from skylite.config.rollout import GREEDY
from skylite.config.train import TrainConfig
from skylite.errors import DataError, RunFailed
from skylite.model.packing import NO_TOKENS, PackedTokens, Packing, pack_tokens, upload
from skylite.model.policy import Policy
from skylite.model.prefix_tree import shared_length, tree_size, tree_work
from skylite.model.process_group import Dist
from skylite.types import (
    TEACHER_LOGPROBS,
    TEACHER_TOP_IDS,
    TEACHER_TOP_LOGPROBS,
    FloatArray,
    IntArray,
    TrainingExample,
)

KEY_STRIDE = 1 << 24
"""A token's key is trajectory number * KEY_STRIDE + token index; no trajectory has as many tokens."""
Keys = TypeVar("Keys", Tensor, IntArray)
Trajectory = Sequence[TrainingExample]
"""The calls of a trajectory, in the order of its turns."""
Unit = tuple[TrainingExample, ...]
"""Examples that stay together: a trajectory, some of its calls, or a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A step's trajectories: N groups of G, in file order."""

    trajectories: Sequence[Trajectory]
    """[N * G]; the place of one is its number."""
    numbers: Mapping[tuple[int, int], int]
    """(group, trajectory) of an example -> the number of its trajectory."""
    rewards: Tensor
    """[N, G] float32, penalties included."""
    lengths: Tensor
    """[N, G] tokens with a weight, float32."""
    components: Components | None
    """Of the rewards, if the algorithm needs them."""
    kept: Sequence[bool]
    """[N * G] by number: in the loss."""
    zero_std: Sequence[bool]
    """[N] groups whose rewards are all equal."""
    advantages: Tensor | None
    """[N, G] if they depend on rewards and lengths only."""
    updates: Sequence[Sequence[int]]
    """The numbers of the trajectories that the ranks compute, for each update."""
    sizes: Sequence[BatchSize]
    """Of each update."""

    @property
    def is_sampled(self) -> bool:
        """Whether an engine sampled the step, and not a file held it."""
        return self.trajectories[0][0].sampling_logprobs is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward pass of this rank: the examples of S trajectories, with C tokens in all.

    Of a trajectory that was cut, it holds some of the calls. Fields with None come with the step: from
    precompute.py, if the algorithm needs them. All are [C].
    """

    examples: Sequence[TrainingExample]
    """Those of a trajectory stand together."""
    numbers: Sequence[int]
    """[S] the numbers of the trajectories, see Table."""
    tokens: PackedTokens
    """A segment is a trajectory."""
    keys: Tensor
    """int64: identifies each token, however the step is packed."""
    token_weights: Tensor
    """Factor on a token's loss; 0 if the token is not in the loss."""
    size: BatchSize
    """Of its optimizer update, over all micro-batches and ranks."""
    sampling_logprobs: Tensor | None
    """As the engine reported them; None: not sampled."""
    old_logprobs: Tensor | None = None
    """Before the first update. None: in a step's only update the training pass computes them."""
    entropies: Tensor | None = None
    """Computed together with `old_logprobs`."""
    norms: Tensor | None = None
    """`score_norms`, for advantages that compare tokens."""
    kl_penalty: Tensor | None = None
    """kl_coef times the KL estimate, if the KL is subtracted from the reward."""
    values: Tensor | None = None
    """The critic's values."""
    advantages: Tensor | None = None
    returns: Tensor | None = None
    """The critic's targets."""
    teacher_tokens: PackedTokens | None = None
    """The taught tokens after the teacher's own prompts. None: the teacher reads `tokens`."""
    taught: Tensor | None = None
    """Indices of the tokens that a teacher with prompts of its own scores."""
    teacher_logprobs: Tensor | None = None
    """Of a teacher on a server; NaN for tokens that it does not teach."""
    teacher_top_ids: Tensor | None = None
    """[T, K] the tokens that the server finds most likely in place of each taught one."""
    teacher_top_logprobs: Tensor | None = None
    weights: Tensor | None = None
    """`token_weights`, and 0 for tokens that the update leaves out."""
    selected: Tensor | None = None
    """bool: tokens that a covariance rule selected."""

    @property
    def counted(self) -> Tensor:
        """[C] bool: the tokens in the loss."""
        return self.token_weights > 0

    @property
    def trajectories(self) -> list[Trajectory]:
        """[S] with the calls that are computed here."""
        return by_trajectory(self.examples)

    @property
    def lengths(self) -> list[int]:
        """[S] their tokens with a weight."""
        return [num_tokens(calls) for calls in self.trajectories]


def arrange(
    examples: Sequence[TrainingExample],
    algorithm: Algorithm,
    config: TrainConfig,
    *,
    num_updates: int | None = None,
) -> Table:
    """The step as a table, in as many updates as the algorithm makes, or `num_updates`.

    Raises DataError if groups differ in size.
    """
    groups = [
        [tuple(calls) for _, calls in groupby(of_group, key=lambda e: e.trajectory)]
        for _, of_group in groupby(examples, key=lambda e: e.group)
    ]
    if len(sizes := {len(group) for group in groups}) != 1:
        raise DataError(
            f"The step's groups have {sorted(sizes)} trajectories; every group must have the same number.",
            "Delete the rollout file; a resumed run samples the step again.",
        )
    rewards = torch.tensor([[sum(e.reward for e in calls) for calls in group] for group in groups])
    lengths = torch.tensor([[float(num_tokens(calls)) for calls in group] for group in groups])
    kept = algorithm.keep(rewards, torch.tensor([[t[0].is_truncated for t in g] for g in groups]))
    if algorithm.leaves_out_untaught:
        kept &= torch.tensor(
            [[all(call.teacher_prompt is not None for call in calls) for calls in g] for g in groups]
        )
    components = components_of(groups, config) if algorithm.needs_components else None
    advantages = None if algorithm.penalises_kl else algorithm.credit(rewards, lengths, components)
    rows = _rows_of_updates(len(groups), num_updates or algorithm.updates_per_step)
    needed = algorithm.needs_pass(kept, advantages)
    numbers = torch.arange(needed.numel()).view_as(needed)
    updates = [numbers[a:b][needed[a:b]].tolist() for a, b in rows]
    if not any(updates):  # no gradient at all: compute one group with weight 0, to have metrics
        updates[0] = numbers[0].tolist()
    limit = config.rollout.max_completion_tokens
    sizes_of = [
        BatchSize(int(lengths[a:b][kept[a:b]].double().sum()), int(kept[a:b].sum()), limit) for a, b in rows
    ]
    trajectories = [calls for group in groups for calls in group]
    return Table(
        trajectories=trajectories,
        numbers={(t[0].group, t[0].trajectory): number for number, t in enumerate(trajectories)},
        rewards=rewards,
        lengths=lengths,
        components=components,
        kept=kept.flatten().tolist(),
        zero_std=zero_std_groups(rewards).tolist(),
        advantages=advantages,
        updates=updates,
        sizes=sizes_of,
    )


def components_of(groups: Sequence[Sequence[Trajectory]], config: TrainConfig) -> Components:
    """The components that the algorithm reads. Raises RunFailed unless every trajectory has all of them."""
    named = [[calls[0].components for calls in group] for group in groups]
    every = tuple(dict.fromkeys(chain.from_iterable(chain.from_iterable(named))))
    names = (GREEDY,) if config.algorithm.needs_greedy else every
    for group, of_group in zip(groups, named, strict=True):
        for calls, own in zip(group, of_group, strict=True):
            lacking = next((name for name in names if name not in own), "" if names else "components")
            if lacking:
                raise RunFailed(
                    f"algorithm.advantage={config.algorithm.advantage} compares the components of a reward, "
                    f"and one of prompt {calls[0].prompt_id} has no {lacking}.",
                    "Let the reward or the episode return all components each time, in a dict; for episodes "
                    "that a limit ends, set env.limit_reward to such a dict.",
                )
    scores = torch.tensor([[[own[name] for name in names] for own in group] for group in named])
    return Components(names, scores, torch.tensor(config.component_weights(names)))


def by_trajectory(examples: Sequence[TrainingExample]) -> list[Trajectory]:
    """The examples, those of each trajectory together."""
    return [tuple(calls) for _, calls in groupby(examples, key=lambda e: (e.group, e.trajectory))]


def num_tokens(calls: Trajectory) -> int:
    """Tokens with a weight."""
    return sum(int(np.count_nonzero(e.weights)) for e in calls)


def _rows_of_updates(num_groups: int, num_updates: int) -> list[tuple[int, int]]:
    """Bounds of the rows of each update's groups."""
    return list(pairwise(num_groups * i // num_updates for i in range(num_updates + 1)))


def pack(
    table: Table, algorithm: Algorithm, policy: Policy, config: TrainConfig, dist: Dist
) -> list[list[MicroBatch]]:
    """Divide each update over the ranks: [updates][micro-batches of this rank]."""
    budget = config.trainer.tokens_per_micro_batch
    assert budget != "auto", "trainer/micro_batch_memory.py replaces it before the first step"
    packed = []
    for numbers, size in zip(table.updates, table.sizes, strict=True):
        trajectories = [table.trajectories[number] for number in numbers]
        plan = plan_micro_batches(
            trajectories,
            budget,
            dist.dp_size,
            policy.packing,
            algorithm.keep_together,
            policy.pair_cost if dist.dp_size > 1 else 0.0,
        )
        packed.append([make_micro_batch(table, x, size, algorithm, policy) for x in plan[dist.dp_rank]])
    return packed


def make_micro_batch(
    table: Table,
    examples: Sequence[TrainingExample],
    size: BatchSize,
    algorithm: Algorithm,
    policy: Policy,
) -> MicroBatch:
    """The tensors of these examples, on the policy's device."""
    parts = by_trajectory(examples)
    numbers = [table.numbers[part[0].group, part[0].trajectory] for part in parts]
    lengths = np.array([num_tokens(part) for part in parts], dtype=np.int64)
    factors = np.array(
        [
            algorithm.weight(num_tokens(table.trajectories[n]), size) if table.kept[n] else 0.0
            for n in numbers
        ],
        dtype=np.float32,
    )
    own_weights = np.concatenate([np.zeros(0, np.float32), *(e.weights[e.scored] for e in examples)])
    sampled = [e.sampling_logprobs[e.scored] for e in examples if e.sampling_logprobs is not None]
    keys, weights, logprobs = upload(
        [
            np.concatenate(
                [NO_TOKENS, *(_keys(table, n, part) for n, part in zip(numbers, parts, strict=True))]
            ),
            np.repeat(factors, lengths) * own_weights,
            np.concatenate([np.zeros(0, np.float32), *sampled]),
        ],
        policy.device,
    )
    return MicroBatch(
        examples=examples,
        numbers=numbers,
        tokens=pack_tokens(examples, policy.packing, policy.device, policy.images),
        keys=keys,
        token_weights=weights,
        size=size,
        sampling_logprobs=logprobs if table.is_sampled else None,
        **_of_teacher(examples, algorithm, policy),
    )


def _keys(table: Table, number: int, calls: Trajectory) -> IntArray:
    """The keys of these calls' tokens. Other calls of the trajectory may be in other micro-batches."""
    starts = number * KEY_STRIDE + np.cumsum([0, *(num_tokens([e]) for e in table.trajectories[number])])
    return np.concatenate([starts[e.turn] + np.arange(num_tokens([e])) for e in calls])


def number_and_place(keys: Keys) -> tuple[Keys, Keys]:
    """The number of the trajectory of each key, and the place of the token in it."""
    return keys // KEY_STRIDE, keys % KEY_STRIDE


def _of_teacher(examples: Sequence[TrainingExample], algorithm: Algorithm, policy: Policy) -> dict[str, Any]:
    """The fields of MicroBatch for a teacher with its own prompts, or on a server."""
    fields, taught = dict[str, Any](), list(examples)
    if algorithm.shows_teacher_more:
        taught = [e for e in examples if e.teacher_prompt is not None]
        is_taught = [np.full(len(e.scored), e.teacher_prompt is not None) for e in examples]
        places = np.flatnonzero(np.concatenate([np.zeros(0, bool), *is_taught]))
        (fields["taught"],) = upload([places], policy.device)
        if algorithm.needs_teacher:
            of_teacher = list(map(_for_teacher, taught))
            fields["teacher_tokens"] = pack_tokens(of_teacher, policy.packing, policy.device)
    if algorithm.has_teacher_server:
        scored = [_taught_by_server(e, algorithm) for e in examples]
        (fields[TEACHER_LOGPROBS],) = upload(
            [np.concatenate([np.zeros(0, np.float32), *scored])], policy.device
        )
    if top_k := algorithm.teacher_top_k:
        tops = [_top_of_server(e, top_k) for e in taught]
        ids = np.concatenate([np.zeros((0, top_k), np.int64), *(ids for ids, _ in tops)])
        logprobs = np.concatenate([np.zeros((0, top_k), np.float32), *(x for _, x in tops)])
        fields[TEACHER_TOP_IDS], fields[TEACHER_TOP_LOGPROBS] = upload([ids, logprobs], policy.device)
    return fields


def _taught_by_server(example: TrainingExample, algorithm: Algorithm) -> FloatArray:
    """[C] the server's logprobs; NaN if the teacher had nothing to see. Raises DataError without them."""
    scores = example.extras.get(TEACHER_LOGPROBS)
    if algorithm.shows_teacher_more and example.teacher_prompt is None:
        return np.full(len(example.scored), np.nan, np.float32)
    if scores is None or not np.isfinite(scores).all():
        raise _without_logprobs(example, "logprobs")
    return scores[example.scored]


def _top_of_server(example: TrainingExample, top_k: int) -> tuple[IntArray, FloatArray]:
    """[C, K] ids and logprobs. Raises DataError without them."""
    ids, logprobs = (example.extras.get(name) for name in (TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS))
    if ids is None or logprobs is None or ids.shape[1] != top_k or ids.min() < 0 or np.isnan(logprobs).any():
        raise _without_logprobs(example, f"logprobs of the {top_k} most likely tokens")
    return ids.astype(np.int64), logprobs


def _without_logprobs(example: TrainingExample, what: str) -> DataError:
    return DataError(
        f"A completion of prompt {example.prompt_id} has no {what} of the teacher's server.",
        "Delete the rollout file; a resumed run samples the step again.",
    )


def _for_teacher(example: TrainingExample) -> TrainingExample:
    """The completion after the teacher's prompt. The teachers of a group share the prefixes of theirs."""
    assert example.teacher_prompt is not None
    prompt, first = example.teacher_prompt, int(example.scored[0])
    return replace(
        example,
        token_ids=np.concatenate([prompt, example.token_ids[first:]]),
        weights=np.concatenate([np.zeros(len(prompt), np.float32), example.weights[first:]]),
    )


def plan_micro_batches(
    trajectories: Sequence[Trajectory],
    budget: int,
    dp_size: int,
    packing: Packing,
    keep_together: KeepTogether,
    pair_cost: float = 0.0,
) -> list[list[list[TrainingExample]]]:
    """Micro-batches, the largest first: [dp_size][M], with the same M for every rank.

    A micro-batch computes at most `budget` tokens, padding included; some may be empty. In a tree, only a
    group over the budget is split, and a trajectory only if nothing keeps its calls together. A unit that is
    still over the budget gets its own micro-batch. All ranks make the same plan without communication.

    `pair_cost` (see Policy): trees get equal shares of the predicted work, which grows faster than their
    tokens; with 0, of the tokens.
    """
    if not trajectories:
        return [[] for _ in range(dp_size)]
    units = list(_units(trajectories, budget, packing, keep_together))
    if packing == "tree":
        ordered = _tree_bins(units, budget, dp_size, pair_cost)
    else:
        ordered = _row_bins(units, budget, dp_size)
    micro_batches = [list(chain.from_iterable(content)) for content in ordered]
    return [micro_batches[rank::dp_size] for rank in range(dp_size)]


def _units(
    trajectories: Sequence[Trajectory], budget: int, packing: Packing, keep_together: KeepTogether
) -> Iterator[Unit]:
    """What must stay together, and fits the budget if it can."""
    if keep_together == "group":
        groups = groupby(trajectories, key=lambda calls: calls[0].group)
        yield from (tuple(chain.from_iterable(group)) for _, group in groups)
        return
    for calls in trajectories:
        yield from _cut(tuple(calls), budget, packing) if keep_together == "token" else [tuple(calls)]


def _cut(calls: Unit, budget: int, packing: Packing) -> list[Unit]:
    """The trajectory in as few parts as fit the budget, or the longest call if that is longer."""
    limit = max(budget, *(len(e.token_ids) for e in calls))
    if len(calls) == 1 or _size(calls, packing) <= limit:
        return [calls]
    starts = [0]
    for index in range(1, len(calls)):
        if _size(calls[starts[-1] : index + 1], packing) > limit:
            starts.append(index)
    return [calls[first:last] for first, last in pairwise([*starts, len(calls)])]


def _size(calls: Unit, packing: Packing) -> int:
    """Tokens that the calls of a group compute."""
    return _load([calls]) if packing == "tree" else len(calls) * max(len(e.token_ids) for e in calls)


def _load(units: Sequence[Unit]) -> int:
    """Unique tokens of the units' calls."""
    examples = [e for unit in units for e in unit]
    return tree_size([e.keys for e in examples], [e.group for e in examples]) if examples else 0


def _work(units: Sequence[Unit], pair_cost: float) -> float:
    """Predicted work of a tree, in tokens."""
    examples = [e for unit in units for e in unit]
    if not examples:
        return 0.0
    nodes, pairs = tree_work([e.keys for e in examples], [e.group for e in examples])
    return nodes + pair_cost * pairs


def _tree_bins(units: Sequence[Unit], budget: int, dp_size: int, pair_cost: float) -> list[list[Unit]]:
    """Micro-batches of at most `budget` unique tokens, the largest first; a multiple of `dp_size` of them."""
    sized = sorted(_blocks(units, budget, pair_cost), key=lambda block: -block[0])
    num_bins = dp_size
    while True:
        bins = [([u for block in bin_ for u in block], len(bin_)) for bin_ in _fill(sized, num_bins)]
        if all(num_blocks == 1 or _load(content) <= budget for content, num_blocks in bins):
            break
        num_bins += dp_size
    return sorted((content for content, _ in bins), key=lambda content: -_work(content, pair_cost))


def _blocks(units: Sequence[Unit], budget: int, pair_cost: float) -> list[tuple[float, list[Unit]]]:
    """(work, units) that share a micro-batch: a group, or a part of a group over the budget.

    The work is that of the tokens that follow the common prefix of all calls.
    """
    ids = {id(unit): [e.keys.tolist() for e in unit] for unit in units}
    every = [call for calls in ids.values() for call in calls]
    prefix = shared_length(*(np.asarray(call, dtype=np.int64) for call in (min(every), max(every))))
    prefix_work = prefix + pair_cost * prefix * (prefix + 1) / 2

    def sized(block: list[Unit]) -> tuple[float, list[Unit]]:
        return _work(block, pair_cost) - prefix_work, block

    blocks: list[tuple[float, list[Unit]]] = []
    ordered = sorted(units, key=lambda u: (u[0].group, ids[id(u)], u[0].trajectory, u[0].turn))
    for _, members in groupby(ordered, key=lambda u: u[0].group):
        group = list(members)
        if _load(group) <= budget:
            blocks.append(sized(group))
            continue
        block: list[Unit] = []
        for unit in group:
            if block and _load([*block, unit]) > budget:
                blocks.append(sized(block))
                block = []
            block = [*block, unit]
        blocks.append(sized(block))
    return blocks


def _fill(blocks: list[tuple[float, list[Unit]]], num_bins: int) -> list[list[list[Unit]]]:
    """Longest-processing-time rule: each block, from large to small, goes to the emptiest bin."""
    bins: list[tuple[float, list[list[Unit]]]] = [(0.0, []) for _ in range(num_bins)]
    for size, block in blocks:
        index = min(range(num_bins), key=lambda i: bins[i][0])
        load, content = bins[index]
        bins[index] = (load + size, [*content, block])
    return [content for _, content in bins]


def _row_bins(units: Sequence[Unit], budget: int, dp_size: int) -> list[list[Unit]]:
    """The same for padded rows. Neighbours by length share a micro-batch, which pads to its longest row."""
    ordered = sorted(units, key=lambda u: (-_row_length(u), u[0].group, u[0].trajectory, u[0].turn))
    num_bins = -(-len(_runs(ordered, budget)) // dp_size) * dp_size
    limits = range(1, budget)
    smallest = bisect_left(limits, True, key=lambda limit: len(_runs(ordered, limit)) <= num_bins) + 1
    bins = sorted(_runs(ordered, smallest), key=lambda b: -_num_rows(b) * _row_length(b[0]))
    return bins + [[] for _ in range(num_bins - len(bins))]


def _runs(ordered: Sequence[Unit], budget: int) -> list[list[Unit]]:
    """Split units, sorted from long to short, into runs of at most `budget` padded tokens."""
    bins: list[list[Unit]] = []
    for unit in ordered:
        if bins and _num_rows([*bins[-1], unit]) * _row_length(bins[-1][0]) <= budget:
            bins[-1].append(unit)
        else:
            bins.append([unit])
    return bins


def _num_rows(units: Sequence[Unit]) -> int:
    return sum(len(unit) for unit in units)


def _row_length(unit: Unit) -> int:
    """Tokens that the model reads of the unit's longest call: all but the last."""
    return max(len(e.token_ids) for e in unit) - 1
