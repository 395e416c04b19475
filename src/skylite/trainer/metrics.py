"""A step's metrics: summed over this rank's tokens, then over ranks, and divided once at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from skylite.algorithms.interface import Algorithm
from skylite.config.train import TrainConfig
from skylite.model.process_group import Dist
from skylite.trainer.micro_batches import MicroBatch, Table, num_tokens


@dataclass(slots=True)
class PassTimer:
    """Seconds of passes, on a GPU too, for which nothing waits before they are read."""

    _spans: list[Callable[[], float]] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the block."""
        if torch.cuda.is_available():
            start, end = (
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
            start.record()
            yield
            end.record()
            self._spans.append(lambda: start.elapsed_time(end) / 1000)
            return
        started = time.monotonic()
        yield
        seconds = time.monotonic() - started
        self._spans.append(lambda: seconds)

    def metric(self, name: str) -> dict[str, float]:
        """The sum, if any block was counted. Read it once the device is done with them."""
        return {name: sum(span() for span in self._spans)} if self._spans else {}


@dataclass(slots=True)
class MetricSums:
    """Sums over the tokens that this rank computed in a step."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    """On the device until the end of the step, because fetching one waits for the device."""
    num_tokens: int = 0
    num_nodes: int = 0
    worst: Tensor | None = None
    """[4] the largest trainer-engine mismatch: |difference|, token id, engine logprob, trainer logprob."""
    scored: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(keys, trainer - engine) of the first update's tokens. See rollout_gaps.py."""
    is_first_update: bool = True
    grad_norms: list[float] = field(default_factory=list)
    critic_grad_norms: list[float] = field(default_factory=list)
    teacher_timer: PassTimer = field(default_factory=PassTimer)

    def add(self, sums: dict[str, Tensor]) -> None:
        """Add a micro-batch's sums by name."""
        for key, value in sums.items():
            value = value.detach().double()
            self.sums[key] = self.sums[key] + value if key in self.sums else value

    def add_tokens(self, micro: MicroBatch, logprobs: Tensor, *, has_dropout: bool) -> None:
        """Count the micro-batch's tokens, and compare their logprobs with the engine's."""
        self.num_tokens += len(logprobs)
        self.num_nodes += micro.tokens.num_nodes
        if not len(logprobs) or micro.sampling_logprobs is None:
            return
        gaps = (logprobs - micro.sampling_logprobs).abs()
        rows = torch.stack(
            [x.double() for x in (gaps, micro.tokens.targets, micro.sampling_logprobs, logprobs)]
        )
        own = rows.index_select(1, gaps.argmax()[None])[:, 0]
        worst = _no_mismatch(own.device) if self.worst is None else self.worst
        self.worst = torch.where(own[0] > worst[0], own, worst)
        # With dropout, only the precomputed logprobs are those of the version that sampled.
        without_dropout = micro.old_logprobs if has_dropout else logprobs
        if self.is_first_update and without_dropout is not None:
            self.scored.append((micro.keys, without_dropout - micro.sampling_logprobs))


def step_metrics(
    table: Table, sums: MetricSums, algorithm: Algorithm, config: TrainConfig, dist: Dist
) -> dict[str, float]:
    """The metrics of all ranks. Means are over the computed tokens, token counts over the step."""
    names = sorted(sums.sums)
    # full() instead of a tensor of both: its value is an argument of a kernel, not a copy.
    counts = [
        torch.full((), count, dtype=torch.float64, device=dist.device)
        for count in (sums.num_tokens, sums.num_nodes)
    ]
    own = torch.stack([*counts, *(sums.sums[n] for n in names)])
    reduced, worst = dist.all_reduce_sum_(own), _worst_of_ranks(sums, dist)
    values = torch.cat([reduced, worst.flatten()]).tolist()  # together, because a fetch waits for the device
    total = dict(zip(["tokens/computed", "tokens/unique", *names], values[: len(own)], strict=True))
    num_computed = max(1.0, total.pop("tokens/computed"))
    num_updates = algorithm.updates_per_step
    means = {n: value / (num_updates if n in algorithm.means else num_computed) for n, value in total.items()}
    if taught := means.get("teacher/taught_frac"):
        of_taught = ("teacher/kl", "teacher/overlap", "teacher/divergence")
        means |= {name: means[name] / taught for name in of_taught if name in means}
    metrics = means | _critic_metrics(means, sums)
    if table.is_sampled:
        metrics |= _importance_metrics(means) | _worst_mismatch(values[len(own) :])
        metrics |= _group_metrics(table, config)
        if "policy/entropy" in total:
            metrics["policy/entropy"] = _mean_entropy(table, total["policy/entropy"])
    for name in INTERMEDIATE & metrics.keys():
        del metrics[name]
    metrics |= sums.teacher_timer.metric("time/teacher_s")  # after the fetch, which waited for the device
    return metrics | {
        "tokens/completion": float(sum(map(num_tokens, table.trajectories))),
        "tokens/total": float(sum(len(e.token_ids) for calls in table.trajectories for e in calls)),
        "optim/grad_norm": sum(sums.grad_norms) / len(sums.grad_norms),
        "tokens/unique": total["tokens/unique"],
    }


INTERMEDIATE = {
    "ess/weights",
    "ess/squares",
    "critic/tokens",
    "critic/return_squares",
    "critic/residual",
    "critic/residual_squares",
}
"""Sums that are only inputs of other metrics."""


def _group_metrics(table: Table, config: TrainConfig) -> dict[str, float]:
    """Metrics that depend on the rollouts only."""
    left_out = {"groups/left_out_frac": sum(not kept for kept in table.kept) / len(table.kept)}
    if not config.algorithm.compares_groups:  # equal rewards say nothing of a signal
        return left_out
    return {"groups/zero_std_frac": sum(table.zero_std) / len(table.zero_std), **left_out}


def _importance_metrics(means: dict[str, float]) -> dict[str, float]:
    """Effective sample size per token: (sum w)^2 / (n sum w^2), 1 if engine and trainer agree (Kong 1992)."""
    if "ess/weights" not in means:  # an algorithm without importance weights
        return {}
    weight, square = means["ess/weights"], means["ess/squares"]
    return {"mismatch/ess_frac": weight * weight / square if square > 0 else 1.0}


def _critic_metrics(means: dict[str, float], sums: MetricSums) -> dict[str, float]:
    """Explained variance: 1 - Var(return - value) / Var(return), over the tokens in the loss."""
    if "critic/residual" not in means:
        return {}
    share = means["critic/tokens"] or 1.0  # share of the computed tokens that are in the loss
    mean, squares = means["critic/return_mean"] / share, means["critic/return_squares"] / share
    residual, residual_squares = means["critic/residual"] / share, means["critic/residual_squares"] / share
    variance = squares - mean**2
    return {
        "critic/value_mean": means["critic/value_mean"] / share,
        "critic/return_mean": mean,
        "critic/explained_variance": 1 - (residual_squares - residual * residual) / variance
        if variance > 1e-12
        else 0.0,
        "critic/grad_norm": sum(sums.critic_grad_norms) / len(sums.critic_grad_norms),
    }


def _worst_of_ranks(sums: MetricSums, dist: Dist) -> Tensor:
    """[ranks, 4] as `MetricSums.worst`."""
    return dist.all_gather(_no_mismatch(dist.device) if sums.worst is None else sums.worst).view(-1, 4)


def _worst_mismatch(of_ranks: list[float]) -> dict[str, float]:
    """The metrics of the largest mismatch, from four numbers of each rank."""
    gap, token, rollout, policy = max(of_ranks[i : i + 4] for i in range(0, len(of_ranks), 4))
    return {
        "mismatch/logprob_diff_max": max(0.0, gap),
        "mismatch/worst_token_id": token,
        "mismatch/worst_rollout_logprob": rollout,
        "mismatch/worst_policy_logprob": policy,
    }


def _no_mismatch(device: torch.device) -> Tensor:
    """[-1, -1, 0, 0] float64, in the form of `MetricSums.worst`."""
    return torch.nn.functional.pad(torch.full((2,), -1.0, dtype=torch.float64, device=device), (0, 2))


def _mean_entropy(table: Table, entropy_sum: float) -> float:
    """Mean entropy over all sampled tokens.

    Tokens that were not computed count with -log p, whose expected value is the entropy.
    """
    computed = {number for update in table.updates for number in update}
    left_out = [calls for number, calls in enumerate(table.trajectories) if number not in computed]
    skipped = -sum(
        logprob
        for calls in left_out
        for e in calls
        if e.sampling_logprobs is not None
        for logprob in map(float, e.sampling_logprobs[e.scored])
    )
    return (entropy_sum + skipped) / sum(map(num_tokens, table.trajectories))
