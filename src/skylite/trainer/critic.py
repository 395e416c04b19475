"""PPO's critic: a second adapter on the policy's frozen base, and a linear head."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from skylite.config.algorithm import CriticConfig
from skylite.config.train import TrainConfig
from skylite.model.lm_head import keep_in_graph, replaced_head
from skylite.model.packing import PackedTokens
from skylite.model.policy import CRITIC, Policy, activate, adapter_params
from skylite.model.process_group import Dist
from skylite.trainer.optimizer import FlatAdamW, make_optimizer


class ValueHead(nn.Module):
    """hidden [..., H] -> value [..., 1], float32 even under autocast. The first values are 0."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.bias = nn.Parameter(torch.zeros(1))
        self.values: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Also stores the values in `self.values`, because some models change the output of their head.

        Gemma 2, for example, applies a softcap.
        """
        self.values = (hidden.float() * self.weight).sum(dim=-1, keepdim=True) + self.bias
        return self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class Critic:
    """The value function and its optimizer."""

    head: ValueHead
    optimizer: FlatAdamW
    config: CriticConfig


def make_critic(policy: Policy, config: TrainConfig, dist: Dist) -> Critic:
    """The critic of a policy that has a critic adapter. All ranks call it."""
    hidden_size = policy.model.get_base_model().get_input_embeddings().embedding_dim
    head = ValueHead(output_width(policy, hidden_size)).to(policy.device)
    params = {
        **adapter_params(policy.model, replace(policy, role=CRITIC).adapter),
        **{f"value_head.{n}": p for n, p in head.named_parameters()},
    }
    for param in params.values():
        param.requires_grad_(True)
        dist.broadcast_(param.data)
    optimizer = make_optimizer(
        "critic",
        params,
        config.critic.lr,
        config.critic.max_grad_norm,
        config.optim,
        offload=config.trainer.offload,
    )
    return Critic(head=head, optimizer=optimizer, config=config.critic)


def output_width(policy: Policy, default: int) -> int:
    """Width of the hidden state that the LM head takes."""
    head = policy.model.get_base_model().get_output_embeddings()
    return int(getattr(head, "in_features", default))


def predict_values(policy: Policy, critic: Critic, tokens: PackedTokens) -> Tensor:
    """[C] float32 values of the states right before each completion token."""
    base: PreTrainedModel = policy.model.get_base_model()
    activate(replace(policy, role=CRITIC))
    with replaced_head(base, critic.head), policy.autocast():
        outputs: Tensor = policy.model(**tokens.model_inputs(), use_cache=False).logits
        values = critic.head.values
    assert values is not None
    critic.head.values = None
    return keep_in_graph(tokens.kept(values), outputs).flatten()[tokens.rows]
