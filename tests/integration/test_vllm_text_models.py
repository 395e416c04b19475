"""Real vLLM applies an adapter on each kind of module of models that also read pictures, and of hybrids.

vLLM ignores matrices whose names lead to no module of its own. So each adapter here is on one kind of module.
tests/serving_sweep.py does the same for more families, by hand and in one process.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from skylite.adapters.experts import BOTH, served_modules
from skylite.adapters.experts import MODULE as EXPERTS
from skylite.adapters.manifest import Canary
from skylite.adapters.target_modules import last_names
from skylite.config.train import RunConfig
from skylite.processes.hardware import Dtype
from skylite.trainer.canary import base_canary_logprobs, canary_logprobs
from skylite.trainer.publish_adapter import write_adapter
from tests.cases import policy_of
from tests.decisions import resolved
from tests.engines import EngineServer, running_server
from tests.serving_sweep import SEQUENCES, SHARE, flat, make_model, only, share
from tests.small_run import lone_rank, settings
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.vllm
ATTENTION = ["q_proj", "k_proj", "v_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
DELTA_NET = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"]
MODELS: dict[str, tuple[Dtype, list[str]]] = {
    "qwen3_vl": ("float32", [*ATTENTION, "o_proj", *MLP]),
    "lfm2": ("float32", [*ATTENTION, "in_proj", "out_proj", "w1", "w2", "w3"]),
    "qwen3_moe": ("float32", [*ATTENTION, "o_proj", EXPERTS]),
    "gpt_oss": ("float32", [*ATTENTION, "o_proj", EXPERTS]),
    "deepseek_v3": ("float32", [*LATENT, *MLP, EXPERTS]),
    "qwen3_5_vl": ("bfloat16", [*ATTENTION, "o_proj", *DELTA_NET, *MLP]),
}
SERVED_SIZES = ("gpt_oss", "deepseek_v3")
"""Made with the sizes of the sweep (tests/serving_sweep.py)."""
NOISE = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest |engine - trainer| for the base in nats. In float32 also with an adapter."""


def engine_logprobs(server: EngineServer, model: str) -> list[float]:
    found = []
    for ids in SEQUENCES:
        body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        [choice] = server.http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
        rows = choice["prompt_logprobs"][1:]
        found += [row[str(token)]["logprob"] for row, token in zip(rows, ids[1:], strict=True)]
    return found


@pytest.mark.parametrize("family", MODELS)
def test_vllm_applies_the_adapter_of_every_kind_of_module(family: str, tmp_path: Path) -> None:
    dtype, kinds = MODELS[family]
    parameters = BOTH if EXPERTS in kinds else []
    model, config = tmp_path / family, settings(lora={"target_parameters": parameters})
    (make_model if family in SERVED_SIZES else make_tiny_model)(model, family)
    run_config = RunConfig(skylite_version="test", config=config, resolved=resolved(model, tmp_path))
    with lone_rank() as dist:
        policy = policy_of(model, config, dist, dtype=dtype)
        assert last_names(served_modules(policy.target_modules, policy.target_parameters)) == sorted(kinds)
        base, moved = flat(base_canary_logprobs(policy, SEQUENCES)), {}
        for version, kind in enumerate(kinds):
            with only(policy, kind):
                moved[kind] = flat(canary_logprobs(policy, SEQUENCES))
                canary = Canary(sequences=[], policy_logprobs=[], base_logprobs=[])
                write_adapter(policy, run_config, version, canary)
    with running_server(model, dtype=dtype, target_modules=kinds) as server:
        own_base = engine_logprobs(server, server.base)
        noise = max(abs(a - b) for a, b in zip(own_base, base, strict=True))
        assert noise < NOISE[dtype], "engine and trainer compute another base"
        for version, kind in enumerate(kinds):
            assert server.load(kind, tmp_path / f"policy-v{version:06d}").is_success
            found = engine_logprobs(server, kind)
            server.unload(kind)
            own = {"base": base, "moved": moved}
            shown = share({"base": own_base, "moved": {kind: found}}, own, kind)
            assert abs(shown - 1) < SHARE[dtype], (kind, shown)
            gap = max(abs(a - b) for a, b in zip(found, moved[kind], strict=True))
            assert gap < NOISE[dtype] or dtype == "bfloat16", (kind, gap)
