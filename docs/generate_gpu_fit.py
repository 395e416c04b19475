"""Write "What fits" in docs/how-to/gpus.md: the memory that skylite itself predicts before a run.

    python docs/generate_gpu_fit.py        (or: make docs-reference)
    python docs/generate_gpu_fit.py --check        writes nothing, fails if the tables are stale

Nothing here runs on a GPU. The shapes are those of Qwen2.5; the sums are resources/gpu_memory_plan.py's.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from write_or_check import with_section, write_or_check

from skylite.config.resolved import MemoryPlan
from skylite.config.train import TrainConfig
from skylite.engine.model_sizes import ModelSizes, model_sizes
from skylite.engine.tensor_parallel import check_divisible
from skylite.engine.vllm.launcher import VllmLauncher
from skylite.errors import ConfigError
from skylite.processes.gpus import Gpu
from skylite.resources.gpu_memory_plan import (
    TrainerMemory,
    choose_checkpointing,
    choose_replication,
    divide_gpus,
    most_tokens,
    trainer_memory,
)
from skylite.resources.gpu_placement import GpuChoice
from skylite.rollout.plan import device_defaults

PAGE = Path(__file__).resolve().parent / "how-to" / "gpus.md"
SHAPES = {
    # hidden, MLP, layers, attention heads, key-value heads, vocabulary, tied LM head, from each config.json
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 152064, False),
    "32B": (5120, 27648, 64, 40, 8, 152064, False),
    "72B": (8192, 29568, 80, 64, 8, 152064, False),
}
GPUS = {"24 GB": 24564, "48 GB": 46068, "80 GB": 81559, "141 GB": 143771}
"""MiB as nvidia-smi lists them: RTX 4090, L40S, H100, H200."""
PROMPT, COMPLETION = 512, 1024
ENOUGH = 32
"""Sequences at once. With fewer, sampling takes most of the time."""
MANY_GPUS, MANY_MIB = (2, 4, 8), GPUS["80 GB"]
"""Of the table with several GPUs: half of them train, half sample."""
OWN_GPU_SHARE = 0.9
SHARES = (0.45, 0.35, 0.3, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85)


@dataclass(frozen=True)
class Fit:
    """The first settings with which a model fits, and what is left then."""

    settings: list[str]
    sequences: int
    """Of the longest, that vLLM can hold at once."""
    tokens: int
    """Most tokens of a micro-batch."""
    checkpointing: str
    """As skylite chooses it."""


def write_shapes(folder: Path, shape: str) -> Path:
    """FOLDER/SHAPE: a model with config.json, and a file of the right headers with a hole for the weights."""
    hidden, inner, layers, heads, key_value_heads, vocabulary, tied = SHAPES[shape]
    keys = hidden // heads * key_value_heads
    layer = {
        "input_layernorm.weight": [hidden],
        "post_attention_layernorm.weight": [hidden],
        "self_attn.q_proj.weight": [hidden, hidden],
        "self_attn.q_proj.bias": [hidden],
        "self_attn.k_proj.weight": [keys, hidden],
        "self_attn.k_proj.bias": [keys],
        "self_attn.v_proj.weight": [keys, hidden],
        "self_attn.v_proj.bias": [keys],
        "self_attn.o_proj.weight": [hidden, hidden],
        "mlp.gate_proj.weight": [inner, hidden],
        "mlp.up_proj.weight": [inner, hidden],
        "mlp.down_proj.weight": [hidden, inner],
    }
    folder = folder / shape
    folder.mkdir(exist_ok=True)
    tensors = {"model.embed_tokens.weight": [vocabulary, hidden], "model.norm.weight": [hidden]}
    tensors |= {f"model.layers.{i}.{name}": size for i in range(layers) for name, size in layer.items()}
    tensors |= {} if tied else {"lm_head.weight": [vocabulary, hidden]}
    header, end = {}, 0
    for name, size in tensors.items():
        start, end = end, end + 2 * math.prod(size)
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [start, end]}
    config = {
        "architectures": ["Qwen2ForCausalLM"], "num_attention_heads": heads, "vocab_size": vocabulary,
        "num_key_value_heads": key_value_heads, "intermediate_size": inner,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


@dataclass(frozen=True)
class Layout:
    """How many GPUs train, and how many sample. One GPU for both: 1, 1, shared."""

    ranks: int = 1
    engines: int = 1
    tensor_parallel: int = 1
    shared: bool = False

    @property
    def place(self) -> GpuChoice:
        first = 0 if self.shared else self.ranks
        engine_gpus = [first + i for i in range(self.engines * self.tensor_parallel)]
        return GpuChoice(rank_gpus=list(range(self.ranks)), engine_gpus=engine_gpus, notes=[])


def attempts(layout: Layout) -> Iterator[dict[str, dict[str, Any]]]:
    """Settings to try, the least intrusive first."""
    for offload in (False, True):
        for share in SHARES if layout.shared else (OWN_GPU_SHARE,):
            yield {
                "trainer": {"offload": offload, "num_ranks": layout.ranks},
                "engine": {
                    "gpu_memory_utilization": share,
                    "num_engines": layout.engines,
                    "tensor_parallel": layout.tensor_parallel,
                },
            }


def fit(folder: Path, mib: int, layouts: Sequence[Layout]) -> Fit | None:
    """The first settings that leave ENOUGH sequences, else those with the most; None if nothing fits."""
    few: list[Fit] = []
    tried = ((tree, layout) for layout in layouts for tree in attempts(layout))
    for found in (fit_with(folder, mib, *settings) for settings in tried):
        if found is not None and found.sequences >= ENOUGH:
            return found
        few += [found] if found is not None else []
    return max(few, key=lambda f: f.sequences, default=None)


def fit_with(folder: Path, mib: int, tree: dict[str, dict[str, Any]], layout: Layout) -> Fit | None:
    """What these settings leave; None if skylite would refuse the run."""
    lengths = {"max_prompt_tokens": PROMPT, "max_completion_tokens": COMPLETION}
    config, _ = device_defaults(TrainConfig.model_validate(tree | {"rollout": lengths}), "cuda")
    sizes = read_sizes(folder)
    count = max([*layout.place.rank_gpus, *layout.place.engine_gpus]) + 1
    gpus = {i: Gpu(i, f"GPU-{i}", "any", 9.0, mib << 20, "", False) for i in range(count)}

    def divided(settings: TrainConfig, trainer: TrainerMemory) -> MemoryPlan:
        return divide_gpus(settings, trainer, engine, layout.place, gpus)[0]

    try:
        check_divisible(folder, layout.tensor_parallel)
        engine = VllmLauncher().memory(config, folder, "cuda", "bfloat16", "auto")
        config = choose_checkpointing(config, sizes, "bfloat16", lambda *x: divided(*x).trainer_bytes)
        if layout.ranks > 1 and not config.trainer.offload:
            config = choose_replication(config, sizes, "bfloat16", lambda *x: divided(*x).trainer_bytes)
        trainer = trainer_memory(sizes, config, "cuda", "bfloat16")
        budget = divided(config, trainer)
    except ConfigError:
        return None
    assert budget.trainer_bytes is not None
    assert budget.kv_cache_bytes is not None
    held = engine.longest(budget.kv_cache_bytes) // engine.block_size
    tokens = most_tokens(config, trainer, budget.trainer_bytes + trainer.process)
    if not tokens:
        return None
    sequences = held // math.ceil((PROMPT + COMPLETION) / engine.block_size)
    return Fit(changes(config, layout.shared), sequences, tokens, config.trainer.checkpointing)


@cache
def read_sizes(folder: Path) -> ModelSizes:
    return model_sizes(folder, TrainConfig().lora)


def changes(config: TrainConfig, shared: bool) -> list[str]:
    """The settings that differ from their defaults, as for --set. The tables' titles name OWN_GPU_SHARE."""
    default = TrainConfig()
    share = default.engine.gpu_memory_utilization if shared else OWN_GPU_SHARE
    texts = {
        "trainer.num_ranks": (config.trainer.num_ranks, default.trainer.num_ranks),
        "engine.num_engines": (config.engine.num_engines, default.engine.num_engines),
        "engine.tensor_parallel": (config.engine.tensor_parallel, default.engine.tensor_parallel),
        "engine.gpu_memory_utilization": (config.engine.gpu_memory_utilization, share),
        "trainer.offload": (config.trainer.offload, default.trainer.offload),
    }
    return [f"{name}={str(now).lower()}" for name, (now, before) in texts.items() if now != before]


def halves(count: int) -> list[Layout]:
    """Half of the GPUs train. The others sample: as many engines as possible first, then fewer, divided."""
    half = count // 2
    sizes = [2**k for k in range(half.bit_length()) if half % 2**k == 0]
    return [Layout(half, half // size, size) for size in sizes]


def cell(found: Fit | None) -> str:
    if found is None:
        return "no"
    settings = "<br>".join(f"`{text}`" for text in found.settings) or "defaults"
    few = " (few)" if found.sequences < ENOUGH else ""
    return f"{settings}<br>{found.sequences} sequences{few}, {found.tokens:,} tokens, {found.checkpointing}"


def tables() -> str:
    """The three tables."""
    share = f"`engine.gpu_memory_utilization={OWN_GPU_SHARE}`"
    with tempfile.TemporaryDirectory() as text:
        folders = {shape: write_shapes(Path(text), shape) for shape in SHAPES}
        several = {f"{n} GPUs": (MANY_MIB, halves(n)) for n in MANY_GPUS}
        one = {name: (mib, [Layout(shared=True)]) for name, mib in GPUS.items()}
        two = {name: (mib, [Layout()]) for name, mib in GPUS.items() if mib != MANY_MIB}
        parts = [
            "One GPU for both:", table(folders, one),
            f"GPUs of 80 GB, half of them for the trainer and half for vLLM, with {share}:",
            table(folders, several),
            f"Two GPUs of other sizes, one for each, with {share}:", table(folders, two),
        ]  # fmt: skip
    return "\n\n".join(parts)


def table(folders: dict[str, Path], columns: dict[str, tuple[int, list[Layout]]]) -> str:
    head = f"| model | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}"
    rows = [
        f"| {shape} | {' | '.join(cell(fit(folder, mib, layouts)) for mib, layouts in columns.values())} |"
        for shape, folder in folders.items()
    ]
    return "\n".join([head, *rows])


def pages() -> dict[Path, str]:
    """gpus.md -> its text with new tables."""
    return with_section(PAGE, "what-fits", tables())


if __name__ == "__main__":
    write_or_check(pages(), __doc__)
