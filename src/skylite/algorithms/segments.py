"""Sums over the completions that a flat row of tokens consists of. `sequences` [C]: which completion a token belongs to."""

from __future__ import annotations

from torch import Tensor


def sequence_sum(values: Tensor, sequences: Tensor, num_sequences: int) -> Tensor:
    """[C] -> [S]."""
    return values.new_zeros(num_sequences).index_add(0, sequences, values)


def sequence_mean(values: Tensor, sequences: Tensor, num_sequences: int) -> Tensor:
    """[C] -> [S]; every completion has a token."""
    return sequence_sum(values, sequences, num_sequences) / sequence_sum(
        values.new_ones(values.shape), sequences, num_sequences
    )
