"""Predicts the memory of trainer and engines from the shapes in the model's files.

benchmarks/memory.py compares the prediction with passes on a CPU and with fake tensors of GPU shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from skylite.config.engine import CpuLora
from skylite.config.train import TrainConfig
from skylite.engine.vllm.cpu_lora import MERGED_MEMORY
from skylite.engine.vllm.server_command import CPU_BATCHED_TOKENS
from skylite.resources.model_sizes import ModelSizes

FLOAT32 = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
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
TRAINER_PROCESS = {"cpu": 400 << 20, "cuda": 1 << 30}
"""CPU: Python and its libraries. GPU: CUDA context, NCCL, cuBLAS and fragments; an estimate, not measured."""
ENGINE_PROCESS = {"cpu": 5 << 28, "cuda": 2 << 30}
"""CPU: an engine's processes, which share their imports. GPU: with CUDA graphs; an estimate, not measured."""
TENSOR_PARALLEL_BUFFERS = 1 << 30
"""More of the process with several GPUs: NCCL and an all-reduce; an estimate, not measured."""
VLLM_BATCHED_TOKENS = {"cpu": CPU_BATCHED_TOKENS, "cuda": 8192}
"""Tokens of the engine's largest forward pass."""
LOGIT_COPIES = 3
"""float32 copies of the logits while the engine samples."""


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
    """As `kept`, per token that attention copies for another piece of a tree (attention_memory.py)."""
    work_copy: float
    """As `work`."""
    mask: int
    """Attention's mask for the longest trajectory, which all layers share."""
    head: int
    """Scratch of the LM head, or of AdamW's step with offloaded moments, while no layer is computed."""
    process: int
    keeps_freed: bool
    """Whether the allocator keeps freed blocks by their size, as TBB's does on a CPU: the blocks of the head
    and of the layers then add up."""

    def state(self) -> int:
        """Between two passes."""
        return self.weights + self.adapter + self.process

    def total(self, tokens: int, copies: int = 0) -> int:
        """At the peak of a pass of `tokens` tokens and `copies` copied ones. One trajectory has no copies."""
        kept = self.cast + self.kept * tokens + self.kept_copy * copies
        work = self.work * tokens + self.work_copy * copies
        scratch = self.head + work if self.keeps_freed else max(self.head, work)
        return int(self.state() + self.mask + kept + scratch)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Predicted bytes of one engine, on each of its GPUs."""

    weights: int
    lora_slots: int
    """max_loras slots of A and B for every adapted matrix."""
    activations: int
    process: int
    kv_per_token: int
    """0: not known."""

    def before_kv(self) -> int:
        """Everything but the KV cache."""
        return self.weights + self.lora_slots + self.activations + self.process

    def kv_cache(self, tokens: int, block_size: int, sequences: int = 1) -> int:
        """For sequences of so many tokens: each has full blocks, and an engine holds one for itself."""
        return (sequences * -(-tokens // block_size) + 1) * block_size * self.kv_per_token


def trainer_memory(
    sizes: ModelSizes, config: TrainConfig, device: Literal["cpu", "cuda"], dtype: str
) -> TrainerMemory:
    """Predict a rank's memory."""
    item = DTYPE_BYTES[dtype]
    adapters = sizes.lora + (config.critic.rank * sizes.lora_per_rank if config.algorithm.uses_critic else 0)
    offloaded = 2 * MOMENTS if config.trainer.offload else 0
    step = MOMENTS * adapters * FLOAT32 if offloaded else 0
    copy = 2 * sizes.queries * item if _calls_sdpa(config, device) else 0
    return TrainerMemory(
        weights=_weight_bytes(sizes, config, item),
        adapter=adapters * (ADAPTER_COPIES + ROLLBACK_COPIES - offloaded) * FLOAT32,
        cast=sizes.lora * item if item < FLOAT32 and config.trainer.checkpointing != "full" else 0,
        kept=_kept_bytes(sizes, config, device, item),
        work=_work_bytes(sizes, config, device, item),
        kept_copy=0 if config.trainer.checkpointing == "full" else copy * sizes.num_layers,
        work_copy=copy if config.trainer.checkpointing == "full" else 0,
        mask=config.max_sequence_tokens**2 * item if config.trainer.attention == "sdpa" else 0,
        head=max(_head_scratch(sizes, device, dtype), step),
        process=TRAINER_PROCESS[device],
        keeps_freed=device == "cpu",
    )


def engine_memory(
    sizes: ModelSizes,
    config: TrainConfig,
    device: Literal["cpu", "cuda"],
    dtype: str,
    *,
    max_loras: int,
    cpu_lora: CpuLora,
) -> EngineMemory:
    """Predict an engine's memory, on each GPU: from sharded_sizes.py's sizes if it has several."""
    item = DTYPE_BYTES[dtype]
    weights = sizes.parameters * item
    if device == "cpu" and cpu_lora == "merged":
        weights += int(MERGED_MEMORY * sizes.parameters * DTYPE_BYTES["bfloat16"])
    tokens = VLLM_BATCHED_TOKENS[device]
    activations = tokens * (2 * sizes.intermediate + 4 * sizes.hidden + _expert_buffers(sizes)) * item
    logits = config.engine.max_num_seqs * sizes.vocabulary * FLOAT32 * LOGIT_COPIES
    return EngineMemory(
        weights=weights,
        lora_slots=max_loras * config.lora.vllm_rank * sizes.slots_per_rank * item,
        activations=activations + logits,
        process=ENGINE_PROCESS[device]
        + (TENSOR_PARALLEL_BUFFERS if config.engine.tensor_parallel > 1 else 0),
        kv_per_token=(sizes.cached or 0) * item,
    )


def _weight_bytes(sizes: ModelSizes, config: TrainConfig, item: int) -> int:
    """Of a rank's shard, and of what FSDP gathers from all: two layers, and all that is outside of layers."""
    ranks, offload = config.trainer.num_ranks, config.trainer.offload
    # A float32 model is stored in bfloat16 on one rank if that loses nothing (model/bf16_weights.py).
    stored = 2 if ranks == 1 else item
    shard = 0 if offload else sizes.parameters * stored // ranks
    gathered = (2 * sizes.largest_layer + sizes.outside_layers) * item if ranks > 1 or offload else 0
    return shard + gathered


def _head_scratch(sizes: ModelSizes, device: str, dtype: str) -> int:
    """Buffers of one chunk of logits. In float32 of one block, and the widened weights of its tokens."""
    if dtype == "float32":
        block = HEAD_BUFFERS * HEAD_BLOCK_ROWS * HEAD_BLOCK_VOCAB + HEAD_BLOCK_VOCAB * sizes.hidden
        return block * FLOAT32
    return HEAD_BUFFERS * HEAD_CHUNK[device] * FLOAT32


def _expert_buffers(sizes: ModelSizes) -> int:
    """Elements per token of the two buffers of the engine's experts (TritonExperts.workspace_shapes)."""
    inner, hidden = sizes.expert_intermediate, sizes.hidden
    return sizes.experts_per_token * (max(inner, hidden) + max(2 * inner, hidden))


def _layers_bytes(sizes: ModelSizes, config: TrainConfig, device: str, item: int) -> float:
    """Bytes per token that all layers keep without checkpointing=full."""
    kept = float(sizes.kept * item + sizes.kept_float32 * FLOAT32)
    if _calls_sdpa(config, device):
        # Keys and values for each head, of all tokens and joined for each piece, and the joined outputs.
        kept += (2 * sizes.queries * 2 + sizes.queries - 2 * sizes.keys) * sizes.num_layers * item
    return kept + (sizes.recomputed * item if config.trainer.checkpointing == "none" else 0)


def _kept_bytes(sizes: ModelSizes, config: TrainConfig, device: str, item: int) -> float:
    head = HEAD_KEEPS * sizes.hidden * item
    if config.trainer.checkpointing == "full":
        return sizes.hidden * sizes.num_layers * item + head
    return _layers_bytes(sizes, config, device, item) + head


def _work_bytes(sizes: ModelSizes, config: TrainConfig, device: str, item: int) -> float:
    checkpointing = config.trainer.checkpointing
    work = float(max(MLP_BACKWARD[checkpointing] * sizes.intermediate, sizes.expert_work) * item)
    if checkpointing == "full":  # one layer's forward pass again
        work += _layers_bytes(sizes, config, device, item) / max(1, sizes.num_layers)
    return work


def _calls_sdpa(config: TrainConfig, device: str) -> bool:
    """Whether autograd keeps keys and values for each head and piece. On a CPU it keeps them once."""
    return device == "cuda" and config.trainer.attention == "sdpa"
