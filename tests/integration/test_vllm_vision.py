"""Real vLLM applies an adapter on each kind of module that reads images, and on the text model beside them.

vLLM ignores matrices whose names lead to no module of its own. So each adapter here is on one kind of module.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from skylite.adapters.manifest import Canary, CanaryImage
from skylite.config.train import RunConfig
from skylite.data.chat_tokenizer import load_tokenizer
from skylite.engine.canary import with_picture
from skylite.engine.vllm.client import VllmClient
from skylite.trainer.canary import base_canary_logprobs, canary_logprobs
from skylite.trainer.publish_adapter import write_adapter
from tests.cases import policy_of
from tests.decisions import resolved
from tests.engines import EngineServer, running_server
from tests.integration.test_vllm_text_models import NOISE
from tests.serving_sweep import flat, only
from tests.small_run import lone_rank, settings
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.vllm
KINDS = {
    "qwen3_vl": [
        *("qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2", "merger.linear_fc1", "merger.linear_fc2"),
        *("deepstack_merger_list.0.linear_fc1", "deepstack_merger_list.0.linear_fc2", "up_proj"),
    ],
    "qwen2_5_vl": [
        *("qkv", "attn.proj", "visual.blocks.0.mlp.gate_proj", "visual.blocks.1.mlp.down_proj"),
        *(
            "visual.blocks.1.mlp.up_proj",
            "merger.mlp.0",
            "merger.mlp.2",
            "language_model.layers.0.mlp.up_proj",
        ),
    ],
}
"""Ends of the paths of modules."""
TEXTS = [[(7 * k * k + 3 * g) % 250 for k in range(20)] for g in range(4)]


def scores(server: EngineServer, model: str, canary: Canary) -> list[float]:
    async def ask() -> list[list[float]]:
        client = VllmClient("vllm-test", server.address)
        try:
            return [await client.score(model, canary.prompt(ids)) for ids in canary.sequences]
        finally:
            await client.aclose()

    return flat(asyncio.run(ask()))


@pytest.mark.parametrize("family", KINDS)
def test_vllm_applies_the_adapter_of_every_kind_of_module_that_reads_images(
    family: str, tmp_path: Path
) -> None:
    kinds, model = KINDS[family], make_tiny_model(tmp_path / family, family)
    config = settings(lora={"freeze_vision": False, "freeze_projection": False})
    run_config = RunConfig(skylite_version="test", config=config, resolved=resolved(model, tmp_path))
    tokenizer = load_tokenizer(model)
    sequences, image = with_picture(tokenizer, TEXTS)
    tokenizer.close()
    canary = Canary(sequences=sequences, policy_logprobs=[], base_logprobs=[], image=CanaryImage.of(image))
    with lone_rank() as dist:
        policy = policy_of(model, config, dist)
        base, moved = flat(base_canary_logprobs(policy, sequences, image)), {}
        for version, kind in enumerate(kinds):
            with only(policy, kind):
                moved[kind] = flat(canary_logprobs(policy, sequences, image))
                write_adapter(policy, run_config, version, canary)
    with running_server(model, target_modules=policy.target_modules, max_images=1) as server:
        own_base = scores(server, server.base, canary)
        assert max(abs(a - b) for a, b in zip(own_base, base, strict=True)) < NOISE["float32"]
        for version, kind in enumerate(kinds):
            assert server.load(kind, tmp_path / f"policy-v{version:06d}").is_success
            found = scores(server, kind, canary)
            server.unload(kind)
            move = [a - b for a, b in zip(moved[kind], base, strict=True)]
            assert max(map(abs, move)) > 1e-3, kind
            share = sum((a - b) * c for a, b, c in zip(found, own_base, move, strict=True))
            share /= sum(c * c for c in move)
            gap = max(abs(a - b) for a, b in zip(found, moved[kind], strict=True))
            print(f"{family} {kind}: share {share:.5f}, gap {gap:.1e}, move {max(map(abs, move)):.3f}")
            assert abs(share - 1) < 1e-3, (kind, share)
            assert gap < NOISE["float32"], (kind, gap)
