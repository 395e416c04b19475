"""Record what bitsandbytes dequantises, for test_quantised_weights.py. skylite does not depend on it.

    python -m pip install bitsandbytes==0.50.2   # beside .venv, with the torch of .venv
    python tests/record_bitsandbytes.py

Writes matrices that bitsandbytes quantised, as checkpoints store them, with sha256 of their values.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

FILE = Path(__file__).with_name("bitsandbytes_reference.safetensors")
ROWS, COLUMNS = 130, 128
"""260 blocks of 64: their scales are more than one block of 256."""
CASES = {"nf4": ("nf4", False), "nf4 nested": ("nf4", True), "fp4 nested": ("fp4", True)}
DTYPES = ("float32", "bfloat16", "float16")


def digest(values: torch.Tensor) -> str:
    """sha256 of a tensor's bytes, with -0 as 0: bitsandbytes' FP4 has both."""
    return hashlib.sha256((values + 0).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def main() -> None:
    import bitsandbytes
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    tensors, digests = dict[str, torch.Tensor](), dict[str, str]()
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) * 0.1
    for case, (kind, nested) in CASES.items():
        packed, state = quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type=kind)
        parts = {"weight": packed, **{f"weight.{k}": v for k, v in state.as_dict(packed=True).items()}}
        tensors |= {f"{case}.{part}": value.clone() for part, value in parts.items()}
        for dtype in DTYPES:
            state.dtype = getattr(torch, dtype)
            digests[f"{case} {dtype}"] = digest(dequantize_4bit(packed, state))
    save_file(tensors, FILE, {"digests": json.dumps(digests), "bitsandbytes": bitsandbytes.__version__})


if __name__ == "__main__":
    main()
