"""What the trainer asks of an algorithm. One file a family, such as policy_gradient.py or distillation.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from skylite.algorithms.advantages import Components
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
    def is_sampled(self) -> bool:
        """Whether an engine samples what it learns from. False: prepared data has the replies."""
        return not self.held_out

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates, each on a mini-batch of complete groups."""
        return 1

    def load(self, programs: Mapping[str, str]) -> None:
        """Load the user's functions. `programs`: spec -> sha256 of its file. Raises ConfigError."""

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether a step needs logprobs before its first update."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs the reference policy's logprobs."""
        return False

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss needs logprobs that the trainer's teacher computes."""
        return False

    @property
    def divergence(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """(policy's logprobs [N, V], teacher's) -> [N], where the loss needs it for the whole vocabulary."""
        return None

    @property
    def has_teacher_server(self) -> bool:
        """Whether the loss needs the logprobs of a teacher that the examples have with them."""
        return False

    @property
    def teacher_top_k(self) -> int:
        """Of how many of its most likely tokens a server gives the logprobs, for `divergence`. 0: of none."""
        return 0

    @property
    def shows_teacher_more(self) -> bool:
        """Whether the teacher has prompts of its own."""
        return False

    @property
    def leaves_out_untaught(self) -> bool:
        """Whether a trajectory for which the teacher has no prompt is not in the loss."""
        return False

    @property
    def penalises_kl(self) -> bool:
        """Whether the KL to the reference is subtracted from the rewards (`kl_penalty`)."""
        return False

    @property
    def selects_by_entropy(self) -> bool:
        """Whether an update's loss leaves out tokens of low entropy (`entropy_threshold`)."""
        return False

    @property
    def selects_by_cov(self) -> bool:
        """Whether it treats tokens of high covariance apart (`select_by_cov`)."""
        return False

    @property
    def keep_together(self) -> KeepTogether:
        """What one micro-batch must hold whole: nothing but a token, a trajectory, or a group."""
        return "token"

    @property
    def credits_tokens(self) -> bool:
        """Whether a token has an advantage of its own, from its trajectory alone (`credit_tokens`)."""
        return False

    @property
    def compares_tokens(self) -> bool:
        """Whether a token's advantage compares it with others of its group (`compare_tokens`)."""
        return False

    def keep(self, rewards: Tensor, truncated: Tensor) -> Tensor:
        """Bool [N, G]: the trajectories in the loss."""
        return torch.ones_like(truncated)

    @property
    def needs_components(self) -> bool:
        """Whether `credit` needs the components of the rewards."""
        return False

    def learned_metrics(self, components: Components | None) -> dict[str, float]:
        """Metrics of what the run learns besides its adapter, see `learn`."""
        return {}

    def learn(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """What the run has learned besides its adapter after a step with these metrics."""
        return {}

    def credit(self, rewards: Tensor, lengths: Tensor, components: Components | None) -> Tensor | None:
        """[N, G] the advantage of each trajectory. None: it has none, or one for each token."""
        return None

    def credit_tokens(self, rewards: Tensor, values: Tensor) -> Tensor:
        """[S, L] the advantage of each token from its reward and the critic's value, 0 after the last one."""
        raise NotImplementedError

    def compare_tokens(self, rewards: Tensor, norms: Tensor, lengths: Tensor) -> Tensor:
        """[G, L] of one group: a token's advantage from rewards and `score_norms`, 0 after the last one."""
        raise NotImplementedError

    def kl_penalty(self, old_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """[C] what is subtracted from the reward of each token."""
        raise NotImplementedError

    def needs_pass(self, kept: Tensor, advantages: Tensor | None) -> Tensor:
        """Bool [N, G]: the trajectories that the model must compute. `advantages`: None if not known yet."""
        return kept

    def entropy_threshold(self, entropies: Tensor) -> float:
        """The least entropy of a token in the loss, among those of all ranks [C]."""
        raise NotImplementedError

    def is_clipped(self, x: LossInputs) -> Tensor:
        """Bool [C]: the tokens whose ratio is out of bounds."""
        raise NotImplementedError

    def select_by_cov(
        self, advantages: Tensor, logprobs: Tensor, clipped: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Bool [C]: the tokens that the loss treats apart, among those of all ranks."""
        raise NotImplementedError

    def weight(self, length: int, size: BatchSize) -> float:
        """The factor on the loss of each token of a trajectory with `length` tokens."""
        raise NotImplementedError

    def loss(self, x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """A micro-batch's share of the loss, with gradient, and its metrics as sums."""
        raise NotImplementedError
