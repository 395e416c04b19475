"""How trainer and engines share memory, fixed before anything starts: one plan of bytes.

The bytes of weights, LoRA, KV cache and activations follow from the shapes in the model's files. On GPUs the
engines get a KV cache of a set size, and each rank gets a limit. Together they fit, so neither the order of
the starts nor the restart of an engine matters. With engine.sleep they take turns: the limit of a rank holds
what the engines lend, and the engines fit beside a rank that waits. A run that cannot fit is refused here.
What a prediction misses, the trainer's probe (`tokens_per_micro_batch=auto`) and its halving of micro-batches
catch.
benchmarks/memory.py compares the prediction with passes on a CPU and with fake tensors of GPU shapes.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from skylite.config.engine import CpuLora, Lent
from skylite.config.lora import LoraConfig
from skylite.config.resolved import MemoryPlan, TeacherModel
from skylite.config.train import TrainConfig
from skylite.engine.interface import EngineMemory, Launcher
from skylite.engine.model_sizes import ModelSizes, model_sizes
from skylite.engine.tensor_parallel import check_divisible
from skylite.errors import ConfigError, DoesNotFit
from skylite.notes import Note, notes_of, warning
from skylite.processes.gpus import Gpu
from skylite.processes.hardware import DTYPE_BYTES, available_memory
from skylite.resources.gpu_placement import GpuChoice

Device = Literal["cpu", "cuda"]
GIB = 2**30
FLOAT32 = INT32 = 4
WIDENED_COPIES = 3
"""Matrices in the compute dtype while a quantised one is widened (hub/quantised.py), beside its integers."""
ADAPTER_COPIES = 4
"""float32 copies of each trained parameter: itself, its gradient and AdamW's two moments."""
ROLLBACK_COPIES = 3
"""More copies during an update (trainer/anomaly.py): parameter and moments as they were before."""
MOMENTS = 2
"""Copies among each of these that trainer.offload keeps in the machine's memory, but for AdamW's step."""
HEAD_CHUNK = {"cpu": 1 << 22, "cuda": 1 << 26}
HEAD_BLOCK_ROWS, HEAD_BLOCK_VOCAB = 512, 2048
"""Those of model/chunked_logprobs.py: logits of a chunk, and the size of a block."""
HEAD_BUFFERS = 4
"""float32 buffers of one chunk or block."""
MLP_BACKWARD = {"none": 8, "selective": 9, "full": 9}
"""Tensors of the MLP's inner size that its backward pass holds besides the kept ones, by checkpointing."""
HEAD_KEEPS = 3
"""Tensors of the hidden size that the last norm and the head keep."""
SCORES_PER_CALL = 16384
"""That of model/prefix_tree.py, which the parent does not import."""
TRAINER_PROCESS = {"cpu": 400 << 20, "cuda": 1 << 30}
"""CPU: Python and its libraries. GPU: CUDA context, NCCL, cuBLAS and fragments; an estimate, not measured."""
MARGIN = 1.1
"""A prediction is refused if it exceeds the memory by more than its own error."""
SHARE_STEPS = 10_000
"""An engine's share of a GPU is a multiple of 1 / SHARE_STEPS."""
MOST_TOKENS = 1 << 22
"""No micro-batch has more."""
ENOUGH_TOKENS = 8192
"""Of a micro-batch. Smaller ones leave a GPU waiting for the host."""
MOST_SEQUENCES = 512
"""Largest engine.max_num_seqs that skylite chooses: the most sequences that vLLM decodes in a CUDA graph."""
CPU_HELPS = ("a smaller engine.kv_cache_gib", "fewer ranks or engines", "a smaller model")
GPU_HELPS = (
    "a lower engine.gpu_memory_utilization", "more ranks, each on its own GPU (trainer.num_ranks)",
    "trainer.offload=true",
)  # fmt: skip
TEACHER_TOKENS = 8192
"""A teacher's KV cache on a GPU holds so many at least: what vLLM computes in one pass. A sequence that is
scored leaves at once."""
TEACHER_ROWS = 1024
"""Rows of logits that vLLM computes at once for the logprobs of prompts (its CHUNK_SIZE)."""
NO_ENGINE = EngineMemory(weights=0, lora_slots=0, activations=0, process=0, kv_per_token=0, block_size=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Predicted bytes of one rank."""

    weights: int
    adapter: int
    """Parameters, gradients, moments, and the copies during an update."""
    cast: int
    """The adapter in bfloat16, from the forward pass to the backward pass. checkpointing=full casts it again,
    layer by layer."""
    kept: float
    """Per token of a micro-batch, from its forward pass to its backward pass."""
    work: float
    """Per token, while backward computes one layer."""
    kept_copy: float
    """As `kept`, per token whose keys and values attention copies for another piece of a prefix tree."""
    work_copy: float
    """As `work`."""
    mask: int
    """Attention's mask for the longest trajectory, which all layers share."""
    head: int
    """Scratch of the LM head, or of AdamW's step with offloaded moments, while no layer is computed."""
    process: int
    is_quantised: bool
    """Whether the base is, so that every rank holds all of it on its device."""
    keeps_freed: bool
    """Whether the allocator keeps freed blocks by their size, as TBB's does on a CPU: the blocks of the head
    and of the layers then add up."""

    def state(self) -> int:
        """Between two passes."""
        return self.weights + self.adapter + self.process

    def waiting(self, lends: Lent) -> int:
        """While engines sample that lend so much."""
        return self.state() if lends == "kv_cache" else self.adapter + self.process

    def total(self, tokens: int, copies: float = 0) -> int:
        """At the peak of a pass of `tokens` tokens and `copies` copied ones. One trajectory has no copies."""
        kept = self.cast + self.kept * tokens + self.kept_copy * copies
        work = self.work * tokens + self.work_copy * copies
        scratch = self.head + work if self.keeps_freed else max(self.head, work)
        return int(self.state() + self.mask + kept + scratch)

    def parts(self, tokens: int, copies: float = 0) -> str:
        return (
            f"weights {gib(self.weights)}, adapter and optimizer {gib(self.adapter)}, activations and head "
            f"{gib(self.total(tokens, copies) - self.state())}, process {gib(self.process)}"
        )


def engine_parts(engine: EngineMemory) -> str:
    return (
        f"weights {gib(engine.weights)}, LoRA slots {gib(engine.lora_slots)}, "
        f"activations {gib(engine.activations)}, process {gib(engine.process)}"
    )


@dataclass(frozen=True, slots=True)
class TeacherMemory:
    """Predicted bytes of a teacher's engine, on each of its GPUs."""

    engine: EngineMemory
    kv_cache: int

    def total(self) -> int:
        return self.engine.before_kv() + self.kv_cache

    def parts(self) -> str:
        return f"{gib(self.total())} ({engine_parts(self.engine)}, KV cache {gib(self.kv_cache)})"


@dataclass(frozen=True, slots=True)
class Setup:
    """What a run has beside its settings when its memory is planned."""

    launcher: Launcher
    model_path: Path
    device: str
    dtype: str
    cpu_lora: CpuLora
    placement: GpuChoice
    own_teacher: TeacherModel | None = None
    """The whole model that teaches from an engine of its own."""

    def engine(self, config: TrainConfig) -> EngineMemory:
        """Predict an engine's memory."""
        if not config.engine.num_engines:
            return NO_ENGINE
        check_divisible(self.model_path, config.engine.tensor_parallel)
        return self.launcher.memory(config, self.model_path, self.device, self.dtype, self.cpu_lora)

    def teacher(self, config: TrainConfig) -> TeacherMemory | None:
        """Predict the memory of a teacher's engine. Raises ConfigError if its KV cache holds no sequence."""
        teacher = self.own_teacher
        if teacher is None:
            return None
        check_divisible(teacher.path, config.engine.tensor_parallel)
        rows = config.engine.model_copy(update={"max_num_seqs": TEACHER_ROWS})
        plain = config.model_copy(update={"engine": rows, "lora": LoraConfig()})  # of modules that it has
        engine = self.launcher.memory(plain, teacher.path, self.device, teacher.dtype, "dense")
        engine, longest = replace(engine, lora_slots=0), teacher.max_tokens
        if self.device == "cuda":
            kv_cache = engine.kv_cache(longest, max(1, TEACHER_TOKENS // longest))
        else:
            kv_cache = int(config.engine.kv_cache_gib * GIB)
        if self.device == "cuda" and not engine.kv_per_token:
            raise _unknown_cache("teacher's")
        if engine.kv_per_token and engine.longest(kv_cache) < longest:
            raise DoesNotFit(
                f"engine.kv_cache_gib={config.engine.kv_cache_gib:g} holds {engine.longest(kv_cache):,} "
                f"tokens of the teacher {teacher.path.name}, which may read {longest:,} at once.",
                "Raise it, or lower rollout.max_completion_tokens.",
            )
        return TeacherMemory(engine, kv_cache)

    def sizes(self, config: TrainConfig) -> ModelSizes:
        """The model's, with the adapters of these settings."""
        return model_sizes(self.model_path, config.lora, config.critic_lora)


def plan_memory(config: TrainConfig, setup: Setup) -> tuple[MemoryPlan, list[Note]]:
    """Predict and divide the memory.

    Raises DoesNotFit if the run cannot fit on its GPUs, or several policies on a CPU.
    """
    engine, sizes, teacher = setup.engine(config), setup.sizes(config), setup.teacher(config)
    if (lends := config.engine.lends) is not None:
        check_sleep(setup.launcher, setup.device, lends)
    if setup.device == "cpu":
        trainer = trainer_memory(sizes, config, "cpu", setup.dtype)
        note = cpu_note(config, trainer, engine, available_memory(), teacher)
        if config.engine.policies > 1 and note.is_warning:  # fewer may fit
            raise DoesNotFit(f"{config.engine.policies} policies at once do not fit ({note.text}).")
        return MemoryPlan(), [note]
    trainer = trainer_memory(sizes, config, "cuda", setup.dtype)
    return divide_gpus(config, trainer, engine, setup.placement, teacher)


def check_sleep(launcher: Launcher, device: str, lends: Lent) -> None:
    """Raise ConfigError if engines of the launcher do not sleep, or if it does not say."""
    own = getattr(type(launcher), "check_sleep", Launcher.check_sleep)
    if own is Launcher.check_sleep:  # none, or inherited from the protocol
        raise ConfigError(
            f"engine.sleep={lends} needs a launcher whose engines sleep, and {launcher.name} has no "
            "check_sleep.",
            "Leave it out.",
        )
    launcher.check_sleep(device, lends)


def fit_memory(config: TrainConfig, setup: Setup) -> tuple[TrainConfig, MemoryPlan, list[Note]]:
    """Choose checkpointing, replication and sequences at once by the memory, and divide it.

    Returns settings, plan and a note on each choice. Raises ConfigError as `plan_memory`.
    """
    config, checkpointing_note = checkpointing_default(config, setup)
    config, base_note = replicate_default(config, setup)
    config, sequences_note = decode_whole_steps(config, setup)
    memory, notes = plan_memory(config, setup)
    return config, memory, notes_of(checkpointing_note, base_note, sequences_note, *notes)


def checkpointing_default(config: TrainConfig, setup: Setup) -> tuple[TrainConfig, str]:
    """On a GPU, the first of none, selective and full with which `enough_tokens` fit, and a note, unless
    someone set trainer.checkpointing.

    `plan_memory` raises what is wrong, if anything is.
    """
    if setup.device == "cpu" or "checkpointing" in config.trainer.model_fields_set:
        return config, ""
    tokens = enough_tokens(config)
    for name in ("none", "selective"):
        chosen = _with_checkpointing(config, name)
        fitting = fitting_tokens(chosen, setup)
        if fitting is None:  # the GPU's size is unknown
            chosen = _with_checkpointing(config, name := "selective")
        if fitting is None or fitting >= tokens:
            fits = f"a micro-batch of {tokens} tokens fits with it and keeps most"
            return chosen, f"trainer.checkpointing={name}: {fits}, by the predicted memory"
    fits = f"with less recomputation no micro-batch of {tokens} tokens fits"
    return (
        _with_checkpointing(config, "full"),
        f"trainer.checkpointing=full: {fits}, by the predicted memory",
    )


def replicate_default(config: TrainConfig, setup: Setup) -> tuple[TrainConfig, str]:
    """On several GPUs, the settings with the whole base on each rank where it fits, and a note.

    A quantised base is never sharded, on a CPU neither. Another one may be, if someone set it. Checkpointing
    is chosen before: to gather layers costs less than to compute again.
    """
    ranks, own = config.trainer.world_size, config.trainer
    if ranks > 1 and not own.replicate_base and setup.sizes(config).quantised:
        note = f"trainer.replicate_base=true: each of the {ranks} ranks holds the quantised base in full"
        return _replicated(config), note
    if setup.device == "cpu" or ranks == 1 or own.offload or "replicate_base" in own.model_fields_set:
        return config, ""
    chosen, tokens = _replicated(config), enough_tokens(config)
    if (fitting_tokens(chosen, setup) or 0) < tokens:
        return config, ""
    fits = f"a micro-batch of {tokens} tokens fits beside it, by the predicted memory"
    return chosen, f"trainer.replicate_base=true: each of the {ranks} ranks holds the whole base; {fits}"


def fitting_tokens(config: TrainConfig, setup: Setup) -> int | None:
    """Most tokens of a rank's micro-batch on a GPU with these settings.

    0: the run does not fit. None: the size of a GPU is unknown.
    """
    trainer = trainer_memory(setup.sizes(config), config, "cuda", setup.dtype)
    try:
        plan, _ = divide_gpus(config, trainer, setup.engine(config), setup.placement, setup.teacher(config))
    except ConfigError:
        return 0
    limit = plan.trainer_bytes
    return None if limit is None else most_tokens(config, trainer, limit + trainer.process)


def _replicated(config: TrainConfig) -> TrainConfig:
    trainer = config.trainer.model_copy(update={"replicate_base": True})
    return config.model_copy(update={"trainer": trainer})


def _with_checkpointing(config: TrainConfig, name: str) -> TrainConfig:
    trainer = config.trainer.model_copy(update={"checkpointing": name})
    return config.model_copy(update={"trainer": trainer})


def enough_tokens(config: TrainConfig) -> int:
    """Tokens of a micro-batch that must fit before more activations are kept: those of the setting, for
    "auto" ENOUGH_TOKENS, and at least those of the longest trajectory."""
    tokens = config.trainer.tokens_per_micro_batch
    return max(ENOUGH_TOKENS if tokens == "auto" else tokens, config.max_sequence_tokens)


def decode_whole_steps(config: TrainConfig, setup: Setup) -> tuple[TrainConfig, str]:
    """On a GPU, raise engine.max_num_seqs to all sequences of a step, with a note, unless someone set it.

    Or to as many of the longest as the KV cache holds, if these are more than the default. `enough_tokens` of
    the trainer must still fit. vLLM would take more sequences, but compute some of them twice.
    """
    engines, default = config.engine.num_engines, config.engine.max_num_seqs
    each = config.rollout.group_size + config.algorithm.needs_greedy
    step = math.ceil(config.rollout.prompts_per_step * each / max(1, engines))
    is_set = "max_num_seqs" in config.engine.model_fields_set
    if setup.device == "cpu" or not engines or step <= default or is_set:
        return config, ""
    raised = _with_sequences(config, min(step, MOST_SEQUENCES))
    try:
        plan, _ = plan_memory(raised, setup)
    except ConfigError:  # the plan without more sequences may fit, or says why not
        return config, ""
    if plan.kv_cache_bytes is None or plan.trainer_bytes is None:
        return config, ""
    held = setup.engine(raised).sequences(plan.kv_cache_bytes, config.max_sequence_tokens)
    trainer = trainer_memory(setup.sizes(config), config, "cuda", setup.dtype)
    tokens = most_tokens(config, trainer, plan.trainer_bytes + trainer.process)
    most = min(raised.engine.max_num_seqs, held)
    if most <= default or tokens < enough_tokens(config):
        return config, ""
    note = (
        f"engine.max_num_seqs={most}: a step has {step} sequences per engine, and the KV cache holds {held}"
    )
    return _with_sequences(config, most), note


def _with_sequences(config: TrainConfig, count: int) -> TrainConfig:
    engine = config.engine.model_copy(update={"max_num_seqs": count})
    return config.model_copy(update={"engine": engine})


def trainer_memory(sizes: ModelSizes, config: TrainConfig, device: Device, dtype: str) -> TrainerMemory:
    """Predict a rank's memory."""
    item = DTYPE_BYTES[dtype]
    adapters = (sizes.lora + sizes.critic_lora) * config.engine.policies
    offload, full = config.trainer.offload, config.trainer.checkpointing == "full"
    sdpa = config.trainer.attention == "sdpa"
    # Autograd keeps keys and values for each head and piece. On a CPU it keeps them once.
    copy = 2 * sizes.queries * item if sdpa and device == "cuda" else 0
    layer = _layers_bytes(sizes, config, device, item)
    inner = MLP_BACKWARD[config.trainer.checkpointing] * sizes.intermediate
    # Of an expert: outputs, or gates and products.
    expert = max(3 * sizes.hidden, 7 * sizes.expert_intermediate - sizes.hidden)
    work = float(max(inner, sizes.experts_per_token * expert) * item)
    return TrainerMemory(
        weights=_weight_bytes(sizes, config, item),
        adapter=adapters * (ADAPTER_COPIES + ROLLBACK_COPIES - (2 * MOMENTS if offload else 0)) * FLOAT32,
        cast=sizes.lora * item if item < FLOAT32 and not full else 0,
        kept=(sizes.hidden * sizes.num_layers * item if full else layer) + HEAD_KEEPS * sizes.hidden * item,
        work=work + (layer / max(1, sizes.num_layers) if full else 0),  # one layer's forward pass again
        kept_copy=0 if full else copy * sizes.num_layers,
        work_copy=copy if full else 0,
        mask=config.max_sequence_tokens**2 * item if sdpa else 0,
        head=max(_head_scratch(sizes, device, dtype), MOMENTS * adapters * FLOAT32 if offload else 0),
        process=TRAINER_PROCESS[device],
        is_quantised=bool(sizes.quantised),
        keeps_freed=device == "cpu",
    )


def _weight_bytes(sizes: ModelSizes, config: TrainConfig, item: int) -> int:
    """Of a rank's shard, and of what FSDP gathers from all: two layers, and all that is outside of layers."""
    ranks, offload = config.trainer.world_size, config.trainer.offload
    if config.trainer.replicate_base or sizes.quantised:
        ranks = 1
    # A float32 model that is not sharded is stored in bfloat16 if that loses nothing (model/bf16_weights.py).
    stored = 2 if ranks == 1 else item
    if sizes.quantised:  # all of it on every rank, and one matrix that is being widened
        return sizes.weight_bytes(stored) + sizes.largest_quantised * (WIDENED_COPIES * item + INT32)
    shard = 0 if offload else sizes.parameters * stored // ranks
    gathered = (2 * sizes.largest_layer + sizes.outside_layers) * item if ranks > 1 or offload else 0
    return shard + gathered


def _layers_bytes(sizes: ModelSizes, config: TrainConfig, device: Device, item: int) -> float:
    """Bytes per token that all layers keep without checkpointing=full."""
    kept = float(sizes.kept * item + sizes.kept_float32 * FLOAT32)
    if device == "cuda" and config.trainer.attention == "sdpa":
        # Keys and values for each head, of all tokens and joined for each piece, and the joined outputs.
        kept += (2 * sizes.queries * 2 + sizes.queries - 2 * sizes.keys) * sizes.num_layers * item
    return kept + (sizes.recomputed * item if config.trainer.checkpointing == "none" else 0)


def _head_scratch(sizes: ModelSizes, device: Device, dtype: str) -> int:
    """Buffers of one chunk of logits. In float32 of one block, and the widened weights of its tokens."""
    if dtype == "float32":
        block = HEAD_BUFFERS * HEAD_BLOCK_ROWS * HEAD_BLOCK_VOCAB + HEAD_BLOCK_VOCAB * sizes.hidden
        return block * FLOAT32
    return HEAD_BUFFERS * HEAD_CHUNK[device] * FLOAT32


def divide_gpus(
    config: TrainConfig,
    trainer: TrainerMemory,
    engine: EngineMemory,
    placement: GpuChoice,
    teacher: TeacherMemory | None = None,
) -> tuple[MemoryPlan, list[Note]]:
    """The smallest GPU of the engines fixes the KV cache, the fullest GPU of the ranks fixes their limit.

    The ranks divide what other processes leave free; gpu_placement.py has checked that the engines fit. A
    teacher's engine is on the GPUs of the first engine, within their share. It never sleeps.
    """
    require_shared(config, placement)
    gpus = placement.gpus
    totals = {index: gpu.total_bytes for index, gpu in gpus.items() if gpu.total_bytes is not None}
    if not totals.keys() >= {*placement.engine_gpus, *placement.rank_gpus}:
        unknown = "nvidia-smi does not tell the size of a GPU"
        if teacher is not None:
            raise ConfigError(
                f"{unknown}, so it cannot be divided between an engine and the teacher's.",
                "Serve the teacher on another GPU, and give its URL as algorithm.teacher.",
            )
        more = "so engine and trainer may take more than it has"
        return MemoryPlan(), [warning(f"memory: {unknown}, {more}")]
    sizes = [totals[i] for i in placement.engine_gpus]
    kv_cache = kv_cache_bytes(config, engine, min(sizes), teacher) if sizes else 0
    beside = placement.first_engine(config) if teacher is not None else []
    lends, whole = config.engine.lends, engine.before_kv() + kv_cache
    beside_trainer = whole if lends is None else engine.asleep(lends)
    of_teacher = teacher.total() if teacher is not None else 0
    left = [placement.free_bytes.get(i, totals[i]) - of_teacher * (i in beside) for i in placement.rank_gpus]
    engines = [placement.engine_gpus.count(i) for i in placement.rank_gpus]
    limits = [free - count * beside_trainer for free, count in zip(left, engines, strict=True)]
    limit = min(limits)
    fullest = placement.rank_gpus[limits.index(limit)]
    require_trainer(config, trainer, limit, gpus[fullest], placement)
    awake = min(free - count * whole for free, count in zip(left, engines, strict=True))
    require_waiting(config, trainer, awake)
    require_host_memory(config, trainer, engine, placement)
    note = rank_note(config, trainer, limit)
    if not sizes:
        return MemoryPlan(trainer_bytes=limit - trainer.process), [note]
    plan = MemoryPlan(
        kv_cache_bytes=kv_cache,
        engine_share=engine_share(engine, kv_cache, max(sizes)),
        trainer_bytes=limit - trainer.process,
    )
    notes = [engine_note(config, engine, kv_cache), note]
    if teacher is not None:
        share = engine_share(teacher.engine, teacher.kv_cache, max(sizes))
        plan = plan.model_copy(
            update={"teacher_kv_cache_bytes": teacher.kv_cache, "teacher_share": share},
        )
        where = ", ".join(map(str, beside))
        notes.insert(1, Note(f"memory of the teacher's engine on GPU {where}: {teacher.parts()}"))
    return plan, notes


def engine_share(engine: EngineMemory, kv_cache: int, largest: int) -> float:
    """The gpu-memory-utilization of an engine with a KV cache of a set size, rounded down.

    An engine refuses to start unless this share of the GPU is free, even if it does not use the share then.
    When it asks, it already holds a part of its `process` bytes. The largest GPU gives the smallest share.
    """
    asked = engine.before_kv() - engine.process + kv_cache
    return max(1, SHARE_STEPS * asked // largest) / SHARE_STEPS


def kv_cache_bytes(
    config: TrainConfig, engine: EngineMemory, total: int, teacher: TeacherMemory | None = None
) -> int:
    """What remains of an engine's share, at most what max_num_seqs of the longest sequences fill.

    A teacher's engine takes its part first. Raises ConfigError if one sequence does not fit, or if the size
    of a token is unknown.
    """
    if not engine.kv_per_token:
        raise _unknown_cache("engine's")
    longest = config.max_sequence_tokens
    smallest = engine.kv_cache(longest)
    share = config.engine.gpu_memory_utilization
    left = int(share * total) - engine.before_kv() - (teacher.total() if teacher is not None else 0)
    if left < smallest:
        beside = f"; the teacher's engine takes {teacher.parts()}" if teacher is not None else ""
        raise DoesNotFit(
            f"The engine does not fit: engine.gpu_memory_utilization={share:g} of {gib(total)} is "
            f"{gib(share * total)}; {engine_parts(engine)}, and one sequence of {longest} tokens needs a KV "
            f"cache of {gib(smallest)}{beside}.",
            "Raise engine.gpu_memory_utilization, lower rollout.max_completion_tokens, divide the model "
            "among more GPUs (engine.tensor_parallel), or use a smaller model.",
        )
    return min(left, engine.kv_cache(longest, config.engine.max_num_seqs))


def _unknown_cache(whose: str) -> ConfigError:
    return ConfigError(
        f"The {whose} KV cache cannot be predicted: the model has layers without an attention that "
        "skylite knows (k_proj; a fused projection with num_attention_heads in config.json; the latent "
        "attention of DeepSeek V2 and V3).",
        "Use another model, or train on the CPU.",
    )


def require_trainer(
    config: TrainConfig, trainer: TrainerMemory, limit: int, gpu: Gpu, placement: GpuChoice
) -> None:
    """Raise ConfigError if the trainer cannot compute its longest trajectory in `limit` bytes."""
    longest = config.max_sequence_tokens
    needed = trainer.total(longest)
    if needed > limit * MARGIN:
        beside = placement.engine_gpus.count(gpu.index)
        engines = f" beside {beside} {'sleeping ' * bool(config.engine.lends)}engine(s)" if beside else ""
        others = placement.others.get(gpu.index)
        raise DoesNotFit(
            f"The trainer does not fit on GPU {gpu.index} ({gpu.name}){engines}: a trajectory of {longest} "
            f"tokens needs about {gib(needed)} ({trainer.parts(longest)}), "
            f"and {gib(limit)} are left{f'; {others}' if others else ''}.",
            f"Use {_gpu_helps(config, trainer, may_sleep=bool(beside))}.",
        )


def require_shared(config: TrainConfig, placement: GpuChoice) -> None:
    """Raise ConfigError if engines are to sleep, and no trainer shares their GPUs."""
    if config.engine.lends and placement.kind == "split":
        raise ConfigError(
            f"engine.sleep={config.engine.sleep} lends memory to a trainer on the same GPU, and with this "
            "placement no GPU has both.",
            "Leave it out, or use placement=shared.",
        )


def require_waiting(config: TrainConfig, trainer: TrainerMemory, limit: int) -> None:
    """Raise DoesNotFit if the trainer cannot even wait in the `limit` bytes beside engines that sample."""
    lends, share = config.engine.lends, config.engine.gpu_memory_utilization
    if lends is not None and limit < trainer.waiting(lends):
        raise DoesNotFit(
            f"A waiting trainer needs {gib(trainer.waiting(lends))}, and engines that are awake leave "
            f"{gib(max(0, limit))} (engine.gpu_memory_utilization={share:g}).",
            "Lower engine.gpu_memory_utilization, divide the model among more GPUs (engine.tensor_parallel), "
            "or use trainer.offload=true.",
        )


def require_host_memory(
    config: TrainConfig, trainer: TrainerMemory, engine: EngineMemory, placement: GpuChoice
) -> None:
    """Raise DoesNotFit if this machine cannot hold the weights that take turns on its GPUs.

    An engine's are twice their size at most: torch rounds pinned memory up to powers of two.
    """
    is_described = not placement.free_bytes
    if config.engine.lends != "weights" or is_described:
        return
    of_engines = len(placement.engine_gpus) * 2 * (engine.weights + engine.lora_slots)
    whole = engine.weights * config.engine.tensor_parallel
    of_ranks = whole if config.trainer.offload else len(placement.rank_gpus) * trainer.weights
    if of_engines + of_ranks <= (free := available_memory()):
        return
    raise DoesNotFit(
        f"engine.sleep=weights keeps up to {gib(of_engines + of_ranks)} of weights in the machine's memory, "
        f"of which {gib(free)} are free.",
        "Use a smaller model, or more GPUs.",
    )


def worst_copies(tokens: int, config: TrainConfig) -> float:
    """The most tokens whose keys and values a micro-batch copies, over all lengths of completions.

    A prefix tree copies for each piece the tokens above it. Completions that are just long enough to become
    pieces of their own (model/prefix_tree.py) give most pieces, with prompts that share no token, or all but
    one. A lone group, and single completions of prompts that share all, are pieces at any length.
    """
    prompt, group = config.rollout.max_prompt_tokens, config.rollout.group_size
    pieces = max(group if group > 1 else 0, config.rollout.prompts_per_step)
    alone = pieces * max(0, min(prompt, tokens - pieces))
    several = max(1, group - 1)
    lengths = {
        shared: max(1, (math.sqrt((prompt - shared) ** 2 + 4 * several * SCORES_PER_CALL) - prompt + shared))
        for shared in (0, prompt - 1)
    }
    return max(alone, *(copies(tokens, config, length / 2 / several, s) for s, length in lengths.items()))


def copies(tokens: int, config: TrainConfig, completion: float, shared: int = 0) -> float:
    """Copied tokens with the longest prompts, which share `shared` tokens, and completions of one length."""
    prompt, group = config.rollout.max_prompt_tokens, config.rollout.group_size
    size = prompt - shared + group * max(1, completion)
    groups = min(config.rollout.prompts_per_step, max(0, tokens - shared) / size)
    return groups * (shared + (group * prompt if group > 1 else 0))


def most_tokens(config: TrainConfig, trainer: TrainerMemory, limit: int) -> int:
    """Tokens of the largest micro-batch that fits into `limit` bytes at all lengths of completions.

    Rounded down to two digits: a prediction is not more exact. 0 if the longest trajectory does not fit.
    """
    longest = config.max_sequence_tokens
    fitting = bisect.bisect_right(
        range(MOST_TOKENS), limit, lo=longest, key=lambda n: trainer.total(n, worst_copies(n, config))
    ) - 1  # fmt: skip
    if fitting < longest:
        return 0
    digits: int = 10 ** max(0, len(str(fitting)) - 2)
    return max(longest, fitting // digits * digits)


def micro_batch_tokens(config: TrainConfig) -> int:
    """The tokens of a micro-batch; for "auto", which is measured later, those of the longest trajectory."""
    tokens = config.trainer.tokens_per_micro_batch
    longest = config.max_sequence_tokens
    return longest if tokens == "auto" else max(tokens, longest)


def cpu_note(
    config: TrainConfig,
    trainer: TrainerMemory,
    engine: EngineMemory,
    free: int,
    teacher: TeacherMemory | None = None,
) -> Note:
    """The prediction for a CPU run, and a warning if the machine has less."""
    tokens = micro_batch_tokens(config)
    kv_cache = int(config.engine.kv_cache_gib * GIB)
    ranks, engines = config.trainer.num_ranks, config.engine.num_engines
    of_engines = engines * (engine.before_kv() + kv_cache) + (teacher.total() if teacher is not None else 0)
    total = ranks * trainer.total(tokens) + of_engines
    beside = (
        f"{engines} engine(s) of {gib(engine.before_kv() + kv_cache)} ({engine_parts(engine)}, KV cache "
        f"{gib(kv_cache)}), "
    )
    parts = (
        f"{beside if engines else ''}{f'a teacher of {teacher.parts()}, ' if teacher is not None else ''}"
        f"{ranks} rank(s) of {gib(trainer.total(tokens))} at {tokens} tokens "
        f"({trainer.parts(tokens)})"
    )
    if total <= free:
        return Note(f"memory: about {gib(total)} of {gib(free)} free; {parts}")
    fitting = most_tokens(config, trainer, (free - of_engines) // ranks)
    remedy = (
        f"set trainer.tokens_per_micro_batch={fitting}" if fitting else f"use {_helps(config, *CPU_HELPS)}"
    )
    return warning(
        f"memory: the run needs about {gib(total)}, more than the {gib(free)} that are free "
        f"({parts}), so it will probably run out of memory; {remedy}"
    )


def engine_note(config: TrainConfig, engine: EngineMemory, kv_cache: int) -> Note:
    """The prediction for an engine on GPUs."""
    tokens, size = kv_cache // max(1, engine.kv_per_token), config.engine.tensor_parallel
    where = f" on each of its {size} GPUs" if size > 1 else ""
    asleep = ""
    if (lends := config.engine.lends) is not None:
        asleep = f"; {gib(engine.asleep(lends))} while the trainer computes (engine.sleep={lends})"
    return Note(
        f"memory of an engine{where}: {gib(engine.before_kv() + kv_cache)} ({engine_parts(engine)}, "
        f"KV cache {gib(kv_cache)} for {tokens} tokens){asleep}"
    )


def rank_note(config: TrainConfig, trainer: TrainerMemory, limit: int) -> Note:
    """The prediction for a rank on a GPU, and a warning if it exceeds `limit`."""
    tokens = micro_batch_tokens(config)
    full = copies(tokens, config, config.max_sequence_tokens - config.rollout.max_prompt_tokens)
    needed, worst = trainer.total(tokens, full), trainer.total(tokens, worst_copies(tokens, config))
    short = f", up to {gib(worst)} if many completions are short" if worst > needed else ""
    text = (
        f"memory of a rank: about {gib(needed)} of {gib(limit)} at {tokens} tokens per micro-batch "
        f"({trainer.parts(tokens, full)}){short}"
    )
    if worst <= limit:
        return Note(text)
    if fitting := most_tokens(config, trainer, limit):
        setting = f"trainer.tokens_per_micro_batch={fitting}"
        remedy = f"Set {setting}, which fits at all lengths of completions, or auto, which measures"
    else:
        remedy = f"Use {_gpu_helps(config, trainer)}"
    end = "so a step may run out of memory; skylite then halves its micro-batches"
    return warning(f"{text}, {end}. {remedy}")


def _gpu_helps(config: TrainConfig, trainer: TrainerMemory, *, may_sleep: bool = False) -> str:
    """Neither more ranks nor offload leave less of a quantised base on a GPU."""
    is_new = may_sleep and config.engine.lends is None and config.why_awake is None
    sleep = ["engine.sleep=weights"] * is_new
    return _helps(config, *sleep, *(GPU_HELPS[:1] if trainer.is_quantised else GPU_HELPS))


def _helps(config: TrainConfig, *others: str) -> str:
    """Settings with which a run needs less, joined by "or"."""
    helps = ["trainer.checkpointing=full"] if config.trainer.checkpointing != "full" else []
    helps += [f"a smaller {config.source.shorter}", *others]
    return f"{', '.join(helps[:-1])} or {helps[-1]}"


def gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"
