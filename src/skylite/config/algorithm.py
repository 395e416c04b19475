"""Settings of the RL algorithm, the importance weights and PPO's critic.

`algorithm.name` picks an algorithm: it fills in the fields of its PRESETS row. Fields that you set win.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from skylite.config.base_section import Section
from skylite.config.judge import is_server
from skylite.config.lora import check_modules
from skylite.config.rollout import GREEDY
from skylite.user_functions import is_program

Advantage = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce++",
    "reinforce++-baseline",
    "maxrl",
    "opo",
    "otb",
    "remax",
    "best",
    "pass_at_k",
    "gdpo",
    "gae",
]
PolicyLoss = Literal[
    "clip", "dual_clip", "gspo", "cispo", "sapo", "clip_cov", "kl_cov", "dppo", "dppo_kl", "dro", "gmpo",
    "vespo", "cross_entropy",
]  # fmt: skip
ComponentAdvantage = Literal["grpo", "dr_grpo", "rloo"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "fixed-length"]
ZeroStdGroups = Literal["keep", "drop", "resample"]

PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, arXiv 2402.03300, but with the token-level mean that is usual today.
    # The paper's own mean: aggregation = "seq-mean-token-mean".
    "grpo": {},
    # TRL's loss_type of that name: the mean over the tokens of the batch.
    "bnpo": {},
    # arXiv 2503.20783: no division by the standard deviation or by the completion length.
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "fixed-length"},
    # arXiv 2503.14476: clip-higher, token mean, dynamic sampling, soft overlong punishment in the last fifth.
    "dapo": {"clip_eps_high": 0.28, "zero_std_groups": "resample", "overlong_buffer_frac": 0.2},
    # arXiv 2507.18071, section 5.1: one ratio per sequence, with the paper's clip range.
    "gspo": {
        "policy_loss": "gspo",
        "aggregation": "seq-mean-token-mean",
        "clip_eps_low": 3e-4,
        "clip_eps_high": 4e-4,
    },
    # arXiv 2602.05261: gspo whose completions count by their length.
    "luspo": {
        "policy_loss": "gspo",
        "aggregation": "seq-mean-token-sum",
        "clip_eps_low": 3e-4,
        "clip_eps_high": 4e-4,
    },
    # arXiv 2507.20673: the geometric mean of ratios that are clipped between exp(-0.4) and exp(0.4).
    "gmpo": {
        "policy_loss": "gmpo",
        "aggregation": "seq-mean-token-mean",
        "clip_eps_low": 0.4,
        "clip_eps_high": 0.4,
    },
    # arXiv 2602.10693: a soft weight of the completion's ratio to the sampler, instead of clipping.
    "vespo": {"policy_loss": "vespo"},
    # arXiv 2602.04879: a trust region in the probability of a token, not in its ratio.
    "dppo": {"policy_loss": "dppo"},
    # Tinker's loss of that name, arXiv 2501.12599: a quadratic penalty instead of a ratio.
    "dro": {"policy_loss": "dro"},
    # arXiv 2506.13585: REINFORCE with its weight clipped from above only, so every token keeps its gradient.
    "cispo": {"policy_loss": "cispo", "clip_eps_low": 1.0, "clip_eps_high": 4.0},
    # arXiv 2511.20347: a sigmoid gate instead of clipping.
    "sapo": {"policy_loss": "sapo", "aggregation": "seq-mean-token-mean"},
    # arXiv 2402.14740: a completion is one action; its baseline is the mean reward of the others.
    "rloo": {"advantage": "rloo", "aggregation": "seq-mean-token-sum"},
    # arXiv 2501.03262: whitened over the batch; -baseline subtracts the group mean first.
    "reinforce++": {"advantage": "reinforce++"},
    "reinforce++-baseline": {"advantage": "reinforce++-baseline"},
    # arXiv 2602.02710: divided by the group mean.
    "maxrl": {"advantage": "maxrl"},
    # arXiv 2505.23585: the baseline is the group mean weighted by completion length.
    "opo": {"advantage": "opo"},
    # The Optimal Token Baseline, PMLR 306: a baseline for each token, weighted by the norms of those so far.
    "otb": {"advantage": "otb"},
    # arXiv 2310.10505: the baseline is the reward of a greedy completion. A group of one is enough.
    "remax": {"advantage": "remax", "aggregation": "seq-mean-token-sum"},
    # arXiv 2508.10751: the best of k completions counts.
    "pass_at_k": {"advantage": "pass_at_k"},
    # arXiv 2601.05242: each component of the reward is normalised in its group before they are summed.
    "gdpo": {"advantage": "gdpo"},
    # arXiv 1707.06347, with GAE (arXiv 1506.02438) from a LoRA critic.
    "ppo": {"advantage": "gae"},
    # arXiv 2505.22617: tokens whose logprob and advantage vary together drive the loss of entropy.
    "clip_cov": {"policy_loss": "clip_cov"},
    "kl_cov": {"policy_loss": "kl_cov"},
    # On-policy distillation (Lu, Thinking Machines Lab, 2025): a teacher scores each sampled token.
    "opd": {},
    # arXiv 2306.13649, with lambda 1: a divergence over the whole vocabulary, here Jensen-Shannon's.
    "gkd": {"teacher_beta": 0.5},
    # The same weights with more in their prompt teach, by the reverse KL of each sampled token; teacher_beta
    # makes that a divergence over the vocabulary, as in the papers. arXiv 2601.18734: the model at its start
    # teaches, shown a solution.
    "opsd": {"teacher": "base"},
    # arXiv 2601.19897: an average that takes 1 % of the policy after each step, shown a demonstration.
    "sdft": {"teacher": "ema", "teacher_update_rate": 0.01},
    # arXiv 2601.20802: an average that takes 5 %, shown a successful completion of the same group.
    "sdpo": {"teacher": "ema", "teacher_update_rate": 0.05, "teacher_sees_success": True},
    # arXiv 2304.06767: the mean negative log-likelihood of the best completion of each group.
    "raft": {"advantage": "best", "policy_loss": "cross_entropy"},
    # arXiv 2402.04792: DPO's loss for the best completion of each group against the worst.
    "online_dpo": {},
    # The mean negative log-likelihood of the assistant's tokens of prepared chats. No engine samples.
    "sft": {},
    # arXiv 2305.18290: the chosen reply of a prepared pair against the rejected one. No engine samples.
    "dpo": {},
    # arXiv 2310.12036: a squared loss, which has a minimum, for the same pairs.
    "ipo": {"preference_loss": "ipo"},
}
Source = Literal["rollouts", "chats", "pairs"]
SOURCES: dict[str, Source] = {"sft": "chats", "dpo": "pairs", "ipo": "pairs"}
"""Algorithm -> what its examples come from, if that is prepared data."""
DISTILLATIONS = ("opd", "gkd", "opsd", "sdft", "sdpo")
"""Algorithms in which a teacher scores the sampled tokens (algorithms/distillation.py)."""
PLACES = ("{prompt}", "{context}")
"""What algorithm.teacher_prompt must contain."""
BASE_TEACHER, AVERAGE = "base", "ema"
"""Values of algorithm.teacher that are not folders."""
OWN_MODEL = "model:"
"""Begins algorithm.teacher in the settings of a run whose teacher is a whole model. Its plan writes it."""
OF_TEACHERS = [
    "teacher",
    "teacher_model",
    "teacher_key_env",
    "teacher_beta",
    "teacher_top_k",
    "offline_share",
    "offline_column",
    "teacher_update_rate",
    "teacher_column",
    "teacher_sees_success",
    "success_reward",
    "teacher_sees_feedback",
    "max_feedback_tokens",
    "teacher_prompt",
    "distill_coef",
    "reward_weight",
]
"""Settings that only DISTILLATIONS have."""
OF_REWARDS = [
    "advantage",
    "zero_std_groups",
    "overlong_buffer_frac",
    "kl_in",
    "component_advantages",
    "at_most",
    "at_least",
]
"""Settings of what rewards become."""


def is_url(teacher: str) -> bool:
    """Whether algorithm.teacher is, or shall be, the address of a server."""
    return teacher.startswith(("http:", "https:"))


@dataclass(frozen=True, slots=True)
class Limit:
    """A bound on the mean of a component of the reward."""

    name: str
    """at_most/COMPONENT or at_least/COMPONENT."""
    component: str
    sign: Literal[-1, 1]
    """1: at most `bound`."""
    bound: float


class AlgorithmConfig(Section):
    """How rewards become advantages and a loss."""

    name: str = "grpo"
    """Preset that fills in the other fields of this section: grpo, bnpo, dr_grpo, dapo, gspo, luspo, gmpo,
    vespo, dppo, dro, cispo, sapo, rloo, reinforce++, reinforce++-baseline, maxrl, opo, otb, remax, pass_at_k,
    gdpo, ppo, clip_cov, kl_cov, opd, gkd, opsd, sdft, sdpo, raft, online_dpo, sft, dpo or ipo."""
    advantage: Advantage | str = "grpo"
    """Formula that turns rewards into advantages (algorithms/advantages.py), or your own as FILE.py:function.
    gae needs a critic."""
    component_advantages: dict[str, ComponentAdvantage] = {}
    """For gdpo, the formula of single components by name: grpo, dr_grpo or rloo. The others: grpo."""
    at_most: dict[str, float] = {}
    """Limits on the mean of components of the reward, by name. Each has a weight that is learned: it grows
    while a step's mean is over the limit, and falls, down to 0, while it is under it."""
    at_least: dict[str, float] = {}
    """The same for components that must not be less."""
    limit_lr: float = Field(0.1, gt=0)
    """What a limit's weight changes by in a step, for each unit that the mean is over the limit."""
    pass_k: int = Field(2, ge=1)
    """The k of the advantage pass_at_k: how many completions count as one attempt. At most
    rollout.group_size."""
    policy_loss: PolicyLoss | str = "clip"
    """Loss of each token (algorithms/losses.py), or your own as FILE.py:function."""
    aggregation: Aggregation = "token-mean"
    """How token losses are averaged. fixed-length: over completions times rollout.max_completion_tokens."""
    clip_eps_low: float = Field(0.2, ge=0, le=1)
    """Lower clip bound of the probability ratio: 1 - clip_eps_low."""
    clip_eps_high: float = Field(0.2, ge=0)
    """Upper clip bound of the probability ratio: 1 + clip_eps_high. Raise it (DAPO: 0.28, arXiv 2503.14476,
    eq. 10) when entropy collapses."""
    dual_clip: float = Field(3.0, gt=1)
    """Upper bound of the ratio for tokens with a negative advantage (arXiv 1912.09729). Only
    policy_loss=dual_clip uses it."""
    sapo_tau_pos: float = Field(1.0, gt=0)
    """Steepness of SAPO's gate for positive advantages."""
    sapo_tau_neg: float = Field(1.05, gt=0)
    """Steepness of SAPO's gate for advantages of zero or less."""
    cov_frac: float = Field(0.0002, gt=0, le=1)
    """Share of tokens that clip_cov and kl_cov select; at least one token."""
    clip_cov_low: float = 1.0
    """clip_cov selects only tokens with a covariance above this."""
    clip_cov_high: float = 5.0
    """clip_cov selects only tokens with a covariance below this."""
    kl_cov_coef: float = Field(1.0, ge=0)
    """Weight of kl_cov's penalty |policy logprob - old logprob| on the selected tokens."""
    dppo_penalty: float = Field(0.0, ge=0)
    """Weight of dppo's penalty on (log of the ratio to the sampler)^2. prime-rl: 0.001."""
    dro_beta: float = Field(0.05, gt=0)
    """Weight of DRO's penalty, times 1/2."""
    vespo_k_pos: float = Field(2.0, ge=0)
    """VESPO's exponent for advantages of zero or more: how fast small ratios lose weight."""
    vespo_lambda_pos: float = Field(3.0, gt=0)
    """VESPO's decay for advantages of zero or more: how fast large ratios lose weight."""
    vespo_k_neg: float = Field(3.0, ge=0)
    """VESPO's exponent for negative advantages."""
    vespo_lambda_neg: float = Field(2.0, gt=0)
    """VESPO's decay for negative advantages."""
    beta: float = Field(0.1, gt=0)
    """DPO's factor on log(policy / reference): the higher, the closer the policy stays to its reference. IPO:
    1 / (2 beta) is the difference that it aims at."""
    preference_loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """Loss of a pair, for dpo, ipo and online_dpo. sigmoid: DPO's."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token. Used by the advantages reinforce++ and gae."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """Lambda of GAE (arXiv 1506.02438, eq. 16). Used by the advantage gae; lower it to reduce variance."""
    zero_std_groups: ZeroStdGroups = "keep"
    """What happens to groups with equal rewards, which give no gradient. keep: they count in the loss
    denominator. drop: they do not. resample: new prompts replace them (DAPO)."""
    max_resample_rounds: int = Field(4, ge=1)
    """Maximum rounds of new prompts per step with zero_std_groups=resample. The step drops the zero-std
    groups that remain and prints how many."""
    mask_truncated: bool = False
    """Exclude truncated completions from the loss. Their rewards still count in their group."""
    overlong_buffer_frac: float = Field(0.0, ge=0, le=1)
    """Share at the end of rollout.max_completion_tokens over which the reward falls by up to 1: soft overlong
    punishment (arXiv 2503.14476, eq. 13). 0: off."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus: the exact entropy over the vocabulary, averaged over tokens. Raise it
    when entropy collapses."""
    entropy_target: float | None = Field(None, gt=0)
    """Mean entropy in nats that entropy_coef is adapted to. It acts while the last step's entropy is at most
    this. none: entropy_coef is fixed."""
    entropy_coef_delta: float = Field(0.005, gt=0)
    """What entropy_coef changes by in a step with entropy_target: up below the target, else down; from 0 to
    1."""
    top_entropy_quantile: float = Field(1.0, gt=0, le=1)
    """Share of tokens, those with the highest entropy, that get the policy loss
    (arXiv 2506.01939); 1: all tokens."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL to the reference policy. 0: the KL is not computed; 1e-9 only measures it."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimator of the KL (algorithms/kl.py)."""
    kl_bias_correction: bool = False
    """Multiply the KL in the loss by the probability ratio, which makes its gradient that of the KL
    (DeepSeek-V3.2, arXiv 2512.02556). TRL's use_bias_correction_kl, on there."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL enters: as a term of the loss, or as a penalty per token in the reward."""
    kl_ref: Literal["init", "base"] = "init"
    """Reference policy of the KL. init: the policy at version 0, which is the warm-start adapter if there is
    one. base: always the base model."""
    teacher: str = BASE_TEACHER
    """Who teaches in opd, gkd, opsd, sdft and sdpo. base: the model without an adapter. ema: an average of
    the policy's own adapters. Else the folder of an adapter on the same base, of this run's modules or
    others; the folder or hub id of another model with the same tokenizer, which gets an engine of its own
    (recorded as model:NAME); or the URL of a vLLM server with such a model, like http://127.0.0.1:8001."""
    teacher_model: str = ""
    """Name of the teacher on its server. Empty: its only model."""
    teacher_key_env: str = ""
    """Environment variable with the API key of the teacher's server. Empty: it asks for none."""
    teacher_beta: float | None = Field(None, ge=0, le=1)
    """Learn from a divergence of the distributions over the whole vocabulary. 0: KL(teacher || policy); 1:
    KL(policy || teacher); between: Jensen-Shannon's (GKD's beta). none: from log teacher - log policy of the
    sampled token."""
    teacher_top_k: int = Field(0, ge=0)
    """A teacher that is a whole model, with teacher_beta: the divergence is over this many tokens, the most
    likely ones to the teacher, and the rest as one. A server with vLLM gives 20, or more with
    --max-logprobs."""
    offline_share: float = Field(0.0, ge=0, le=1)
    """Share of the steps, drawn by the run's seed, that learn from the completions of offline_column, and not
    from samples: 1 - GKD's lambda. Needs teacher_beta."""
    offline_column: str | None = None
    """Column of the data with a completion for each prompt, such as a reply of the teacher."""
    teacher_update_rate: float = Field(0.05, gt=0, le=1)
    """teacher=ema: share of the policy that each step adds to the average."""
    teacher_column: str | None = None
    """Column of the data that only the teacher sees, such as a solution or a demonstration; `answer` is the
    reference answer. none: the teacher sees the policy's prompt."""
    teacher_sees_success: bool = False
    """The teacher of a completion also sees another one of its group that earned success_reward or more.
    Without one, it does not teach this completion."""
    success_reward: float = 1.0
    """teacher_sees_success: the least reward of a completion that is shown."""
    teacher_sees_feedback: bool = False
    """The teacher of a completion also sees what the reward or the environment returned as `feedback` on it.
    Without one, and without a column or a success to show, it does not teach this completion."""
    max_feedback_tokens: int = Field(512, ge=1)
    """teacher_sees_feedback: the most tokens of a completion's feedback. A longer one stops the run."""
    teacher_prompt: str | None = None
    """What the teacher's last user message says: {prompt} is the policy's, {context} what the teacher sees
    besides, with a blank line between its parts. none: the prompt, each part under a heading, and the request
    to answer."""
    distill_coef: float = Field(1.0, gt=0)
    """A distillation's factor on log teacher - log policy, which is added to a token's advantage, or on the
    divergence, which is added to its loss."""
    reward_weight: float = Field(0.0, ge=0)
    """A distillation's factor on the advantage of the reward. 0: the reward is only measured, and group_size
    may be 1."""
    updates_per_step: int = Field(1, ge=1)
    """Optimizer updates per step, each on a mini-batch of complete groups; a divisor of
    rollout.prompts_per_step."""

    @model_validator(mode="before")
    @classmethod
    def apply_preset(cls, values: Any) -> Any:
        preset = PRESETS.get(str(values.get("name", "grpo")), {}) if isinstance(values, dict) else {}
        return {**preset, **values} if isinstance(values, dict) else values

    @field_validator("name")
    @classmethod
    def check_name(cls, name: str) -> str:
        if name not in PRESETS:
            raise ValueError(f'"{name}" is not an algorithm; choose one of {", ".join(PRESETS)}.')
        return name

    @field_validator("teacher")
    @classmethod
    def check_teacher_url(cls, teacher: str) -> str:
        if is_url(teacher) and not is_server(teacher):
            raise ValueError(
                f"{teacher} is not the address of a server; write it like http://127.0.0.1:8001 (a key "
                "belongs into the variable of algorithm.teacher_key_env)."
            )
        return teacher

    @field_validator("advantage", mode="before")
    @classmethod
    def check_advantage(cls, value: Any) -> Any:
        return _check_function_name(value, "advantage", get_args(Advantage))

    @field_validator("policy_loss", mode="before")
    @classmethod
    def check_policy_loss(cls, value: Any) -> Any:
        return _check_function_name(value, "policy loss", get_args(PolicyLoss))

    @model_validator(mode="after")
    def check_prepared_data(self) -> Self:
        fields = type(self).model_fields
        others = fields.keys() - {"name", "beta", "kl_ref", "updates_per_step"}
        if self.is_preference:
            others -= {"preference_loss"}
        if self.name == "online_dpo":
            others -= {"zero_std_groups", "max_resample_rounds", "overlong_buffer_frac"}
        elif self.source == "rollouts":
            others &= {"preference_loss"}
        changed = [name for name in sorted(others) if getattr(self, name) != fields[name].default]
        if changed:
            learns = {
                "online_dpo": "compares the best of a group with the worst",
                "sft": "learns from prepared chats",
            }.get(self.name, f"learns from {'prepared ' * (self.source == 'pairs')}{self.source}")
            raise ValueError(
                f"algorithm.{changed[0]}={getattr(self, changed[0])} has no effect with "
                f"algorithm.name={self.name}, which {learns}; leave it out."
            )
        return self

    @model_validator(mode="after")
    def check_maxrl_rewards(self) -> Self:
        if self.advantage == "maxrl" and (
            self.overlong_buffer_frac > 0 or (self.kl_coef > 0 and self.kl_in == "reward")
        ):
            raise ValueError(
                "maxrl divides by a group's mean reward, which overlong_buffer_frac and kl_in=reward can "
                "make negative; use overlong_buffer_frac=0 and kl_in=loss."
            )
        return self

    @model_validator(mode="after")
    def check_own_baseline(self) -> Self:
        if self.advantage in ("remax", "otb") and self.uses_teacher:
            raise ValueError(
                f"algorithm.advantage={self.advantage} does not go with the teacher of "
                f"algorithm.name={self.name}; use another advantage, such as grpo."
            )
        if self.advantage == "remax" and self.zero_std_groups != "keep":
            raise ValueError(
                f"algorithm.zero_std_groups={self.zero_std_groups} is for advantages that compare a group, "
                "and remax compares each completion with a greedy one; use algorithm.zero_std_groups=keep."
            )
        return self

    @model_validator(mode="after")
    def check_gdpo_rewards(self) -> Self:
        if self.advantage != "gdpo" and self.component_advantages:
            raise ValueError(
                f"algorithm.component_advantages={self.component_advantages} has no effect with "
                f"algorithm.advantage={self.advantage}; use algorithm.name=gdpo."
            )
        unfit = {
            "zero_std_groups": self.zero_std_groups != "keep",
            "overlong_buffer_frac": self.overlong_buffer_frac > 0,
            "kl_in": self.kl_in_reward,
        }
        name = next((name for name, is_unfit in unfit.items() if is_unfit), None)
        if self.advantage == "gdpo" and name is not None:
            raise ValueError(
                f"algorithm.{name}={getattr(self, name)} looks at or changes the sum of a reward, and the "
                f"advantage gdpo only reads its components; use algorithm.{name}="
                f"{type(self).model_fields[name].default}."
            )
        return self

    @model_validator(mode="after")
    def check_teacher(self) -> Self:
        fields, why, names = type(self).model_fields, "", list[str]()
        if not self.uses_teacher:
            names, why = OF_TEACHERS, f"algorithm.name={self.name}, which has no teacher"
        elif not self.learns_from_rewards:
            names, why = OF_REWARDS, "algorithm.reward_weight=0, which leaves the reward out"
        if self.uses_teacher and not self.teacher_url and (self.teacher_model or self.teacher_key_env):
            names = ["teacher_model", "teacher_key_env"]
            why = f"algorithm.teacher={self.teacher}, which is not a server"
        changed = [name for name in names if getattr(self, name) != fields[name].default]
        if changed:
            raise ValueError(
                f"algorithm.{changed[0]}={getattr(self, changed[0])} has no effect with {why}; leave it out."
            )
        if self.has_teacher_server and self.teacher_beta is not None and not self.teacher_top_k:
            raise ValueError(
                f"algorithm.teacher_beta={self.teacher_beta:g} compares distributions, and the server of "
                f"{self.teacher} gives the logprobs of single tokens; set algorithm.teacher_top_k=20 to have "
                "those of its most likely ones, or use algorithm.name=opd."
            )
        # A folder of an adapter gives all, too: rollout/teacher_check.py tells these from whole models.
        gives_all = self.teacher in (BASE_TEACHER, AVERAGE)
        if self.teacher_top_k and (gives_all or self.teacher_beta is None):
            why = "algorithm.teacher_beta=none, which learns from the sampled tokens alone"
            if gives_all:
                why = f"algorithm.teacher={self.teacher}, which gives its whole distributions"
            raise ValueError(
                f"algorithm.teacher_top_k={self.teacher_top_k} has no effect with {why}; leave it out."
            )
        text = self.teacher_prompt
        if text is not None and (lacking := next((x for x in PLACES if x not in text), None)):
            raise ValueError(f"algorithm.teacher_prompt has no {lacking}; add it where its text belongs.")
        if self.uses_teacher and self.selects_by_cov:
            raise ValueError(
                f"algorithm.policy_loss={self.policy_loss} selects tokens by the advantage of the reward, "
                f"which is not that of algorithm.name={self.name}; choose another loss."
            )
        return self

    @model_validator(mode="after")
    def check_offline(self) -> Self:
        if bool(self.offline_share) != (self.offline_column is not None):
            raise ValueError(
                f"algorithm.offline_share={self.offline_share:g} and "
                f"algorithm.offline_column={self.offline_column or 'none'}: set both, the share of the steps "
                "and the column with their completions, or neither."
            )
        unfit = {
            "teacher_beta": self.teacher_beta is None,
            "reward_weight": self.reward_weight > 0,
            "kl_coef": self.kl_coef > 0,
            "entropy_coef": self.entropy_coef != 0,
            "entropy_target": self.entropy_target is not None,
            "top_entropy_quantile": self.top_entropy_quantile < 1,
            "teacher_column": self.teacher_column is not None,
            "teacher_sees_success": self.teacher_sees_success,
            "teacher_sees_feedback": self.teacher_sees_feedback,
        }
        name = next((name for name, is_unfit in unfit.items() if is_unfit), None)
        if self.offline_share and name is not None:
            value = getattr(self, name)
            raise ValueError(
                f"algorithm.offline_share={self.offline_share:g} does not go with "
                f"algorithm.{name}={'none' if value is None else value}: a completion of the data teaches "
                "the divergence from a teacher that reads the same prompt (teacher_beta), and nothing else."
            )
        return self

    @model_validator(mode="after")
    def check_kl(self) -> Self:
        if self.kl_bias_correction and (self.kl_coef == 0 or self.kl_in == "reward"):
            raise ValueError(
                "algorithm.kl_bias_correction=true corrects the KL in the loss, and "
                f"kl_coef={self.kl_coef:g} with kl_in={self.kl_in} puts none there; set kl_coef and "
                "kl_in=loss, or leave it out."
            )
        return self

    @model_validator(mode="after")
    def check_limits(self) -> Self:
        if not self.limits:
            return self
        name = "at_most" if self.at_most else "at_least"
        if not self.compares_groups or self.advantage in ("maxrl", "otb"):
            raise ValueError(
                f"algorithm.{name} adds a component with a learned weight to the rewards that a group is "
                f"compared by, which algorithm.advantage={self.advantage} does not allow; use another "
                "advantage, such as grpo."
            )
        if self.zero_std_groups != "keep":
            raise ValueError(
                f"algorithm.zero_std_groups={self.zero_std_groups} looks at the reward without the limits of "
                f"algorithm.{name}; leave it out."
            )
        return self

    @property
    def uses_teacher(self) -> bool:
        """Whether a teacher scores the sampled tokens."""
        return self.name in DISTILLATIONS

    @property
    def teacher_folder(self) -> str | None:
        """The folder of the teacher's adapter, if it has one of its own."""
        is_other = self.teacher in (BASE_TEACHER, AVERAGE) or self.has_teacher_server
        return self.teacher if self.uses_teacher and not is_other else None

    @property
    def has_teacher_server(self) -> bool:
        """Whether the teacher scores over HTTP: on a server, or on an engine that the run starts for it."""
        return self.teacher_url is not None or self.own_teacher is not None

    @property
    def own_teacher(self) -> str | None:
        """The whole model that teaches from an engine of its own, a folder or a hub id, if one does."""
        is_own = self.uses_teacher and self.teacher.startswith(OWN_MODEL)
        return self.teacher.removeprefix(OWN_MODEL) if is_own else None

    @property
    def teacher_url(self) -> str | None:
        """The address of the teacher's server, if it is on one."""
        return self.teacher if self.uses_teacher and is_url(self.teacher) else None

    @property
    def shows_teacher_more(self) -> bool:
        """Whether the teacher has a prompt of its own."""
        return self.teacher_column is not None or self.teacher_sees_success or self.teacher_sees_feedback

    @property
    def learns_from_rewards(self) -> bool:
        """Whether rewards decide what is learned."""
        return self.source == "rollouts" and (not self.uses_teacher or self.reward_weight > 0)

    @property
    def limits(self) -> list[Limit]:
        """All bounds on components."""
        return [
            *(Limit(f"at_most/{name}", name, 1, bound) for name, bound in self.at_most.items()),
            *(Limit(f"at_least/{name}", name, -1, bound) for name, bound in self.at_least.items()),
        ]

    def check_components(self, names: Collection[str], weights: Collection[str] = ()) -> None:
        """Raise ValueError if settings do not fit a reward with these components. `weights`: names that have
        one.
        """
        if self.needs_greedy and GREEDY in names:
            raise ValueError(
                f"algorithm.advantage={self.advantage} keeps the reward of a greedy completion as {GREEDY}, "
                "and a reward function returns that name; give it another."
            )
        if self.advantage == "gdpo" and len(names) < 2:
            raise ValueError(
                "algorithm.advantage=gdpo normalises each component of a reward on its own, and this run has "
                f"only {', '.join(names)}; return a dict with two or more, name two or more functions with "
                "--reward, or use algorithm.name=grpo."
            )
        used = {
            "reward.weights": weights,
            "algorithm.component_advantages": self.component_advantages,
            "algorithm.at_most": self.at_most,
            "algorithm.at_least": self.at_least,
        }
        for setting, keys in used.items():
            if unknown := next((key for key in keys if key not in names), None):
                raise ValueError(
                    f"{setting} names {unknown}, and the components of the reward are {', '.join(names)}; "
                    "use one of these names."
                )

    @property
    def compares_groups(self) -> bool:
        """Whether the advantage compares a completion with its group. One from a file counts as such."""
        return self.learns_from_rewards and self.advantage not in ("gae", "reinforce++", "remax")

    @property
    def needs_greedy(self) -> bool:
        """Whether a prompt also needs a greedy completion, whose reward is a baseline."""
        return self.advantage == "remax"

    @property
    def reads_components(self) -> bool:
        """Whether a built-in rule needs the components of the reward."""
        return self.advantage == "gdpo" or bool(self.limits)

    @property
    def source(self) -> Source:
        """What the examples come from: rollouts of the engine, or prepared chats or pairs."""
        return SOURCES.get(self.name, "rollouts")

    @property
    def uses_critic(self) -> bool:
        """Whether the advantage needs the critic's values."""
        return self.advantage == "gae"

    @property
    def is_preference(self) -> bool:
        """Whether it compares pairs."""
        return self.name in ("dpo", "ipo", "online_dpo")

    @property
    def is_unweighted(self) -> bool:
        """Whether importance weights do not count: the loss has the ratio to the sampler, or none."""
        return self.policy_loss in ("dppo", "dppo_kl", "dro", "vespo", "cross_entropy") or self.is_preference

    @property
    def pulls_to_sampler(self) -> bool:
        """Whether tokens with an advantage of 0 have a gradient."""
        return self.policy_loss == "dro" or (
            self.policy_loss in ("dppo", "dppo_kl") and self.dppo_penalty > 0
        )

    @property
    def uses_entropy(self) -> bool:
        """Whether the loss has a bonus for entropy, now or later."""
        return self.entropy_coef != 0 or self.entropy_target is not None

    @property
    def uses_ref(self) -> bool:
        """Whether the loss needs the reference policy: for a KL, or for DPO."""
        return self.kl_coef > 0 or self.is_preference

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL to the reference is subtracted from the rewards."""
        return self.kl_coef > 0 and self.kl_in == "reward"

    @property
    def selects_tokens(self) -> bool:
        """Whether an update's loss takes only some tokens, chosen from the mini-batch."""
        return self.selects_by_cov or self.top_entropy_quantile < 1

    @property
    def selects_by_cov(self) -> bool:
        """Whether the policy loss selects tokens by covariance (algorithms/policy_gradient.py)."""
        return self.policy_loss in ("clip_cov", "kl_cov")


def _check_function_name(value: Any, what: str, built_in: tuple[str, ...]) -> str:
    """A built-in's name or FILE.py:function. The file is checked when a run is planned."""
    if isinstance(value, str) and (value in built_in or is_program(value)):
        return value
    raise ValueError(f"{value!r} is no {what}; choose one of {', '.join(built_in)}, or FILE.py:function.")


class ImportanceConfig(Section):
    """Importance weights: they correct for the gap between the engine's and the trainer's probabilities."""

    mode: Literal["truncate", "mask", "none"] = "truncate"
    """truncate: a weight above `cap` becomes `cap`. mask: a weight above `cap` or below `floor` becomes 0.
    none: no weights; the metrics still report the gap."""
    level: Literal["token", "sequence"] = "token"
    """token: one weight per token. sequence: one per completion, the product over its tokens."""
    cap: float = Field(2.0, gt=0)
    """Largest importance weight; see `mode`."""
    floor: float = Field(0.0, ge=0)
    """Smallest importance weight; mode=mask sets weights below it to 0."""
    off_policy_kl: float | None = Field(None, gt=0)
    """Completions with a negative advantage get weight 0 where the mean of log(sampler / policy) over their
    tokens is above this, in nats (DeepSeek-V3.2, arXiv 2512.02556). none: no limit."""
    reject_kl: float | None = Field(None, gt=0)
    """Largest mean KL per token (k3, nats) between engine and trainer; completions above it get weight 0.
    none: no limit."""


class CriticConfig(Section):
    """PPO's value function: a second LoRA adapter on the same frozen base, with a linear head."""

    rank: int = Field(32, ge=1)
    """LoRA rank of the critic's adapter."""
    alpha: float = Field(32.0, gt=0)
    """LoRA alpha of the critic's adapter; scales its update as lora.alpha does."""
    target_modules: Literal["all-linear"] | list[str] | None = None
    """Modules that get the critic's LoRA, named as in lora.target_modules. none: the policy's."""
    lr: float = Field(1e-4, gt=0)
    """Learning rate of adapter and head. It follows optim.schedule and optim.warmup_steps."""
    clip: float = Field(0.5, gt=0)
    """PPO value clipping: the value loss stops rewarding a value that moves farther from its old one."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients with a larger norm are scaled down to it."""

    @field_validator("target_modules")
    @classmethod
    def check_target_modules(cls, modules: str | list[str] | None) -> str | list[str] | None:
        check_modules(modules)
        return modules
