"""A converter of small Llama models with the command line of llama.cpp's. It writes a real GGUF file.

FAKE_CONVERTER=fail: exits with an error. FAKE_CONVERTER=swap: swaps two matrices, as a wrong converter might.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

TYPES = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--outfile", required=True)
    parser.add_argument("--outtype", choices=TYPES, required=True)
    arguments = parser.parse_args()
    if os.environ.get("FAKE_CONVERTER") == "fail":
        sys.exit("Model LlamaForCausalLM is not supported")
    convert(arguments.folder, arguments.outfile, arguments.outtype)


def convert(folder: Path, out: str, out_type: str) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = load_file(folder / "model.safetensors")
    if os.environ.get("FAKE_CONVERTER") == "swap":
        names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)]
        weights[names[0]], weights[names[1]] = weights[names[1]], weights[names[0]]
    writer = gguf.GGUFWriter(out, "llama")
    write_settings(writer, config, out_type)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in weights.items():
        write_tensor(writer, names.get_name(name, (".weight",)), tensor, heads_of(name, config), out_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_settings(writer: gguf.GGUFWriter, config: dict[str, Any], out_type: str) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_file_type(TYPES[out_type][1])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"<{number}>" for number in range(config["vocab_size"])])


def heads_of(name: str, config: dict[str, Any]) -> int:
    """The heads of a matrix whose rotary dimensions llama.cpp interleaves; 0 for any other."""
    if name.endswith("q_proj.weight"):
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if name.endswith("k_proj.weight") else 0


def write_tensor(
    writer: gguf.GGUFWriter, name: str | None, tensor: torch.Tensor, heads: int, out_type: str
) -> None:
    assert name is not None
    values = tensor.float().numpy()
    if heads:
        rows, columns = values.shape
        values = values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    kind = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else TYPES[out_type][0]
    quantised = gguf.quants.quantize(np.ascontiguousarray(values), kind)
    writer.add_tensor(name, quantised, raw_dtype=kind)


if __name__ == "__main__":
    main()
