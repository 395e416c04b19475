"""Write "What fits" in docs/how-to/gpus.md: the memory that skylite itself predicts before a run.

    python docs/generate_gpu_fit.py        (or: make docs-reference)
    python docs/generate_gpu_fit.py --check        writes nothing, fails if the tables are stale

Nothing here runs on a GPU. The shapes are those of Qwen2.5; the sums are resources/memory_plan.py's.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from write_or_check import write_or_check

from skylite.config.train import TrainConfig
from skylite.engine.start_engines import MAX_LORAS
from skylite.errors import ConfigError
from skylite.processes.gpus import Gpu
from skylite.resources.gpu_plan import Placement
from skylite.resources.memory_messages import most_tokens
from skylite.resources.memory_plan import GPU_BLOCK_SIZE, divide_gpus
from skylite.resources.model_sizes import ModelSizes, model_sizes
from skylite.resources.predicted_memory import engine_memory, trainer_memory

PAGE = Path(__file__).resolve().parent / "how-to" / "gpus.md"
BEGIN, END = "<!-- what-fits: begin -->", "<!-- what-fits: end -->"
SHAPES = {
    # hidden, MLP, layers, key-value size, vocabulary, tied LM head, from each config.json
    "0.5B": (896, 4864, 24, 128, 151936, True),
    "1.5B": (1536, 8960, 28, 256, 151936, True),
    "3B": (2048, 11008, 36, 256, 151936, True),
    "7B": (3584, 18944, 28, 512, 152064, False),
    "14B": (5120, 13824, 48, 1024, 152064, False),
    "32B": (5120, 27648, 64, 1024, 152064, False),
}
GPUS = {"24 GB": 24564, "48 GB": 46068, "80 GB": 81559, "141 GB": 143771}
"""MiB as nvidia-smi lists them: RTX 4090, L40S, H100, H200."""
PROMPT, COMPLETION = 512, 1024
ENOUGH = 32
"""Sequences at once. With fewer, sampling takes most of the time."""
TWO_GPUS_SHARE = 0.9
SHARES = (0.45, 0.35, 0.3, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85)


@dataclass(frozen=True)
class Fit:
    """The first settings with which a model fits, and what is left then."""

    settings: list[str]
    sequences: int
    """Of the longest, that vLLM can hold at once."""
    tokens: int
    """Most tokens of a micro-batch."""


def write_shapes(folder: Path, shape: str) -> Path:
    """A model folder with config.json and a file of the right headers and a hole in place of the weights."""
    hidden, inner, layers, keys, vocabulary, tied = SHAPES[shape]
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
    tensors = {"model.embed_tokens.weight": [vocabulary, hidden], "model.norm.weight": [hidden]}
    tensors |= {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()}
    tensors |= {} if tied else {"lm_head.weight": [vocabulary, hidden]}
    header, end = {}, 0
    for name, sizes in tensors.items():
        start, end = end, end + 2 * math.prod(sizes)
        header[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [start, end]}
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"]}))
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def attempts(two_gpus: bool) -> Iterator[dict[str, dict[str, object]]]:
    """Settings to try, the least intrusive first."""
    shares = (TWO_GPUS_SHARE,) if two_gpus else SHARES
    for offload in (False, True):
        for share in shares:
            for checkpointing in ("selective", "full"):
                yield {
                    "trainer": {"checkpointing": checkpointing, "offload": offload},
                    "engine": {"gpu_memory_utilization": share},
                }


def fit(sizes: ModelSizes, mib: int, *, two_gpus: bool) -> Fit | None:
    """The first settings that leave ENOUGH sequences, else those with the most; None if nothing fits."""
    found = [result for tree in attempts(two_gpus) if (result := fit_with(sizes, mib, tree, two_gpus))]
    return next(
        (r for r in found if r.sequences >= ENOUGH), max(found, key=lambda r: r.sequences, default=None)
    )


def fit_with(sizes: ModelSizes, mib: int, tree: dict[str, dict[str, object]], two_gpus: bool) -> Fit | None:
    """What these settings leave; None if skylite would refuse the run."""
    lengths = {"max_prompt_tokens": PROMPT, "max_completion_tokens": COMPLETION}
    config = TrainConfig.model_validate(tree | {"rollout": lengths})
    trainer = trainer_memory(sizes, config, "cuda", "bfloat16")
    engine = engine_memory(sizes, config, "cuda", "bfloat16", max_loras=MAX_LORAS, cpu_lora="auto")
    gpus = {i: Gpu(i, f"GPU-{i}", "any", 9.0, mib << 20, "", False) for i in range(2 if two_gpus else 1)}
    place = Placement(rank_gpus=[0], engine_gpus=[1 if two_gpus else 0], notes=[])
    try:
        budget = divide_gpus(config, trainer, engine, place, gpus)
    except ConfigError:
        return None
    assert budget.trainer_bytes is not None
    assert budget.kv_cache_bytes is not None
    limit = budget.trainer_bytes + trainer.process
    blocks = budget.kv_cache_bytes // (GPU_BLOCK_SIZE * engine.kv_per_token) - 1
    tokens = most_tokens(config, trainer, limit)
    if not tokens:
        return None
    settings = changes(config, two_gpus)
    if tokens < config.trainer.tokens_per_micro_batch:
        settings.append(f"trainer.tokens_per_micro_batch={tokens}")
    return Fit(settings, blocks // math.ceil((PROMPT + COMPLETION) / GPU_BLOCK_SIZE), tokens)


def changes(config: TrainConfig, two_gpus: bool) -> list[str]:
    """The settings that differ from their defaults, as for --set. The tables' titles name TWO_GPUS_SHARE."""
    default = TrainConfig()
    share = TWO_GPUS_SHARE if two_gpus else default.engine.gpu_memory_utilization
    texts = {
        "trainer.checkpointing": (config.trainer.checkpointing, default.trainer.checkpointing),
        "engine.gpu_memory_utilization": (config.engine.gpu_memory_utilization, share),
        "trainer.offload": (config.trainer.offload, default.trainer.offload),
    }
    return [f"{name}={str(now).lower()}" for name, (now, before) in texts.items() if now != before]


def cell(found: Fit | None) -> str:
    if found is None:
        return "no"
    settings = "<br>".join(f"`{text}`" for text in found.settings) or "defaults"
    few = " (few)" if found.sequences < ENOUGH else ""
    return f"{settings}<br>{found.sequences} sequences{few}, {found.tokens:,} tokens"


def tables() -> str:
    """Both tables."""
    with tempfile.TemporaryDirectory() as text:
        lora = TrainConfig().lora
        sizes = {shape: model_sizes(write_shapes(Path(text), shape), lora) for shape in SHAPES}
    head = f"| model | {' | '.join(GPUS)} |\n|---|{'---|' * len(GPUS)}"
    parts = []
    share = f"`engine.gpu_memory_utilization={TWO_GPUS_SHARE}`"
    titles = {
        "One GPU for both:": False,
        f"Two GPUs, one for the trainer and one for vLLM, with {share}:": True,
    }
    for title, two in titles.items():
        rows = [
            f"| {shape} | {' | '.join(cell(fit(sizes[shape], mib, two_gpus=two)) for mib in GPUS.values())} |"
            for shape in SHAPES
        ]
        parts += [title, "", head, *rows, ""]
    return "\n".join(parts).rstrip()


def pages() -> dict[Path, str]:
    """gpus.md -> its text with new tables."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    return {PAGE: f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"}


if __name__ == "__main__":
    write_or_check(pages(), __doc__)
