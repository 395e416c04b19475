"""Real vLLM applies an adapter on each kind of module of models that also read pictures, and of hybrids.

vLLM ignores matrices whose names lead to no module of its own. So each adapter here is on one kind of module.
vLLM is imported once, and a fork serves each model, with the flags of a run. tests/serving_sweep.py does the
same for more families, by hand.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from skylite.adapters.experts import BOTH
from skylite.adapters.experts import MODULE as EXPERTS
from skylite.processes.hardware import Dtype
from tests.serving_sweep import SHARE, largest, make_model, share, trainer_side
from tests.small_run import settings
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.vllm
ATTENTION = ["q_proj", "k_proj", "v_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
DELTA_NET = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"]
PER_LAYER = ["per_layer_input_gate", "per_layer_projection"]
MODELS: dict[str, tuple[Dtype, list[str]]] = {
    "qwen3_vl": ("float32", [*ATTENTION, "o_proj", *MLP]),
    "lfm2": ("float32", [*ATTENTION, "in_proj", "out_proj", "w1", "w2", "w3"]),
    "qwen3_moe": ("float32", [*ATTENTION, "o_proj", EXPERTS]),
    "gpt_oss": ("float32", [*ATTENTION, "o_proj", EXPERTS]),
    "deepseek_v3": ("float32", [*LATENT, *MLP, EXPERTS]),
    "gemma4": ("float32", [*ATTENTION, "o_proj", *MLP, *PER_LAYER]),
    "qwen3_5_vl": ("bfloat16", [*ATTENTION, "o_proj", *DELTA_NET, *MLP]),
}
SERVED_SIZES = ("gpt_oss", "deepseek_v3", "gemma4")
"""Made with the sizes of the sweep (tests/serving_sweep.py)."""
NOISE = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest |engine - trainer| for the base in nats. In float32 also with an adapter."""

Sides = dict[str, tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    """Family -> logprobs of the trainer and of the engine."""
    own, questions = {}, []
    for family, (dtype, kinds) in MODELS.items():
        model, adapters = tmp_path_factory.mktemp(family) / family, tmp_path_factory.mktemp("adapters")
        (make_model if family in SERVED_SIZES else make_tiny_model)(model, family)
        lora = {"target_parameters": BOTH if EXPERTS in kinds else []}
        own[family] = trainer_side(model, adapters, dtype, settings(lora=lora))
        questions.append((str(model), str(adapters), dtype, [*own[family]["moved"]]))
    words = [sys.executable, "-m", "tests.serving_sweep", "-"]
    done = subprocess.run(words, input=json.dumps(questions), capture_output=True, text=True, check=False)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(own, zip(own.values(), answers, strict=True), strict=True))


@pytest.mark.parametrize("family", MODELS)
def test_vllm_applies_the_adapter_of_every_kind_of_module(family: str, sides: Sides) -> None:
    dtype, kinds = MODELS[family]
    own, found = sides[family]
    assert sorted(own["moved"]) == sorted(kinds)
    assert largest(found["base"], own["base"]) < NOISE[dtype], "engine and trainer compute another base"
    for kind in kinds:
        shown = share(found, own, kind)
        assert abs(shown - 1) < SHARE[dtype], (kind, shown)
        gap = largest(found["moved"][kind], own["moved"][kind])
        assert gap < NOISE[dtype] or dtype == "bfloat16", (kind, gap)
