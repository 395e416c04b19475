"""Adapters that a vLLM CPU server must refuse without stopping."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.engines import (
    MAX_LORA_RANK,
    Ask,
    EngineServer,
    write_random_adapter,
)
from tests.integration.adapter_versions import DIFFERENT, PROMPT, gap, publish, same

pytestmark = pytest.mark.vllm


def rank_too_large(folder: Path, model: Path) -> Path:
    return write_random_adapter(folder, model, rank=2 * MAX_LORA_RANK)


def truncated(folder: Path, model: Path) -> Path:
    weights = write_random_adapter(folder, model) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    return folder


def missing_folder(folder: Path, model: Path) -> Path:
    return folder


def missing_weights(folder: Path, model: Path) -> Path:
    (write_random_adapter(folder, model) / "adapter_model.safetensors").unlink()
    return folder


def wrong_shapes(folder: Path, model: Path) -> Path:
    weights = write_random_adapter(folder, model) / "adapter_model.safetensors"
    save_file(
        {
            name: tensor.repeat(1, 2) if "lora_A" in name else tensor
            for name, tensor in load_file(weights).items()
        },
        weights,
    )
    return folder


def unknown_modules(folder: Path, model: Path) -> Path:
    weights = write_random_adapter(folder, model) / "adapter_model.safetensors"
    save_file(
        {name.replace("q_proj", "query"): tensor for name, tensor in load_file(weights).items()}, weights
    )
    return folder


@pytest.mark.parametrize(
    "damage", [rank_too_large, truncated, missing_folder, missing_weights, wrong_shapes, unknown_modules]
)
def test_a_bad_adapter_is_refused_and_the_engine_keeps_serving(
    server: EngineServer, tmp_path: Path, damage
) -> None:
    good = publish(server, tmp_path, seed=1)
    before = [server.ask(Ask(name, PROMPT)) for name in (server.base, good.name)]
    bad = f"bad-{damage.__name__}"
    assert server.load(bad, damage(tmp_path / "bad", server.model_path)).is_error
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        server.ask(Ask(bad, PROMPT))
    after = server.ask_together(
        [Ask(name, PROMPT, salt=damage.__name__) for name in (server.base, good.name)]
    )
    assert all(same(b, a) for b, a in zip(before, after, strict=True))
    assert gap(*after) > DIFFERENT
