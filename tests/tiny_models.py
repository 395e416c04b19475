"""Tiny random models, made when needed: real transformers architectures with hidden size 64, no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "mistral")
OTHER_FAMILIES = ("gemma3", "qwen3_moe", "mixtral", "deepseek_v3", "phi3", "gpt_neox")
"""Also known to `tiny_config`: windows, experts, latent attention, fused projections."""
WRAPPERS = ("gemma3_vl", "qwen3_5_vl", "qwen3_vl", "qwen2_5_vl")
"""Also known to `tiny_config`: a text model beside a tower that reads pictures."""
READS_IMAGES = ("qwen3_vl", "qwen2_5_vl")
"""WRAPPERS with an image processor, and a tokenizer and a chat template that know images."""
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
"""One token a byte (ids 0 to 255), then the special tokens."""
EOS_TOKEN = "<|im_end|>"
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Special tokens after SPECIAL_TOKENS, of READS_IMAGES alone."""
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "gemma3": {"sliding_window": 8, "query_pre_attn_scalar": 32},  # shorter than a test's sequences
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 2.0},
    "qwen2_sliding": {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    "phimoe": {"sliding_window": 8, "num_local_experts": 4},
    "cohere2": {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    },
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {
        "attention_chunk_size": 8, "no_rope_layers": [1, 0], "interleave_moe_layer_step": 1,
        "num_local_experts": 4, "intermediate_size_mlp": 128,
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention"], "block_multiple_of": 32, "block_auto_adjust_ff_dim": False,
        "block_dim": 64, "conv_dim": 64,
    },
    "qwen3_5": {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
    },
    "qwen3_vl_text": {
        "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True},
    },
    "qwen2_5_vl_text": {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 6, 6]}},
    "deepseek_v3": {
        "num_key_value_heads": 2, "head_dim": 8, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 32, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    },
}  # fmt: skip
IMAGE_TOKEN, VIDEO_TOKEN = VOCAB_SIZE + 2, VOCAB_SIZE + 3
"""Of READS_IMAGES."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IMAGE_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ message['content'] }}",
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}",
)


def make_tiny_model(folder: Path, family: str = "llama", seed: int = 0) -> Path:
    """A random float32 model of `family` (see FAMILIES) with its tokenizer, saved in `folder`, which is
    returned.

    Two layers, hidden size 64, two heads of 32 (the smallest that vLLM's CPU attention takes), one KV head.
    The weights are larger than usual (std 0.1), so that the distributions differ clearly from uniform and
    from prompt to prompt.
    """
    import torch

    from skylite.hub.text_model import auto_class

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer(reads_images=family in READS_IMAGES)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = tiny_config(family)
        model = auto_class(config).from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if family in READS_IMAGES:
        _save_image_processor(folder, config)
    return folder


def tiny_config(family: str) -> Any:
    """The transformers config of a tiny model. Some tie their embeddings, as their families do."""
    import transformers

    if family in WRAPPERS:
        return _wrapper_config(family)
    classes = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen2_sliding": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "gemma": transformers.GemmaConfig,
        "gemma2": transformers.Gemma2Config,
        "gemma3": transformers.Gemma3TextConfig,
        "mistral": transformers.MistralConfig,
        "qwen3_moe": transformers.Qwen3MoeConfig,
        "mixtral": transformers.MixtralConfig,
        "deepseek_v3": transformers.DeepseekV3Config,
        "phi3": transformers.Phi3Config,
        "gpt_neox": transformers.GPTNeoXConfig,
        "cohere2": transformers.Cohere2Config,
        "qwen2_moe": transformers.Qwen2MoeConfig,
        "gpt_oss": transformers.GptOssConfig,
        "llama4_text": transformers.Llama4TextConfig,
        "jamba": transformers.JambaConfig,
        "lfm2": transformers.Lfm2Config,
        "phimoe": transformers.PhimoeConfig,
        "qwen3_5": transformers.Qwen3_5TextConfig,
        "qwen3_vl_text": transformers.Qwen3VLTextConfig,
        "qwen2_5_vl_text": transformers.Qwen2_5_VLTextConfig,
    }
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,
        "tie_word_embeddings": family in ("qwen2", "gemma", "cohere2", "lfm2"),
        "bos_token_id": None,
        "eos_token_id": _special_id(EOS_TOKEN),
        "pad_token_id": _special_id("<|pad|>"),
    }
    return classes[family](**common | OWN_SETTINGS.get(family, {}))


def _wrapper_config(family: str) -> Any:
    """A text model of `tiny_config` with a small tower."""
    import transformers

    vision: dict[str, Any]
    if family == "gemma3_vl":
        vision = {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 16, "patch_size": 4,
        }  # fmt: skip
        return transformers.Gemma3Config(
            text_config=tiny_config("gemma3").to_dict() | {"tie_word_embeddings": True},
            vision_config=vision,
            mm_tokens_per_image=4,
            image_token_index=255,
            boi_token_index=253,
            eoi_token_index=254,
            eos_token_id=_special_id(EOS_TOKEN),
        )
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
        "patch_size": 4, "initializer_range": 0.2,
    }  # fmt: skip
    deepstack = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    text, cls, own = {
        "qwen3_5_vl": ("qwen3_5", transformers.Qwen3_5Config, deepstack | {"deepstack_visual_indexes": []}),
        "qwen3_vl": ("qwen3_vl_text", transformers.Qwen3VLConfig, deepstack),
        "qwen2_5_vl": (
            "qwen2_5_vl_text", transformers.Qwen2_5_VLConfig,
            {"window_size": 16, "fullatt_block_indexes": [1]},
        ),
    }[family]  # fmt: skip
    ids = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    vocabulary = {"vocab_size": VOCAB_SIZE + len(ids)} if family in READS_IMAGES else {}
    return cls(
        text_config=tiny_config(text).to_dict() | vocabulary,
        vision_config=vision | own,
        **{name: VOCAB_SIZE + i for i, name in enumerate(ids)} if vocabulary else {},
    )


def _save_image_processor(folder: Path, config: Any) -> None:
    """As the published models have it, with smaller patches and images."""
    vision = config.vision_config
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": vision.patch_size,
        "merge_size": vision.spatial_merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "size": {"shortest_edge": 64, "longest_edge": 1024},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")


def tiny_tokenizer(*, reads_images: bool = False) -> Any:
    """A tokenizer with one token a byte and a ChatML chat template; every text encodes and decodes without
    loss.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL_TOKENS, *(VISION_TOKENS if reads_images else ())])
    names = {"eos_token": EOS_TOKEN, "pad_token": "<|pad|>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=IMAGE_TEMPLATE if reads_images else CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        **names,
    )


def _special_id(token: str) -> int:
    return 256 + SPECIAL_TOKENS.index(token)
