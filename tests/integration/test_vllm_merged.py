"""Merged weights inside vLLM's LoRA layers: when vLLM uses them, and never an older adapter's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm

IN, OUT, RANK, SLOTS = 8, 6, 2, 2


@dataclass
class Batch:
    """Stands where vLLM's LoRA wrapper does: says which adapter the step's rows use."""

    slot: int | None = 0

    def single_slot(self, num_rows: int) -> int | None:
        return self.slot


@dataclass
class Base:
    skylite_weight: torch.Tensor


@dataclass
class Layer:
    """What `merged_product` looks at of a LoRA layer."""

    base_layer: Base
    lora_a_stacked: tuple[torch.Tensor, ...]
    lora_b_stacked: tuple[torch.Tensor, ...]
    punica_wrapper: Batch = field(default_factory=Batch)
    tp_size: int = 1

    def reference(self, slot: int, x: torch.Tensor) -> torch.Tensor:
        return (
            x
            @ (
                self.base_layer.skylite_weight.float()
                + self.lora_b_stacked[0][slot, 0] @ self.lora_a_stacked[0][slot, 0]
            ).T
        )


@pytest.fixture
def merged() -> Any:
    """The module under test; vLLM's kernels are loaded first, as in its own processes."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    from skylite.engine.vllm.plugin import merged_weights as merged

    return merged


@pytest.fixture
def layer() -> Layer:
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(SLOTS, 1, RANK, IN, generator=generator),
        torch.randn(SLOTS, 1, OUT, RANK, generator=generator),
    )
    return Layer(Base(torch.randn(OUT, IN, generator=generator).to(torch.bfloat16)), (a,), (b,))


X = torch.linspace(-1, 1, 3 * IN).reshape(3, IN)


def test_a_batch_of_one_adapter_gets_base_plus_adapter_and_another_batch_none(
    merged: Any, layer: Layer
) -> None:
    product = merged.merged_product(layer, 3)
    torch.testing.assert_close(product(X, None), layer.reference(0, X))
    bias = torch.arange(OUT, dtype=torch.float32)
    torch.testing.assert_close(product(X, bias), layer.reference(0, X) + bias)
    layer.punica_wrapper.slot = None
    assert merged.merged_product(layer, 3) is None


def test_a_second_adapter_is_merged_only_after_the_first_copy_paid_off(merged: Any, layer: Layer) -> None:
    merged.merged_product(layer, 3)
    layer.punica_wrapper.slot = 1
    products = [merged.merged_product(layer, 3) for _ in range(merged.MIN_PASSES)]
    assert products[:-1] == [None] * (merged.MIN_PASSES - 1)
    torch.testing.assert_close(products[-1](X, None), layer.reference(1, X))


def test_a_refilled_slot_drops_its_merged_copy(merged: Any) -> None:
    """By vLLM's own class and its own way of writing an adapter."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    merged.install()
    generator = torch.Generator().manual_seed(1)
    real = BaseLinearLayerWithLoRA.__new__(BaseLinearLayerWithLoRA)
    torch.nn.Module.__init__(real)
    real.__dict__ |= {
        "base_layer": Base(torch.randn(OUT, IN, generator=generator)),
        "lora_a_stacked": (torch.zeros(SLOTS, 1, RANK, IN),),
        "lora_b_stacked": (torch.zeros(SLOTS, 1, OUT, RANK),),
        "punica_wrapper": Batch(),
        "tp_size": 1,
        "n_slices": 1,
    }
    for _ in range(2):
        a, b = torch.randn(RANK, IN, generator=generator), torch.randn(OUT, RANK, generator=generator)
        real.set_lora(0, a, b)
        torch.testing.assert_close(real._apply_sync(X), X @ (real.base_layer.skylite_weight + b @ a).T)


def test_a_copy_is_in_bfloat16_only_if_that_is_exact(merged: Any) -> None:
    published = torch.randn(4, 4).to(torch.bfloat16).float()
    assert merged.lossless_bf16(published).dtype == torch.bfloat16
    finer = published + 2**-20
    assert torch.equal(merged.lossless_bf16(finer), finer)
