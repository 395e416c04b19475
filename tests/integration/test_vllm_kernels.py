"""vLLM's kernels for norms give the numbers of torch's operations, wherever skylite uses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm

HIDDEN = 64


@pytest.fixture
def kernels() -> Any:
    """The module under test; vLLM's kernels are loaded first, as in its own processes."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    from skylite.engine.vllm.plugin import norm_kernels as kernels

    return kernels


@pytest.fixture
def norm_of(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's own class with the plugin's way installed, as the server's flags turn it on."""
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm

    from skylite.engine.vllm.launcher import CPU_CUSTOM_OPS

    monkeypatch.setattr(RMSNorm, "forward_cpu", RMSNorm.forward_cpu)  # and back after the test
    kernels.install()

    def make(dtype: torch.dtype, **kwargs: Any) -> Any:
        norm = RMSNorm(HIDDEN, eps=1e-5, dtype=dtype, **kwargs)
        norm.weight.data.copy_(torch.linspace(0.5, 2, HIDDEN))
        return norm

    with set_current_vllm_config(
        VllmConfig(compilation_config=CompilationConfig(custom_ops=list(CPU_CUSTOM_OPS)))
    ):
        yield make


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The native forwards that were taken."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    taken: list[str] = []
    native = RMSNorm.forward_native

    def noting(norm: RMSNorm, *args: torch.Tensor) -> Any:
        taken.append("native")
        return native(norm, *args)

    monkeypatch.setattr(RMSNorm, "forward_native", noting)
    return taken


def reference(x: torch.Tensor, weight: torch.Tensor, size: int = HIDDEN) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps) in float64; the mean over the first `size`."""
    wide = x.double()
    return wide / (wide[..., :size].square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, HIDDEN), (33, HIDDEN), (5, 3, HIDDEN)])
def test_the_kernel_gives_the_norm_and_leaves_its_input_alone(
    norm_of: Any, used: list[str], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    norm = norm_of(dtype)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = x.clone()
    rounding = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(norm(x).double(), reference(before, norm.weight), rtol=rounding, atol=rounding)
    assert torch.equal(x, before)
    assert used == []


def test_with_a_residual_the_sum_is_normed_and_returned(norm_of: Any, used: list[str]) -> None:
    norm = norm_of(torch.float32)
    x, residual = torch.randn(2, 7, HIDDEN, generator=torch.Generator().manual_seed(2)).unbind(0)
    added = x + residual
    out, handed_on = norm(x.clone(), residual.clone())
    torch.testing.assert_close(out.double(), reference(added, norm.weight), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(handed_on, added)
    assert used == []


def test_unsupported_inputs_use_vllms_norm(norm_of: Any, used: list[str]) -> None:
    norm, wide = (
        norm_of(torch.float32),
        torch.randn(7, 3 * HIDDEN, generator=torch.Generator().manual_seed(3)),
    )
    columns = wide[:, HIDDEN : 2 * HIDDEN]  # q out of a q, k, v product, say
    torch.testing.assert_close(norm(columns).double(), reference(columns, norm.weight), rtol=1e-5, atol=1e-5)
    assert used == ["native"]
    out, _ = norm(columns.clone(), wide[:, :HIDDEN])
    torch.testing.assert_close(
        out.double(), reference(columns + wide[:, :HIDDEN], norm.weight), rtol=1e-5, atol=1e-5
    )
    half = columns.clone().to(torch.bfloat16)
    torch.testing.assert_close(norm(half).double(), reference(half, norm.weight), rtol=2**-7, atol=2**-7)
    part = norm_of(torch.float32, var_hidden_size=HIDDEN // 2)
    torch.testing.assert_close(
        part(columns.clone()).double(), reference(columns, part.weight, HIDDEN // 2), rtol=1e-5, atol=1e-5
    )
    assert used == ["native"] * 4
