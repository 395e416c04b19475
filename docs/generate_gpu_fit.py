"""Write "What fits" in docs/how-to/gpus.md: what `skylite plan` prints for Qwen2.5's sizes.

    python docs/generate_gpu_fit.py        (or: make docs-reference)
    python docs/generate_gpu_fit.py --check        writes nothing, fails if the table is stale

Nothing here runs on a GPU.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from write_or_check import with_section, write_or_check

from skylite.cli.plan import checked_setup, on_machines, plan_config
from skylite.config.provenance import NOTHING_TYPED
from skylite.errors import DoesNotFit
from skylite.hub.outline import write_headers
from skylite.resources.gpu_fit import best_fit, described_machines

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
TOKENS = 2048
GPUS = ("1x24", "1x80", "1x141", "2x80", "4x48", "8x80", "2x8x80")
"""As for --gpus."""


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
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads, "vocab_size": vocabulary, "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    write_headers(folder, tensors)
    return folder


def cell(model: Path, gpus: str) -> str:
    """What `skylite plan --model MODEL --gpus GPUS --tokens TOKENS` says."""
    config, lengths = plan_config(None, NOTHING_TYPED, TOKENS)
    hosts, each = described_machines(gpus)
    config, _ = on_machines(config, lengths, hosts)
    found = best_fit(config, checked_setup(config, model), each)
    if isinstance(found, DoesNotFit):
        return "no"
    settings = [f"`{name}={json.dumps(value)}`" for name, value in found.settings.items()] or ["defaults"]
    few = " (few)" if found.is_slow else ""
    left = f"{found.sequences} sequences{few}, {found.tokens:,} tokens, {found.config.trainer.checkpointing}"
    return "<br>".join([found.placement.kind, *settings, left])


def table() -> str:
    """A row for each size."""
    rows = [f"| model | {' | '.join(GPUS)} |", f"|---|{'---|' * len(GPUS)}"]
    with tempfile.TemporaryDirectory() as folder:
        for shape in SHAPES:
            model = write_shapes(Path(folder), shape)
            rows.append(f"| {shape} | {' | '.join(cell(model, gpus) for gpus in GPUS)} |")
    return "\n".join(rows)


def pages() -> dict[Path, str]:
    """gpus.md -> its text with a new table."""
    return with_section(PAGE, "what-fits", table())


if __name__ == "__main__":
    write_or_check(pages(), __doc__)
