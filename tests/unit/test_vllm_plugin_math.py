"""The plugin's LoRA arithmetic against a plain computation, one row at a time."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from skylite.engine.vllm.plugin.lora_math import BASE, add_expanded, add_lora, group_rows, merge_slices

SLOTS = {
    "one adapter": [0, 0, 0, 0, 0],
    "base only": [BASE] * 5,
    "last slot and base": [1, BASE, 1, 1, BASE],
    "two versions and base, interleaved": [0, 1, BASE, 1, 0, BASE, 2, 0],
    "runs": [0, 0, BASE, BASE, 1, 1, 1],
    "one row": [2],
}


def naive(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slots: list[int], scale: float
) -> torch.Tensor:
    """Row by row: y_t + scale * B A x_t with the row's adapter. Base rows stay unchanged."""
    rows = [
        row if s == BASE else row + scale * (b[s, 0] @ (a[s, 0] @ x[t]))
        for t, (row, s) in enumerate(zip(y, slots, strict=True))
    ]
    return torch.stack(rows)


def matrices(
    inputs: int, outputs: int, rank: int = 3, num_slots: int = 3
) -> tuple[torch.Tensor, torch.Tensor]:
    """a [S, 1, R, I] and b [S, 1, O, R] of random adapters."""
    return torch.randn(num_slots, 1, rank, inputs, dtype=torch.float64), torch.randn(
        num_slots, 1, outputs, rank, dtype=torch.float64
    )


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS.keys())
def test_every_row_gets_its_adapter(slots: list[int], scale: float) -> None:
    torch.manual_seed(0)
    a, b = matrices(6, 5)
    x, y = torch.randn(len(slots), 6, dtype=torch.float64), torch.randn(len(slots), 5, dtype=torch.float64)
    expected = naive(y, x, a, b, slots, scale)
    add_lora(y, x, a, b, group_rows(slots), scale)
    torch.testing.assert_close(y, expected)


def test_base_rows_are_bit_equal() -> None:
    torch.manual_seed(0)
    slots = [1, BASE, 0, BASE, 1]
    a, b = matrices(6, 5)
    x, y = torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 5, dtype=torch.float64)
    before = y.clone()
    add_lora(y, x, a, b, group_rows(slots))
    base = torch.tensor([s == BASE for s in slots])
    assert torch.equal(y[base], before[base])
    assert not (y[~base] == before[~base]).all(dim=1).any()


@pytest.mark.parametrize("slots", [[0, 0, 0, 0], [0, BASE, 1, 0]], ids=["one adapter", "mixed"])
def test_a_view_of_columns_is_updated_in_place(slots: list[int]) -> None:
    """q, k and v share one output tensor; each is a range of its columns."""
    torch.manual_seed(0)
    a, b = matrices(6, 5)
    x, complete = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 12, dtype=torch.float64)
    expected = complete.clone()
    expected[:, 4:9] = naive(complete[:, 4:9], x, a, b, slots, 1.0)
    add_lora(complete.narrow(1, 4, 5), x, a, b, group_rows(slots))
    torch.testing.assert_close(complete, expected)


@pytest.mark.parametrize("width", [4, 8], ids=["layer narrower than the adapter", "layer padded"])
def test_padding_on_either_side_is_unchanged(width: int) -> None:
    torch.manual_seed(0)
    a, b = matrices(6, 5)
    x, y = torch.randn(2, 6, dtype=torch.float64), torch.zeros(2, width, dtype=torch.float64)
    expected = torch.zeros(2, 8, dtype=torch.float64)
    expected[:, :5] = naive(torch.zeros(2, 5, dtype=torch.float64), x, a, b, [1, 1], 1.0)
    add_lora(y, x, a, b, group_rows([1, 1]))
    torch.testing.assert_close(y[:, :5], expected[:, : min(width, 5)])
    assert not y[:, 5:].any()


def test_logits_wider_than_the_adapter_are_updated_in_their_dtype() -> None:
    torch.manual_seed(0)
    a, b = (m.to(torch.bfloat16) for m in matrices(6, 5))
    x, y = torch.randn(3, 6).to(torch.bfloat16), torch.zeros(3, 5, dtype=torch.float32)
    slots = [0, BASE, 1]
    expected = naive(y, x.float(), a.float(), b.float(), slots, 1.0)
    add_lora(y, x, a, b, group_rows(slots))
    torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)


def test_an_embedding_only_applies_b() -> None:
    """vLLM looks up the rows of A by token and passes them in."""
    torch.manual_seed(0)
    _, b = matrices(6, 5)
    rows_of_a, y = torch.randn(3, 3, dtype=torch.float64), torch.zeros(3, 5, dtype=torch.float64)
    for group in group_rows([2, BASE, 0]):
        add_expanded(y, rows_of_a[group.rows], b, group)
    torch.testing.assert_close(
        y, torch.stack([b[2, 0] @ rows_of_a[0], torch.zeros(5, dtype=torch.float64), b[0, 0] @ rows_of_a[2]])
    )


def test_groups_contain_every_adapter_row_once_and_consecutive_rows_as_slices() -> None:
    groups = group_rows([1, 1, BASE, 0, BASE, 0])
    assert [g.slot for g in groups] == [0, 1]
    assert isinstance(groups[0].rows, torch.Tensor)
    assert groups[0].rows.tolist() == [3, 5]
    assert groups[1].rows == slice(0, 2)
    assert group_rows([BASE, BASE]) == ()


def test_register_imports_nothing_while_switched_off() -> None:
    """vLLM loads the plugin in every process: when off, it must cost and change nothing."""
    code = (
        "import os, sys; os.environ.pop('SKYLITE_CPU_LORA', None); "
        "import skylite.engine.vllm.plugin as plugin; "
        "plugin.register(); "
        "print({'vllm', 'torch'} & set(sys.modules))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "set()"
    )


def test_merged_weights_equal_base_plus_adapter() -> None:
    """A fused layer of two slices of different widths, slot 1 of 2."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 4, generator=generator)
    a = [torch.randn(2, 1, 2, 4, generator=generator) for _ in range(2)]
    b = [torch.randn(2, 1, width, 2, generator=generator) for width in (3, 2)]
    x = torch.randn(6, 4, generator=generator)
    kept = weight.clone()
    merged = merge_slices(weight, a, b, slot=1)
    expected = x @ weight.T + torch.cat(
        [x @ a[0][1, 0].T @ b[0][1, 0].T, x @ a[1][1, 0].T @ b[1][1, 0].T], dim=1
    )
    torch.testing.assert_close(x @ merged.T, expected)
    assert torch.equal(weight, kept)
