"""A published adapter and its canary logprobs, for tests of engines."""

from __future__ import annotations

from pathlib import Path

from skylite.adapters.manifest import Canary, Manifest
from skylite.run.files import sha256_file
from skylite.run.run_dir import AdapterVersion, adapter_name

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
    return adapter
