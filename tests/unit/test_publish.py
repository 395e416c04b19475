"""A published adapter: its file, its hash, and a second publish of the same version."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from skylite.adapters.manifest import Canary, read_manifest
from skylite.config.train import RunConfig
from skylite.errors import SyncFailed
from skylite.trainer.publish_adapter import adapter_tensors, write_adapter
from tests.cases import policy_of
from tests.decisions import resolved
from tests.small_run import lone_rank, settings

CANARY = Canary(sequences=[[1, 2]], policy_logprobs=[[-0.5]], base_logprobs=[[-0.5]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_published_file_holds_the_adapter_and_never_changes(
    tiny_llama: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    with lone_rank() as dist:
        policy = replace(policy_of(tiny_llama, settings(), dist), dtype=dtype)
    run_config = RunConfig(skylite_version="test", config=settings(), resolved=resolved(tiny_llama, tmp_path))
    adapter = write_adapter(policy, run_config, 3, CANARY)
    loaded, tensors = load_file(adapter.weights_path), adapter_tensors(policy)
    assert loaded.keys() == tensors.keys()
    assert all(t.dtype == dtype and torch.equal(loaded[name], t) for name, t in tensors.items())
    assert adapter.weights_path.read_bytes() == save(tensors, {"format": "pt"})
    assert read_manifest(adapter.path).version == 3  # checks the hash
    assert write_adapter(policy, run_config, 3, CANARY) == adapter
    next(iter(policy.lora.values())).data[0, 0] += 1
    with pytest.raises(SyncFailed, match="already exists with other weights"):
        write_adapter(policy, run_config, 3, CANARY)
