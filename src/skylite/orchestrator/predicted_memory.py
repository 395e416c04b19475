"""Predicts the memory of trainer and engines from the shapes in the model's files.

benchmarks/memory.py compares the prediction with passes on a CPU and with fake tensors of GPU shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from skylite.adapters.target_modules import predict_modules
from skylite.config.engine import CpuLora
from skylite.config.lora import LoraConfig
from skylite.config.train import TrainConfig
from skylite.engine.cpu_lora import MERGED_MEMORY
from skylite.engine.server_command import CPU_BATCHED_TOKENS
from skylite.hub.resolve import tensor_shapes

FLOAT32 = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
ADAPTER_COPIES = 4
"""float32 copies of each trained parameter: itself, its gradient and AdamW's two moments."""
ROLLBACK_COPIES = 3
"""More copies during an update (trainer/anomaly.py): parameter and moments as they were before."""
HEAD_SCRATCH = {"cpu": 4 * FLOAT32 * (1 << 22), "cuda": 4 * FLOAT32 * (1 << 26)}
"""Four float32 buffers of the chunks in model/chunked_logprobs.py."""
MLP_BACKWARD = {"none": 8, "selective": 9, "full": 9}
"""Tensors of the MLP's inner size that its backward pass holds besides the kept ones, by checkpointing."""
HEAD_KEEPS = 3
"""Tensors of the hidden size that the last norm and the head keep."""
TRAINER_PROCESS = {"cpu": 400 << 20, "cuda": 1 << 30}
"""CPU: Python and its libraries. GPU: CUDA context, NCCL, cuBLAS and fragments; an estimate, not measured."""
ENGINE_PROCESS = {"cpu": 3 << 29, "cuda": 2 << 30}
"""CPU: vLLM's three processes. GPU: with CUDA graphs; an estimate, not measured."""
VLLM_BATCHED_TOKENS = {"cpu": CPU_BATCHED_TOKENS, "cuda": 8192}
"""Tokens of vLLM's largest forward pass."""
LOGIT_COPIES = 3
"""float32 copies of the logits while vLLM samples."""
Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What memory depends on. Counts of elements."""

    parameters: int
    largest_layer: int
    vocabulary: int
    hidden: int
    intermediate: int
    num_layers: int
    lora: int
    """Parameters of an adapter of the run's rank."""
    lora_per_rank: int
    """The same of rank 1."""
    kept: int
    """Elements per token that a forward pass keeps over all layers, if norms and activations are recomputed
    (trainer.checkpointing=selective)."""
    recomputed: int
    """Elements per token that checkpointing=none keeps in addition."""
    kept_float32: int
    """float32 elements per token: scales of norms, normalizers of attention."""
    queries: int
    """Elements per token of one layer's queries."""
    keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Predicted bytes of one rank."""

    weights: int
    adapter: int
    """Parameters, gradients, moments, and the copies during an update."""
    kept: float
    """Per token of a micro-batch, from its forward pass to its backward pass."""
    work: float
    """Per token, while backward computes one layer."""
    head: int
    """Scratch of the LM head, while no layer is computed."""
    process: int

    def state(self) -> int:
        """Between two passes."""
        return self.weights + self.adapter + self.process

    def total(self, tokens: int) -> int:
        """At the peak of a pass of `tokens` tokens."""
        return int(self.state() + self.kept * tokens + max(self.head, self.work * tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Predicted bytes of one vLLM server."""

    weights: int
    lora_slots: int
    """max_loras slots of A and B for every adapted matrix: vLLM's create_lora_weights."""
    activations: int
    process: int
    kv_per_token: int

    def before_kv(self) -> int:
        """Everything but the KV cache."""
        return self.weights + self.lora_slots + self.activations + self.process


def model_sizes(model_path: Path, lora: LoraConfig) -> ModelSizes:
    """Read the shapes in the weight files' headers. Raises ModelError for a damaged file."""
    shapes = tensor_shapes(model_path)
    _, adapted = predict_modules(model_path, lora)
    layers = _by_layer(shapes)
    prefix, first = next(iter(layers.items()), ("", {}))
    per_rank = sum(sum(shape) for name, shape in shapes.items() if name.removesuffix(".weight") in adapted)
    modules = sum(1 for name in first if f"{prefix}{name}".removesuffix(".weight") in adapted)
    vocabulary, hidden = next((s for n, s in shapes.items() if "embed" in n and len(s) == 2), (1, 1))
    kept, recomputed, kept_float32 = _kept_by_layer(first, hidden, lora.rank * modules)
    return ModelSizes(
        parameters=_elements(shapes),
        largest_layer=max(map(_elements, layers.values()), default=0),
        vocabulary=vocabulary,
        hidden=hidden,
        intermediate=_output(first, "gate_proj", "up_proj", "fc1", "w1"),
        num_layers=len(layers),
        lora=lora.rank * per_rank,
        lora_per_rank=per_rank,
        kept=kept * len(layers),
        recomputed=recomputed * len(layers),
        kept_float32=kept_float32 * len(layers),
        queries=_output(first, "q_proj"),
        keys=_output(first, "k_proj"),
    )


def trainer_memory(
    sizes: ModelSizes, config: TrainConfig, device: Literal["cpu", "cuda"], dtype: str
) -> TrainerMemory:
    """Predict a rank's memory."""
    item, ranks = DTYPE_BYTES[dtype], config.trainer.num_ranks
    # A float32 model is stored in bfloat16 on one rank if that loses nothing (model/bf16_weights.py).
    stored = 2 if ranks == 1 else item
    weights = sizes.parameters * stored // ranks
    if ranks > 1:  # FSDP gathers two layers, and the root's embedding and head
        weights += (2 * sizes.largest_layer + sizes.vocabulary * sizes.hidden) * item
    adapters = sizes.lora + (config.critic.rank * sizes.lora_per_rank if config.algorithm.uses_critic else 0)
    copies = ADAPTER_COPIES + ROLLBACK_COPIES
    return TrainerMemory(
        weights=0 if config.trainer.offload else weights,
        adapter=adapters * copies * FLOAT32,
        kept=_kept_bytes(sizes, config, device, item),
        work=_work_bytes(sizes, config, device, item),
        head=HEAD_SCRATCH[device],
        process=TRAINER_PROCESS[device],
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
    """Predict an engine's memory."""
    item = DTYPE_BYTES[dtype]
    weights = sizes.parameters * item
    if device == "cpu" and cpu_lora == "merged":
        weights += int(MERGED_MEMORY * sizes.parameters * DTYPE_BYTES["bfloat16"])
    tokens = VLLM_BATCHED_TOKENS[device]
    activations = tokens * (2 * sizes.intermediate + 4 * sizes.hidden) * item
    logits = config.engine.max_num_seqs * sizes.vocabulary * FLOAT32 * LOGIT_COPIES
    return EngineMemory(
        weights=weights,
        lora_slots=max_loras * config.lora.vllm_rank * sizes.lora_per_rank * item,
        activations=activations + logits,
        process=ENGINE_PROCESS[device],
        kv_per_token=2 * sizes.keys * sizes.num_layers * item,
    )


def _layers_bytes(sizes: ModelSizes, config: TrainConfig, device: str, item: int) -> float:
    """Bytes per token that all layers keep without checkpointing=full."""
    kept = float(sizes.kept * item + sizes.kept_float32 * FLOAT32)
    if device == "cuda" and config.trainer.attention == "sdpa":
        kept += _piece_copies(sizes, config) * sizes.num_layers * item
    return kept + (sizes.recomputed * item if config.trainer.checkpointing == "none" else 0)


def _kept_bytes(sizes: ModelSizes, config: TrainConfig, device: str, item: int) -> float:
    head = HEAD_KEEPS * sizes.hidden * item
    if config.trainer.checkpointing == "full":
        return sizes.hidden * sizes.num_layers * item + head
    return _layers_bytes(sizes, config, device, item) + head


def _work_bytes(sizes: ModelSizes, config: TrainConfig, device: str, item: int) -> float:
    checkpointing = config.trainer.checkpointing
    work = float(MLP_BACKWARD[checkpointing] * sizes.intermediate * item)
    if checkpointing == "full":  # one layer's forward pass again
        work += _layers_bytes(sizes, config, device, item) / max(1, sizes.num_layers)
    return work


def _piece_copies(sizes: ModelSizes, config: TrainConfig) -> float:
    """Elements that one call of attention for each piece of a tree keeps: keys and values for each head.

    The keys of a prompt are copied for each completion.
    """
    rollout = config.rollout
    visible = 1 + rollout.max_prompt_tokens / max(1, rollout.max_completion_tokens)
    return 2 * sizes.queries * (1 + visible) + sizes.queries - 2 * sizes.keys


def _kept_by_layer(layer: Shapes, hidden: int, shrunk: int) -> tuple[int, int, int]:
    """(kept, recomputed, float32) elements per token of one layer, see ModelSizes.

    model/fused_ops.py, lora_linear.py and tree_attention.py save: each norm's input and scale, queries, keys,
    values and attention's output, gate and up, and x A^T of each LoRA layer.
    """
    queries, keys, values = (_output(layer, name) for name in ("q_proj", "k_proj", "v_proj"))
    gate, up = _output(layer, "gate_proj"), _output(layer, "up_proj")
    norms = [name for name, shape in layer.items() if len(shape) == 1 and "norm" in name]
    head_norms = {"q_norm": queries, "k_norm": keys}
    norm_inputs = sum(
        next((size for mark, size in head_norms.items() if mark in name), hidden) for name in norms
    )
    head_size = next((shape[0] for name, shape in layer.items() if "q_norm" in name), 64)
    kept = norm_inputs + 2 * queries + keys + values + gate + up + shrunk
    return kept, 2 * hidden + gate, len(norms) + queries // head_size


def _by_layer(shapes: Shapes) -> dict[str, dict[str, Sequence[int]]]:
    """Tensors by layer prefix (`model.layers.3.`), named below it."""
    found: dict[str, dict[str, Sequence[int]]] = {}
    for name, shape in shapes.items():
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if number is not None:
            prefix, rest = ".".join(parts[: number + 1]) + ".", ".".join(parts[number + 1 :])
            found.setdefault(prefix, {})[rest] = shape
    return found


def _output(layer: Shapes, *names: str) -> int:
    """Output size of the first linear layer that has one of these names; 0 if there is none."""
    for name in names:
        for key, shape in layer.items():
            if key.endswith(f"{name}.weight") and len(shape) == 2:
                return shape[0]
    return 0


def _elements(tensors: Shapes) -> int:
    """Elements of all tensors together."""
    return sum(math.prod(shape) for shape in tensors.values())
