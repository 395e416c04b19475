"""Settings of engines, a published adapter and its canary logprobs, for tests of engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from skylite.adapters.manifest import Canary, Manifest
from skylite.engine.connections import Address
from skylite.engine.interface import EngineSpec
from skylite.run.files import sha256_file
from skylite.run.run_dir import AdapterVersion, adapter_name

SPEC = EngineSpec(
    name="engine-0",
    model_path=Path(__file__).with_name("plain_model"),
    device="cpu",
    dtype="float32",
    address=Address("unix:run/engine.sock"),
    lora_rank=32,
    target_modules=["q_proj", "v_proj"],
    max_loras=2,
    max_model_len=512,
    max_num_seqs=64,
    kv_cache_gib=0.5,
    gpu_memory_utilization=0.4,
    cpu_lora="merged",
    seed=7,
)
PUBLIC = replace(
    SPEC,
    address=Address("http://127.0.0.1:8000", "secret"),
    fixed_adapter=AdapterVersion(1, Path("a") / adapter_name(1)),
)
"""As `skylite serve`."""
POLICY, BASE = [-1.0, -2.0], [-1.5, -2.5]


def publish(folder: Path, version: int) -> AdapterVersion:
    """A published adapter with a complete manifest. Its weights are arbitrary bytes."""
    adapter = AdapterVersion(version, folder / adapter_name(version))
    adapter.path.mkdir()
    adapter.weights_path.write_bytes(b"weights %d" % version)
    manifest = Manifest(
        version=version,
        step=version,
        parent=version - 1 if version else None,
        weights_sha256=sha256_file(adapter.weights_path),
        weights_bytes=adapter.weights_path.stat().st_size,
        base_model="m",
        base_fingerprint="f",
        rank=8,
        alpha=8.0,
        dtype="float32",
        target_modules=["q_proj"],
        canary=Canary(sequences=[[1, 2, 3]], policy_logprobs=[POLICY], base_logprobs=[BASE]),
    )
    adapter.manifest_path.write_text(manifest.model_dump_json())
    (adapter.path / "adapter_config.json").write_text('{"r": 8}')
    return adapter
