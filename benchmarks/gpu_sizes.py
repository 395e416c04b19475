"""Shapes of models, and sizes of the training steps of `make gpu-check` with their random rollouts."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skylite.types import Group


SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 512, True),
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4, 152064, False),
    "llama3.2-1b": (2048, 8192, 16, 32, 8, 128256, True),
}
"""Hidden, intermediate, layers, heads, key-value heads, vocabulary, tied LM head, from each config.json."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """A step. Completion lengths are log-normal: most are short, some reach the longest."""

    prompts: int
    group_size: int
    prompt: int
    median: int
    longest: int
    budget: int
    vocab: int


REAL = Sizes(prompts=8, group_size=8, prompt=256, median=400, longest=2048, budget=16384, vocab=20000)
TINY = Sizes(prompts=2, group_size=2, prompt=8, median=8, longest=20, budget=256, vocab=500)
BUDGETS = {"qwen2.5-7b": 8192, "qwen2.5-0.5b": 65536}
"""By shape: less where 80 GB do not hold REAL's, more where the GPU would wait for the host."""


def sizes_of(shape: str, dry_run: bool) -> tuple[str, Sizes]:
    """The shape to build, and its steps."""
    return ("tiny", TINY) if dry_run else (shape, replace(REAL, budget=BUDGETS.get(shape, REAL.budget)))


def varied_groups(sizes: Sizes, seed: int) -> list[Group]:
    """Groups of random tokens with varied lengths. One trajectory of each group has reward 1."""
    from tests.rows import Row, groups_of

    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(sizes.vocab) for _ in range(count)]

    rows = []
    for group in range(sizes.prompts):
        prompt = tokens(max(1, round(sizes.prompt * rng.uniform(0.5, 1.5))))
        for index in range(sizes.group_size):
            length = min(sizes.longest, max(1, round(sizes.median * rng.lognormvariate(0, 0.7))))
            row = Row(
                group=group,
                prompt_token_ids=prompt,
                completion_token_ids=tokens(length),
                sampling_logprobs=[-10.0] * length,
                reward=float(index == 0),
            )
            rows.append(row)
    return groups_of(rows)


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


def make_model(shape: str, folder: Path) -> Path:
    """Save a Qwen2 model of this shape with random bfloat16 weights and a tokenizer, and return the folder.

    The tokenizer has a token for each byte, and names for all other ids: vLLM must decode what is sampled.
    """
    import torch
    import transformers

    from tests.tiny_models import tiny_tokenizer

    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(model_config(shape), dtype=torch.bfloat16)
    tokenizer = tiny_tokenizer()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    del model  # leaves the GPU to the run: this process does not end yet
    torch.cuda.empty_cache()
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    names = data["model"]["vocab"]
    names |= {token["content"]: token["id"] for token in data["added_tokens"]}
    names |= {f"<{i}>": i for i in range(len(tokenizer), SHAPES[shape][5])}
    path.write_text(json.dumps(data), encoding="utf-8")
    return folder
