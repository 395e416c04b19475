"""A tiny random model of any family of transformers: its own default settings, with small sizes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.tiny_models import VOCAB_SIZE, tiny_tokenizer

LAYERS, HIDDEN, INNER, HEADS, HEAD, EXPERTS, WINDOW = 4, 64, 96, 4, 16, 4, 16
BY_SIZE = (
    (HIDDEN, "hidden_size d_model n_embd embedding_dim embedding_size word_embed_proj_dim lru_width "
     "input_embedding_size output_embedding_size emb_dim ple_embed_dim hidden_size_per_layer_input"),
    (HIDDEN, "embed_dim out_hidden_size projection_dim text_hidden_size vision_feature_dim"),
    (2 * HIDDEN, "attention_hidden_size mamba_d_ssm"),
    (INNER, "intermediate_size ffn_dim d_inner n_inner dff dim_ff encoder_ffn_dim decoder_ffn_dim "
     "feed_forward_size ffn_hidden_size dense_intermediate_size prefix_dense_intermediate_size "
     "intermediate_size_mlp shared_intermediate_size"),
    (INNER // 2, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
     "moe_shared_expert_intermediate_size router_hidden_size"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers num_blocks num_decoder_layers"),
    (1, "encoder_layers num_encoder_layers first_k_dense_replace num_dense_layers depth n_group topk_group "
     "num_expert_group mamba_n_groups n_groups mamba_ngroups max_window_layers"),
    (HEADS, "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
     "num_decoder_attention_heads num_encoder_attention_heads linear_num_heads linear_num_value_heads"),
    (2, "num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_k moe_topk "
     "top_k_experts linear_num_key_heads index_n_heads indexer_n_heads num_random_blocks"),
    (HEAD, "head_dim global_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim "
     "index_head_dim v_head_dim indexer_head_dim kv_channels qk_nope_head_dim mamba_d_head "
     "mamba_head_dim mamba_headdim dim_head attention_head_size q_lora_rank kv_lora_rank "
     "o_lora_rank adapter_rank laurel_rank gated_norm_rank hc_lowrank mamba_dt_rank "
     "time_step_rank mamba_d_state ssm_state_size state_size"),
    (HEAD // 2, "qk_rope_head_dim rotary_dim mamba_n_heads mamba_num_heads n_mamba_heads"),
    (HEAD + HEAD // 2, "qk_head_dim"),
    (WINDOW, "sliding_window attention_chunk_size attention_window_size window_size sliding_window_size "
     "local_attention chunk_size mamba_chunk_size block_size"),
    (EXPERTS, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (VOCAB_SIZE, "vocab_size vocab_size_per_layer_input decoder_vocab_size"),
    (32, "image_size"),
    (8, "patch_size"),
    (512, "max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions"),
)  # fmt: skip
SIZES: dict[str, Any] = {name: size for size, names in BY_SIZE for name in names.split()} | {
    "pad_token_id": VOCAB_SIZE - 1,
    "bos_token_id": VOCAB_SIZE - 4,
    "eos_token_id": VOCAB_SIZE - 2,
    "decoder_start_token_id": VOCAB_SIZE - 2,
    "initializer_range": 0.1,
    "use_cache": True,
    "use_sliding_window": True,
    "attention_multiplier": 0.25,
    "image_token_id": VOCAB_SIZE - 5,
    "image_token_index": VOCAB_SIZE - 5,
    "video_token_id": VOCAB_SIZE - 6,
    "video_token_index": VOCAB_SIZE - 6,
    "audio_token_id": VOCAB_SIZE - 7,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32, "embed_dim": 32, "d_model": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "depth": 2,
    "num_attention_heads": 2, "num_heads": 2, "encoder_layers": 2, "encoder_attention_heads": 2,
}  # fmt: skip
"""Other sizes for towers: skylite finds the text model by its size."""
KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "attn_layers")
"""Settings with a word for each layer."""
ROPE = {"rope_type": "default", "rope_theta": 1e4}
OWN: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4]},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "emu3": {"vocabulary_map": {"<image>": 5}},
    "cosmos3_edge_text": {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [INNER // 2, INNER // 2],
        "rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]},
    },
    "hunyuan_vl_text": {"head_dim": HEAD, "rope_parameters": {**ROPE, "mrope_section": [2, 2, 2, 2]}},
    "glm4v_text": {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
    "glm4v_moe_text": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
    "glm_ocr_text": {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "intermediate_size": [INNER] * LAYERS,
        "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "hunyuan_v1_dense": {"head_dim": HEAD}, "hunyuan_v1_moe": {"head_dim": HEAD},
    "inkling_text": {
        "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": 2, "swa_head_dim": HEAD, "d_rel": 8,
        "rel_extent": 64,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": HEAD},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": HEAD, "indexer_budget": WINDOW,
        "indexer_compress_ratio": 4, "ngram_vocab_size_base": 64, "split_ngram_parts": 1,
    },
    "paddleocr_vl_text": {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
    "qwen2_vl_text": {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
    "qwen2_5_vl_text": {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
    "qwen2_5_omni_text": {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 32]},
    "roc_bert": {
        "shape_vocab_size": 8, "pronunciation_vocab_size": 8, "shape_embed_dim": 8,
        "pronunciation_embed_dim": 8, "pad_token_id": 0,
    },
    "step3p5": {"sliding_window": WINDOW},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""What a family needs besides."""


def small_config(config_class: Any, own: Mapping[str, Any] | None = None, *, is_tower: bool = False) -> Any:
    """A config of this class with small sizes, in all its sections."""
    default, sizes = config_class(), SIZES | TOWER if is_tower else SIZES
    fields, parts = default.to_dict(), getattr(config_class, "sub_configs", {})
    values = {n: sizes[n] for n, v in fields.items() if n in sizes and v is not None}
    values |= {
        n: _few_layers(v, sizes["num_hidden_layers"])
        for n, v in fields.items()
        if n in KINDS and isinstance(v, list) and v
    }
    if "use_sliding_window" in values:  # then the layers' kinds follow from max_window_layers
        values |= {"sliding_window": WINDOW}
        values.pop("layer_types", None)
    if "kv_lora_rank" in fields:  # latent attention: head_dim is that of the rotated part
        values |= {
            n: v
            for n, v in (("head_dim", SIZES["qk_rope_head_dim"]), ("num_key_value_heads", HEADS))
            if n in fields
        }
    for name in parts:
        if (part := getattr(default, name, None)) is not None:
            is_tower = any(word in name for word in ("vision", "audio", "vq"))
            values[name] = small_config(type(part), OWN.get(part.model_type), is_tower=is_tower)
    return config_class(**values | dict(own or {}))


def _few_layers(kinds: list[str], layers: int) -> list[str]:
    """A kind for each layer, in turn: every one that occurs."""
    return (list(dict.fromkeys(kinds)) * layers)[:layers]


def make_family(folder: Path, family: str) -> Path:
    """A random float32 model of a model_type, with its tokenizer, saved in `folder`, which is returned."""
    import torch
    from transformers import CONFIG_MAPPING

    from skylite.hub.text_model import auto_class

    torch.manual_seed(0)
    config = small_config(CONFIG_MAPPING[family], OWN.get(family))
    model = auto_class(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, param in model.named_parameters():  # no gain and no bias is as plain as at the start
            param.add_(torch.randn_like(param) * 0.1)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                param.mul_(0.4)  # Gemma 4 does not divide its scores: large ones amplify rounding
    tokenizer = tiny_tokenizer()
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
