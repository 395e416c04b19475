"""Sums over the segments of a flat row of tokens. A segment is a trajectory: all tokens its calls sampled.

`segments` [C] int64 holds the segment of each token, 0 .. num_segments - 1.
"""

from __future__ import annotations

from torch import Tensor


def segment_sum(values: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """[C] -> [S] the sum over each segment."""
    return values.new_zeros(num_segments).index_add(0, segments, values)


def segment_mean(values: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """[C] -> [S] the mean over each segment. Every segment must have a token."""
    counts = segment_sum(values.new_ones(values.shape), segments, num_segments)
    return segment_sum(values, segments, num_segments) / counts
