"""Real vLLM applies an adapter on each kind of module of models that also read pictures, and of hybrids.

vLLM ignores matrices whose names lead to no module of its own. So each adapter here is on one kind of module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skylite.adapters.experts import BOTH, served_modules
from skylite.adapters.experts import MODULE as EXPERTS
from skylite.adapters.manifest import Canary
from skylite.adapters.target_modules import last_names
from skylite.config.train import RunConfig
from skylite.model.policy import Policy
from skylite.processes.hardware import Dtype
from skylite.trainer.canary import base_canary_logprobs, canary_logprobs
from skylite.trainer.publish_adapter import write_adapter
from tests.cases import policy_of
from tests.decisions import resolved
from tests.engines import EngineServer, running_server
from tests.small_run import lone_rank, settings
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.vllm
SEQUENCES = [[(7 * k * k + 3 * g) % 250 for k in range(40)] for g in range(6)]
ATTENTION = ["q_proj", "k_proj", "v_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
DELTA_NET = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"]
MODELS: dict[str, tuple[Dtype, list[str]]] = {
    "qwen3_vl": ("float32", [*ATTENTION, "o_proj", *MLP]),
    "lfm2": ("float32", [*ATTENTION, "in_proj", "out_proj", "w1", "w2", "w3"]),
    "qwen3_moe": ("float32", [*ATTENTION, "o_proj", EXPERTS]),
    "qwen3_5_vl": ("bfloat16", [*ATTENTION, "o_proj", *DELTA_NET, *MLP]),
}
NOISE = {"float32": 2e-5, "bfloat16": 0.1}
"""Largest |engine - trainer| for the base in nats. In float32 also with an adapter."""

STRONGER = {"in_proj_a": 100, "in_proj_b": 10}
"""Decay and gate of a delta net move bfloat16's logprobs by less than their rounding otherwise."""


def engine_logprobs(server: EngineServer, model: str) -> list[float]:
    found = []
    for ids in SEQUENCES:
        body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        [choice] = server.http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
        rows = choice["prompt_logprobs"][1:]
        found += [row[str(token)]["logprob"] for row, token in zip(rows, ids[1:], strict=True)]
    return found


@contextmanager
def only(policy: Policy, kind: str) -> Iterator[None]:
    """Inside the block all B matrices but this kind's are 0, and a weak kind's are `STRONGER`."""
    before = {name: param.data.clone() for name, param in policy.lora.items()}
    for name, param in policy.lora.items():
        if "lora_B" in name:
            param.data *= STRONGER.get(kind, 1) * (f".{kind}.lora_B" in name.replace(".base_layer", ""))
    yield
    for name, param in policy.lora.items():
        param.data.copy_(before[name])


@pytest.mark.parametrize("family", MODELS)
def test_vllm_applies_the_adapter_of_every_kind_of_module(family: str, tmp_path: Path) -> None:
    dtype, kinds = MODELS[family]
    parameters = BOTH if EXPERTS in kinds else []
    model, config = (
        make_tiny_model(tmp_path / family, family),
        settings(lora={"target_parameters": parameters}),
    )
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
            move = [a - b for a, b in zip(moved[kind], base, strict=True)]
            seen = [a - b for a, b in zip(found, own_base, strict=True)]
            share = sum(a * b for a, b in zip(seen, move, strict=True)) / sum(a * a for a in move)
            assert abs(share - 1) < (1e-3 if dtype == "float32" else 0.05), (kind, share)
            gap = max(abs(a - b) for a, b in zip(found, moved[kind], strict=True))
            assert gap < NOISE[dtype] or dtype == "bfloat16", (kind, gap)


def flat(rows: list[list[float]]) -> list[float]:
    return [x for row in rows for x in row]
