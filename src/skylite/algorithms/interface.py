"""What the trainer asks of an algorithm. One file a family: policy_gradient.py, sft.py, dpo.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from skylite.algorithms.losses import BatchSize, LossInputs

KeepTogether = Literal["token", "trajectory", "group"]


class Algorithm:
    """Turns examples into a loss. Pure tensors: N groups of G trajectories, C tokens of a micro-batch."""

    means: ClassVar[tuple[str, ...]] = ("loss/policy",)
    """Metrics of `loss` that are weighted sums; the others are sums over tokens."""
    held_out: ClassVar[Mapping[str, str]] = {}
    """Held-out metric -> the metric of `loss` that it is. Empty: engines answer the held-out prompts."""
    counts_top_tokens: ClassVar[bool] = False
    """Whether `held_out` needs `LossInputs.is_top`."""

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether a step needs logprobs before its first update."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs the reference policy's logprobs."""
        return False

    @property
    def keep_together(self) -> KeepTogether:
        """What one micro-batch must hold whole: nothing but a token, a trajectory, or a group."""
        return "token"

    @property
    def credits_tokens(self) -> bool:
        """Whether each token has an advantage of its own (`credit_tokens`)."""
        return False

    def keep(self, rewards: Tensor, truncated: Tensor) -> Tensor:
        """Bool [N, G]: the trajectories in the loss."""
        return torch.ones_like(truncated)

    def credit(self, rewards: Tensor, lengths: Tensor) -> Tensor | None:
        """[N, G] the advantage of each trajectory. None: it has none, or one for each token."""
        return None

    def credit_tokens(self, rewards: Tensor, values: Tensor) -> Tensor:
        """[S, L] the advantage of each token from its reward and the critic's value, 0 after the last one."""
        raise NotImplementedError

    def needs_pass(self, kept: Tensor, advantages: Tensor | None) -> Tensor:
        """Bool [N, G]: the trajectories that the model must compute. `advantages`: None if not known yet."""
        return kept

    def weight(self, length: int, size: BatchSize) -> float:
        """The factor on the loss of each token of a trajectory with `length` tokens."""
        raise NotImplementedError

    def loss(self, x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """A micro-batch's share of the loss, with gradient, and its metrics as sums."""
        raise NotImplementedError
