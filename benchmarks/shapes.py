"""Shapes of models, and random models of these shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# hidden, intermediate, layers, heads, key-value heads, vocabulary, tied LM head, from each config.json
SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 512, True),
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4, 152064, False),
    "llama3.2-1b": (2048, 8192, 16, 32, 8, 128256, True),
}


def model_config(shape: str) -> Any:
    """The transformers config of a Qwen2 model of this shape."""
    import transformers

    hidden, intermediate, layers, heads, kv_heads, vocab, tied = SHAPES[shape]
    return transformers.Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        max_position_embeddings=32768,
    )


def make_model(shape: str, folder: Path) -> None:
    """Save a Qwen2 model of this shape with random bfloat16 weights."""
    import torch
    import transformers

    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(model_config(shape), dtype=torch.bfloat16)
    model.save_pretrained(folder)
