"""`skylite probe` against a real vLLM server that applies an adapter rightly, in part, or not at all."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from skylite.cli.probe import Served, ask, encoded
from skylite.export.probe import AdaptedModel, Probe, ServerScores, judge, probe_text, sequences_of
from tests.engines import EngineServer, running_server, write_random_adapter
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.vllm
DEPTH = 600


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[EngineServer]:
    with running_server(tiny_llama) as running:
        yield running


@pytest.fixture(scope="module")
def adapter(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_adapter(tmp_path_factory.mktemp("adapters") / "right", tiny_llama, rank=8)


def scores_of(
    server: EngineServer, name: str, model: Path
) -> tuple[list[list[int]], list[int], ServerScores]:
    short, long = sequences_of(encoded(model, probe_text()), DEPTH)
    return short, long, asyncio.run(ask(server.address, Served(name, server.base), short, long))


def probed(server: EngineServer, served: Path, adapter: Path, base: Path | None = None) -> Probe:
    """What the probe says of `adapter` where the server has loaded the folder `served`."""
    model = base or server.model_path
    assert server.load("mine", served).is_success
    try:
        short, long, scores = scores_of(server, "mine", server.model_path)
    finally:
        server.unload("mine")
    return judge(AdaptedModel(model, adapter), short, long, scores)


def changed(adapter: Path, folder: Path, dropped: str = "", alpha: float = 1.0) -> Path:
    """A copy without the LoRA of one kind of module, or with another alpha."""
    shutil.copytree(adapter, folder)
    tensors = load_file(adapter / "adapter_model.safetensors")
    kept = {n: t * 0 if dropped and f".{dropped}.lora_B" in n else t for n, t in tensors.items()}
    save_file(kept, folder / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["lora_alpha"] *= alpha
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_the_right_adapter_is_applied_in_all_kinds_and_depths(server: EngineServer, adapter: Path) -> None:
    found = probed(server, adapter, adapter)
    assert found.is_applied, found.verdict
    assert len(found.kinds) == 7
    assert all(abs(s.share - 1) < 1e-3 and s.limit < 0.051 for s in found.kinds.values())
    assert [*found.depths] == ["1 to 65", "65 to 257", f"257 to {DEPTH}"]
    assert all(abs(s.share - 1) < 1e-3 for s in found.depths.values())
    assert found.noise is not None
    assert max(found.gap, found.noise) < 1e-4 < found.moved


@pytest.mark.parametrize("kind", ["v_proj", "down_proj"])
def test_a_kind_that_is_left_out_is_named(
    server: EngineServer, adapter: Path, tmp_path: Path, kind: str
) -> None:
    found = probed(server, changed(adapter, tmp_path / "part", dropped=kind), adapter)
    assert found.verdict.startswith(f"applied in part: {kind} ")
    assert {name: round(s.share, 2) for name, s in found.kinds.items()} == {
        name: float(name != kind) for name in found.kinds
    }


def test_another_alpha_is_found_with_its_factor(server: EngineServer, adapter: Path, tmp_path: Path) -> None:
    found = probed(server, changed(adapter, tmp_path / "half", alpha=0.5), adapter)
    assert found.verdict.startswith("applied 0.50 times")
    assert not found.is_applied


def test_a_stale_adapter_and_another_base_are_found(
    server: EngineServer, adapter: Path, tmp_path: Path
) -> None:
    stale = write_random_adapter(tmp_path / "stale", server.model_path, rank=8, seed=2)
    assert probed(server, stale, adapter).verdict.startswith("another adapter or version")
    other = make_tiny_model(tmp_path / "other", "llama", seed=5)
    assert probed(server, adapter, adapter, base=other).verdict.startswith("another base")


def test_a_server_that_samples_its_base_is_found(server: EngineServer, adapter: Path) -> None:
    """Also where the base is not served beside it, as in servers that reload in place under its name."""
    short, long, scores = scores_of(server, server.base, server.model_path)
    model = AdaptedModel(server.model_path, adapter)
    for seen in (scores, replace(scores, base_short=None, base_long=None)):
        assert judge(model, short, long, seen).verdict == "not applied: the server samples the base"


def test_an_adapter_that_ends_in_the_middle_of_a_text_is_found(server: EngineServer, adapter: Path) -> None:
    assert server.load("mine", adapter).is_success
    short, long, scores = scores_of(server, "mine", server.model_path)
    server.unload("mine")
    assert scores.base_long is not None
    broken = replace(scores, long=np.concatenate([scores.long[:256], scores.base_long[256:]]))
    found = judge(AdaptedModel(server.model_path, adapter), short, long, broken)
    assert found.verdict == f"not applied in tokens 257 to {DEPTH} of a long text"
