"""On-policy distillation: the policy samples, and a teacher scores the tokens that it sampled.

Each token's advantage is log teacher - log policy: the policy gradient of the reverse KL of the token (Lu,
"On-Policy Distillation", Thinking Machines Lab, 2025; MiniLLM, arXiv 2306.08543). With
algorithm.teacher_beta the loss is instead a divergence of the distributions over the whole vocabulary (GKD,
arXiv 2306.13649), or over the best tokens that a server gives, whose gradient does not go through the sampled
token. A reward may be mixed in.
In a self-distillation the teacher is the model itself with more in its prompt: a solution or a success.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from skylite.algorithms.advantages import Components
from skylite.algorithms.divergences import jensen_shannon
from skylite.algorithms.losses import LossInputs
from skylite.algorithms.policy_gradient import PolicyGradient


@dataclass(frozen=True, slots=True)
class OnPolicyDistillation(PolicyGradient):
    """A policy gradient whose advantages come from a teacher, and from the rewards by `reward_weight`.

    With a divergence, only the rewards make advantages.
    """

    @property
    def needs_teacher(self) -> bool:
        return not self.has_teacher_server

    @property
    def divergence(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        beta = self.config.teacher_beta
        return None if beta is None else partial(jensen_shannon, beta=beta)

    @property
    def has_teacher_server(self) -> bool:
        return self.config.has_teacher_server

    @property
    def teacher_top_k(self) -> int:
        return self.config.teacher_top_k

    @property
    def shows_teacher_more(self) -> bool:
        return self.config.shows_teacher_more

    @property
    def leaves_out_untaught(self) -> bool:
        return self.shows_teacher_more and not self.config.learns_from_rewards

    def credit(self, rewards: Tensor, lengths: Tensor, components: Components | None) -> Tensor | None:
        if not self.config.learns_from_rewards:
            return None
        return PolicyGradient.credit(self, rewards, lengths, components)

    def needs_pass(self, kept: Tensor, advantages: Tensor | None) -> Tensor:
        """All: a group of equal rewards has a gradient, too."""
        return kept

    def loss(self, x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """The policy loss with the advantage reward_weight A + distill_coef (log teacher - log policy).

        With divergences, they are added to the loss instead, times distill_coef. Tokens that were not sampled
        have nothing else.
        """
        if x.sampling_logprobs is None:
            return self._offline_loss(x)
        assert x.teacher_logprobs is not None
        taught = ~torch.isnan(x.teacher_logprobs)
        gap = torch.where(taught, x.old_logprobs - x.teacher_logprobs, 0.0).detach()
        advantages, coef = self.config.reward_weight * x.advantages, self.config.distill_coef
        if x.divergences is None:
            advantages = advantages - coef * gap
        loss, sums = PolicyGradient.loss(self, replace(x, advantages=advantages))
        if x.divergences is not None:
            assert x.weights is not None
            of_teacher = coef * (x.divergences * x.weights).sum()
            loss, sums["loss/policy"] = loss + of_teacher, sums["loss/policy"] + of_teacher.detach()
            sums["teacher/divergence"] = x.divergences.detach().sum()
        sums["teacher/kl"] = gap.sum()
        sums["teacher/overlap"] = (torch.exp(-gap).clamp(max=1) * taught).sum()
        sums["teacher/taught_frac"] = taught.sum()
        return loss, sums

    def _offline_loss(self, x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        assert x.divergences is not None
        assert x.weights is not None
        loss = self.config.distill_coef * (x.divergences * x.weights).sum()
        return loss, {"loss/policy": loss.detach(), "teacher/divergence": x.divergences.detach().sum()}
