"""The largest micro-batch that fits: a line through two measured passes, and passes of a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skylite.config.train import RunConfig
from skylite.errors import RunFailed
from skylite.model.process_group import Dist
from skylite.run.run_dir import RunDir
from skylite.trainer.micro_batch_memory import (
    MAX_TOKENS_PER_PASS,
    TOKEN_MULTIPLE,
    first_line,
    halve_micro_batches,
    is_out_of_memory,
    memory_so_far,
    most_tokens,
    resolve_micro_batch_tokens,
    with_micro_batch_tokens,
)
from tests.cases import policy_of
from tests.decisions import resolved
from tests.small_run import settings


def test_the_line_through_two_passes_gives_the_largest_micro_batch() -> None:
    sizes, peaks = (100, 300), (1500.0, 3500.0)
    assert most_tokens(sizes, peaks, 500 + 10 * 1000) == (960, 10.0)  # 1000, down to a multiple of 64
    assert most_tokens(sizes, peaks, 0)[0] == TOKEN_MULTIPLE
    assert most_tokens(sizes, peaks, 1e12)[0] == MAX_TOKENS_PER_PASS
    assert most_tokens(sizes, (900.0, 800.0), 1e9)[0] == MAX_TOKENS_PER_PASS, "a falling measurement"


def test_the_memory_of_a_gpu_is_a_metric_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is used here: torch's own count is replaced."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 << 30)
    found = memory_so_far(torch.device("cuda", 0))
    assert found["mem/gpu_peak_bytes"] == 3 * 2**30
    assert 1e7 < found["mem/rss_peak_bytes"] < 1e12
    assert list(memory_so_far(torch.device("cpu"))) == ["mem/rss_peak_bytes"]


def test_auto_is_measured_once_and_reused_on_resume(tiny_llama: Path, dist: Dist, tmp_path: Path) -> None:
    config = settings(trainer={"tokens_per_micro_batch": "auto"})
    run_config = RunConfig(skylite_version="test", config=config, resolved=resolved(tiny_llama, tmp_path))
    policy = policy_of(tiny_llama, config, dist)
    before = {name: p.detach().clone() for name, p in policy.lora.items()}
    run = RunDir(tmp_path)
    run.canary_path.write_text('{"sequences": [], "longest_prompt_tokens": 20}', encoding="utf-8")
    tokens = resolve_micro_batch_tokens(run, run_config, policy, dist).config.trainer.tokens_per_micro_batch
    assert isinstance(tokens, int)
    assert tokens >= TOKEN_MULTIPLE
    assert all(p.grad is None and torch.equal(p, before[n]) for n, p in policy.lora.items())
    run.micro_batch_path.write_text('{"tokens": 192, "reason": "", "setting": "auto"}', encoding="utf-8")
    assert (
        resolve_micro_batch_tokens(run, run_config, policy, dist).config.trainer.tokens_per_micro_batch == 192
    )


def test_an_explicit_number_is_used_unchanged(tiny_llama: Path, dist: Dist, tmp_path: Path) -> None:
    config = settings(trainer={"tokens_per_micro_batch": 60})
    run_config = RunConfig(skylite_version="test", config=config, resolved=resolved(tiny_llama, tmp_path))
    assert (
        resolve_micro_batch_tokens(RunDir(tmp_path), run_config, policy_of(tiny_llama, config, dist), dist)
        is run_config
    )


@pytest.mark.parametrize("bad", [8, "automatic"])
def test_other_values_are_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="tokens_per_micro_batch"):
        settings(trainer={"tokens_per_micro_batch": bad})


def test_a_recorded_size_counts_for_its_setting_only(tiny_llama: Path, dist: Dist, tmp_path: Path) -> None:
    config = settings(trainer={"tokens_per_micro_batch": 60})
    run_config = RunConfig(skylite_version="test", config=config, resolved=resolved(tiny_llama, tmp_path))
    run, policy = RunDir(tmp_path), policy_of(tiny_llama, config, dist)
    halved = halve_micro_batches(run, run_config, 3, "no memory")
    assert halved.config.trainer.tokens_per_micro_batch == 30
    assert run.read_json(run.micro_batch_path) == {
        "tokens": 30,
        "reason": "step 3 ran out of memory with 60 tokens per micro-batch: no memory",
        "setting": 60,
    }
    resumed = resolve_micro_batch_tokens(run, run_config, policy, dist)
    assert resumed.config.trainer.tokens_per_micro_batch == 30
    changed = with_micro_batch_tokens(run_config, 50)
    assert resolve_micro_batch_tokens(run, changed, policy, dist) is changed


def test_micro_batches_have_a_smallest_size(tmp_path: Path) -> None:
    config = settings(trainer={"tokens_per_micro_batch": 60})
    run_config = RunConfig(skylite_version="test", config=config, resolved=resolved(tmp_path, tmp_path))
    halved = halve_micro_batches(RunDir(tmp_path), run_config, 3, "no memory")
    with pytest.raises(RunFailed, match="Step 3 ran out of memory with micro-batches of only 30 tokens"):
        halve_micro_batches(RunDir(tmp_path), halved, 3, "no memory")


def test_every_kind_of_failed_allocation_is_recognised() -> None:
    with pytest.raises(RuntimeError) as cpu:
        torch.empty(1 << 60)
    assert is_out_of_memory(cpu.value)
    assert first_line(cpu.value).startswith("[enforce fail at alloc_cpu.cpp")
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert is_out_of_memory(MemoryError())
    assert first_line(MemoryError()) == "MemoryError"


CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
CUDNN = "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"
CUDA = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"
EXPANDABLE = "CUDA driver error: out of memory"
TRITON = "Triton Error [CUDA]: out of memory"


@pytest.mark.parametrize("text", [CUBLAS, CUDNN, CUDA, EXPANDABLE, TRITON])
@pytest.mark.parametrize("kind", [RuntimeError, torch.AcceleratorError])
def test_an_allocation_that_failed_outside_torchs_allocator_is_recognised(
    kind: type[Exception], text: str
) -> None:
    assert is_out_of_memory(kind(text))


OTHERS = [
    RuntimeError("shapes differ"),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"),
    ValueError(CUDA),
]


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_are_not_taken_for_a_failed_allocation(error: Exception) -> None:
    assert not is_out_of_memory(error)
