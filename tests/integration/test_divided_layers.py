"""The predicted part of each GPU is what vLLM's own layers allocate, without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from skylite.resources.model_sizes import sizes_of
from tests.integration.divided_layers import (
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    INNER,
    KEY_VALUE_HEADS,
    LORA_RANK,
    VOCABULARY,
)

pytestmark = pytest.mark.vllm
QUERIES, KEYS = HEADS * HEAD_SIZE, KEY_VALUE_HEADS * HEAD_SIZE
LAYER = {
    "self_attn.q_proj": (QUERIES, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, QUERIES),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}


@pytest.mark.parametrize("gpus", [2, 8])
def test_vllm_allocates_what_is_predicted(gpus: int) -> None:
    """2 GPUs divide the 4 key-value heads, and 8 have copies."""
    command = [sys.executable, "-m", "tests.integration.divided_layers", str(gpus)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    vllm = json.loads(done.stdout.splitlines()[-1])
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in LAYER.items()}
    adapted = {name.removesuffix(".weight") for name in shapes}
    shapes["model.embed_tokens.weight"] = (VOCABULARY, HIDDEN)
    config = {"num_attention_heads": HEADS}
    part = sizes_of(shapes, config, adapted, LORA_RANK).per_gpu(gpus)
    # On 8 GPUs vLLM copies key-value heads, which the prediction leaves out.
    assert part.parameters == pytest.approx(vllm["layer"] + vllm["embedding"], rel=0.02 if gpus == 2 else 0.1)
    assert part.slots_per_rank == pytest.approx(vllm["slots"], rel=0.02)
