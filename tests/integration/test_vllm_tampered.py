"""Real vLLM servers that apply adapters wrongly: each kind is found."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from skylite.adapters.manifest import read_manifest
from skylite.engine.canary import DEFAULT_TOLERANCE
from skylite.engine.canary_kinds import Floats
from skylite.engine.canary_reading import CanaryReading
from skylite.engine.engine_pool import EnginePool
from skylite.engine.retrying_engine import RetryingEngine
from skylite.engine.vllm.client import VllmClient
from skylite.errors import SyncFailed
from skylite.export.probe import AdaptedModel
from skylite.run.files import sha256_file, write_json
from skylite.run.run_dir import AdapterVersion, adapter_name
from tests.engines import EngineServer, running_server, write_random_adapter
from tests.fakes import tampered_engine
from tests.unit.engine_cases import publish

pytestmark = pytest.mark.vllm
Dtype = Literal["float32", "bfloat16"]
SCALES = {"float32": (0.0001, 0.0002), "bfloat16": (0.15, 0.3)}
"""Sizes of version 1 and 2. In float32 they move the logprobs by less than the limit of 0.002 nats."""
OF_KINDS = {
    "without-mlp": {"down_proj": 0, "gate_proj": 0, "up_proj": 0},
    "without-k": {"k_proj": 0},
    "negated-k": {"k_proj": -1},
}
"""Damage of whole kinds of modules -> the shares that the canary finds."""
TEXTS = [f"Natalia sold {17 * k} clips in {name}. How many?" for k in range(12) for name in ("April", "May")]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> Dtype:
    value: Dtype = request.param
    return value


@pytest.fixture(scope="module")
def marker(tmp_path_factory: pytest.TempPathFactory, dtype: Dtype) -> dict[str, str]:
    return tampered_engine.install(tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="module")
def server(tiny_llama: Path, dtype: Dtype, marker: dict[str, str]) -> Iterator[EngineServer]:
    with running_server(tiny_llama, dtype=dtype, env=marker) as server:
        yield server


@pytest.fixture(scope="module")
def published(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory, dtype: Dtype) -> list[Path]:
    """Version 1 and 2, each another adapter, with canaries that transformers and PEFT computed in float32."""
    root = tmp_path_factory.mktemp("adapters")
    sequences = [list(text.encode())[:24] for text in TEXTS][: 2 if dtype == "float32" else 24]
    folders = []
    for version, scale in enumerate(SCALES[dtype], start=1):
        adapter = publish(root, version)
        made = write_random_adapter(root / f"made-{version}", tiny_llama, seed=version, scale=scale)
        shutil.copytree(made, adapter.path, dirs_exist_ok=True)
        model = AdaptedModel(tiny_llama, made)
        rows, base_rows, effects = logprobs_of(model, sequences)
        body = json.loads(adapter.manifest_path.read_text()) | {
            "weights_sha256": sha256_file(adapter.weights_path),
            "weights_bytes": adapter.weights_path.stat().st_size,
            "canary": {
                "sequences": sequences,
                "policy_logprobs": rows,
                "base_logprobs": base_rows,
                "effects": effects,
            },
        }
        write_json(adapter.manifest_path, body)
        read_manifest(adapter.path)
        folders.append(adapter.path)
    return folders


def logprobs_of(
    model: AdaptedModel, sequences: list[list[int]]
) -> tuple[list[list[float]], list[list[float]], dict[str, list[list[float]]]]:
    """With the adapter, without it, and what they lose without each kind of module."""
    ends = np.cumsum([len(ids) - 1 for ids in sequences])[:-1]
    ones = dict.fromkeys(model.kinds, 1.0)

    def rows(logprobs: Floats) -> list[list[float]]:
        return [part.tolist() for part in np.split(logprobs, ends)]

    ours, base = (model.logprobs(sequences, dict.fromkeys(ones, x)) for x in (1.0, 0.0))
    effects = {kind: rows(ours - model.logprobs(sequences, ones | {kind: 0.0})) for kind in model.kinds}
    return rows(ours), rows(base), effects


def serve(
    server: EngineServer, marker: dict[str, str], published: list[Path], folder: Path, kind: str, dtype: Dtype
) -> CanaryReading | BaseException:
    """Load version 1 as it is and version 2 with the damage `kind`. Returns the outcome for version 2."""
    # New names for each kind: vLLM keeps what it knows about a name.
    number = 10 * (1 + len(list(folder.parent.iterdir()))) + sum(map(ord, kind)) % 1000 * 1000

    async def both() -> CanaryReading | BaseException:
        engine = RetryingEngine(VllmClient("vllm-test", server.address))
        pool = EnginePool([engine], DEFAULT_TOLERANCE[dtype])
        try:
            for version, source in enumerate(published, start=1):
                path = shutil.copytree(source, folder / adapter_name(number + version))
                adapter = AdapterVersion(number + version, path)
                Path(marker[tampered_engine.MARKER]).write_text(kind if version == 2 else "")
                await pool.load(adapter)
                found = await asyncio.gather(pool.verify(adapter), return_exceptions=True)
                assert version == 2 or isinstance(found[0], CanaryReading), found
            return found[0]
        finally:
            await pool.unload_before(before=10**6)
            await engine.aclose()

    return asyncio.run(both())


def test_right_adapters_are_verified(
    server: EngineServer, marker: dict[str, str], published: list[Path], tmp_path: Path, dtype: Dtype
) -> None:
    reading = serve(server, marker, published, tmp_path, "", dtype)
    assert isinstance(reading, CanaryReading), reading
    assert reading.is_verified, reading
    assert len(reading.kinds) == 7
    assert all(found.is_told and not found.is_wrong for found in reading.kinds.values()), reading
    if dtype == "float32":
        assert reading.base_distance < 0.001, "the limit of 0.002 alone would see no fault"


@pytest.mark.parametrize("kind", [tampered_engine.BEFORE, *tampered_engine.DAMAGE])
def test_a_damaged_adapter_is_refused(
    server: EngineServer,
    marker: dict[str, str],
    published: list[Path],
    tmp_path: Path,
    kind: str,
    dtype: Dtype,
) -> None:
    outcome = serve(server, marker, published, tmp_path, kind, dtype)
    assert isinstance(outcome, SyncFailed), outcome
    named = re.findall(r"([a-z]+_proj) (-?[\d.]+) \+-", outcome.what)
    # In bfloat16 the adapter is so large that the effects of several kinds are no sum.
    if kind in OF_KINDS and (dtype == "float32" or kind == "without-k"):
        assert {name: round(float(share)) for name, share in named} == OF_KINDS[kind]
