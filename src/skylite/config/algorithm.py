"""What a step learns from its rewards: the algorithm, the correction for vLLM's numbers, PPO's critic.

`algorithm.name` alone chooses an algorithm; it fills in the fields of its row in PRESETS, and each of them can be set by itself.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from skylite.config.section import Section

Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++-baseline", "maxrl", "opo", "gae"]
PolicyLoss = Literal["clip", "dual_clip", "gspo", "cispo", "sapo", "clip_cov", "kl_cov"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "fixed-length"]
ZeroStdGroups = Literal["keep", "drop", "resample"]

PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, arXiv 2402.03300, with today's token-level mean; the paper's own: aggregation = "seq-mean-token-mean".
    "grpo": {},
    # Named after TRL's loss_type: the mean over the tokens of the batch.
    "bnpo": {},
    # arXiv 2503.20783: neither the standard deviation nor the length divides.
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "fixed-length"},
    # arXiv 2503.14476: clip-higher, token mean, dynamic sampling, soft overlong punishment over the last fifth of the length.
    "dapo": {"clip_eps_high": 0.28, "zero_std_groups": "resample", "overlong_buffer_frac": 0.2},
    # arXiv 2507.18071, section 5.1: one ratio a sequence and its bounds.
    "gspo": {"policy_loss": "gspo", "aggregation": "seq-mean-token-mean", "clip_eps_low": 3e-4, "clip_eps_high": 4e-4},
    # arXiv 2506.13585: the weight of REINFORCE is clipped above alone, so no token loses its gradient.
    "cispo": {"policy_loss": "cispo", "clip_eps_low": 1.0, "clip_eps_high": 4.0},
    # arXiv 2511.20347: a sigmoid gate in the place of clipping.
    "sapo": {"policy_loss": "sapo", "aggregation": "seq-mean-token-mean"},
    # arXiv 2402.14740: the completion is one action, its baseline the mean of the others.
    "rloo": {"advantage": "rloo", "aggregation": "seq-mean-token-sum"},
    # arXiv 2501.03262: whitened over the batch; the second with the group's mean as the baseline.
    "reinforce++": {"advantage": "reinforce++"},
    "reinforce++-baseline": {"advantage": "reinforce++-baseline"},
    # arXiv 2602.02710: divided by the group's mean.
    "maxrl": {"advantage": "maxrl"},
    # arXiv 2505.23585: the baseline is the mean weighted by length.
    "opo": {"advantage": "opo"},
    # arXiv 1707.06347 with GAE (arXiv 1506.02438) from a LoRA critic.
    "ppo": {"advantage": "gae"},
    # arXiv 2505.22617: tokens whose likelihood and advantage move together carry the entropy away.
    "clip_cov": {"policy_loss": "clip_cov"},
    "kl_cov": {"policy_loss": "kl_cov"},
}  # fmt: skip


class AlgorithmConfig(Section):
    name: str = "grpo"
    """grpo, bnpo, dr_grpo, dapo, gspo, cispo, sapo, rloo, reinforce++, reinforce++-baseline, maxrl, opo, ppo, clip_cov or kl_cov."""
    advantage: Advantage = "grpo"
    """How rewards become advantages (algorithms/advantages.py); gae needs the critic of section `critic`."""
    policy_loss: PolicyLoss = "clip"
    """The loss of a token (algorithms/losses.py)."""
    aggregation: Aggregation = "token-mean"
    """What each token's loss is divided by; fixed-length: completions times rollout.max_completion_tokens."""
    clip_eps_low: float = Field(0.2, ge=0, le=1)
    """The probability ratio is clipped below at 1 - clip_eps_low."""
    clip_eps_high: float = Field(0.2, ge=0)
    """... and above at 1 + clip_eps_high; 0.28 is DAPO's clip-higher (arXiv 2503.14476, eq. 10)."""
    dual_clip: float = Field(3.0, gt=1)
    """policy_loss = "dual_clip": a negative advantage counts at most this many times (arXiv 1912.09729)."""
    sapo_tau_pos: float = Field(1.0, gt=0)
    """Steepness of SAPO's gate where the advantage is positive."""
    sapo_tau_neg: float = Field(1.05, gt=0)
    """... and where it is not."""
    cov_frac: float = Field(0.0002, gt=0, le=1)
    """clip_cov, kl_cov: share of the tokens chosen, at least one."""
    clip_cov_low: float = 1.0
    """clip_cov chooses among tokens whose covariance is over this."""
    clip_cov_high: float = 5.0
    """... and under this."""
    kl_cov_coef: float = Field(1.0, ge=0)
    """kl_cov: weight of |policy - old| logprob at the chosen tokens."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount a token, for reinforce++ and gae."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """arXiv 1506.02438, eq. 16."""
    zero_std_groups: ZeroStdGroups = "keep"
    """Groups whose rewards are all equal: keep them in the loss's denominator, drop them, or resample (DAPO) until the step is full."""
    max_resample_rounds: int = Field(4, ge=1)
    """Bound of resample: this many rounds of new prompts; what is still missing is dropped, and said."""
    mask_truncated: bool = False
    """Leave completions that ended for length out of the loss (their rewards still count in their group)."""
    overlong_buffer_frac: float = Field(0.0, ge=0, le=1)
    """Soft overlong punishment (arXiv 2503.14476, eq. 13) over this last share of rollout.max_completion_tokens; 0: none."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, a mean over the loss's tokens, exact over the whole vocabulary."""
    top_entropy_quantile: float = Field(1.0, gt=0, le=1)
    """Only this share of the tokens, those of highest entropy, gets the policy loss (arXiv 2506.01939)."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL to the reference policy."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators (algorithms/kl.py)."""
    kl_in: Literal["loss", "reward"] = "loss"
    kl_ref: Literal["init", "base"] = "init"
    """init: the policy at version 0 (the warm start's adapter, or the base model without one); base: always the base model."""
    updates_per_step: int = Field(1, ge=1)
    """Optimizer updates a step: the batch is cut into this many mini-batches of whole groups."""

    @model_validator(mode="before")
    @classmethod
    def fill_in_preset(cls, values: Any) -> Any:
        preset = PRESETS.get(str(values.get("name", "grpo")), {}) if isinstance(values, dict) else {}
        return {**preset, **values} if isinstance(values, dict) else values

    @field_validator("name")
    @classmethod
    def name_is_known(cls, name: str) -> str:
        if name not in PRESETS:
            raise ValueError(f'"{name}" is no algorithm; there are {", ".join(PRESETS)}.')
        return name

    @model_validator(mode="after")
    def maxrl_divides_by_positive_means(self) -> Self:
        if self.advantage == "maxrl" and (
            self.overlong_buffer_frac > 0 or (self.kl_coef > 0 and self.kl_in == "reward")
        ):
            raise ValueError(
                "maxrl divides by a group's mean reward, which overlong_buffer_frac and kl_in=reward can turn negative: leave the first "
                "at 0 and the KL in the loss."
            )
        return self

    @property
    def compares_groups(self) -> bool:
        """Whether the advantage is relative to the other completions of the prompt."""
        return self.advantage not in ("gae", "reinforce++")

    @property
    def uses_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def uses_ref(self) -> bool:
        return self.kl_coef > 0

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL to the reference is subtracted from the rewards."""
        return self.uses_ref and self.kl_in == "reward"

    @property
    def selects_tokens(self) -> bool:
        """Whether an update's loss takes only some tokens, chosen among the whole mini-batch."""
        return self.selects_by_cov or self.top_entropy_quantile < 1

    @property
    def selects_by_cov(self) -> bool:
        return self.policy_loss in ("clip_cov", "kl_cov")


class ImportanceConfig(Section):
    """Correction for sampling with vLLM's probabilities instead of the trainer's (algorithms/importance.py)."""

    mode: Literal["truncate", "mask", "none"] = "truncate"
    """A weight over `cap` becomes the cap, or 0 (as under `floor`); none: no weights, the mismatch is still reported."""
    level: Literal["token", "sequence"] = "token"
    """One weight a token, or one a completion: the product over its tokens."""
    cap: float = Field(2.0, gt=0)
    floor: float = Field(0.0, ge=0)
    """mode = "mask": weights under this become 0 too."""
    reject_kl: float | None = Field(None, gt=0)
    """Completions whose mean k3 KL between sampler and trainer is over this get weight 0; none: nothing is rejected."""


class CriticConfig(Section):
    """PPO's value function: a second adapter on the same frozen base, and a linear head."""

    rank: int = Field(32, ge=1)
    alpha: float = Field(32.0, gt=0)
    lr: float = Field(1e-4, gt=0)
    """Of adapter and head; follows optim.schedule and optim.warmup_steps."""
    clip: float = Field(0.5, gt=0)
    """A new value may differ from the one before the update by this much (Schulman's value clipping)."""
    max_grad_norm: float = Field(1.0, gt=0)
