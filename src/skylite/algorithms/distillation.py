"""On-policy distillation: the policy samples, and a teacher scores the tokens that it sampled.

Each token's advantage is log teacher - log policy: the policy gradient of the reverse KL of the token (Lu,
"On-Policy Distillation", Thinking Machines Lab, 2025; MiniLLM, arXiv 2306.08543). A reward may be mixed in.
In a self-distillation the teacher is the model itself with more in its prompt: a solution or a success.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from skylite.algorithms.advantages import Components
from skylite.algorithms.losses import LossInputs
from skylite.algorithms.policy_gradient import PolicyGradient


@dataclass(frozen=True, slots=True)
class OnPolicyDistillation(PolicyGradient):
    """A policy gradient whose advantages come from a teacher, and from the rewards by `reward_weight`."""

    @property
    def needs_teacher(self) -> bool:
        return not self.has_teacher_server

    @property
    def has_teacher_server(self) -> bool:
        return self.config.teacher_url is not None

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
        """The policy loss with the advantage reward_weight A + distill_coef (log teacher - log policy)."""
        assert x.teacher_logprobs is not None
        taught = ~torch.isnan(x.teacher_logprobs)
        gap = torch.where(taught, x.old_logprobs - x.teacher_logprobs, 0.0).detach()
        advantages = self.config.reward_weight * x.advantages - self.config.distill_coef * gap
        loss, sums = PolicyGradient.loss(self, replace(x, advantages=advantages))
        sums["teacher/kl"] = gap.sum()
        sums["teacher/overlap"] = (torch.exp(-gap).clamp(max=1) * taught).sum()
        sums["teacher/taught_frac"] = taught.sum()
        return loss, sums
