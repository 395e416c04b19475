"""A Dist of one rank. It imports no test library: `make gpu-check` uses it on machines without one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class OneRank:
    """A Dist of one rank without a process group."""

    device: torch.device
    dp_rank: int = 0
    dp_size: int = 1
    is_main: bool = False

    def all_reduce_sum_(self, values: Tensor) -> Tensor:
        return values

    def share(self, value: Any) -> Any:
        return value

    all_reduce_max_ = all_gather = broadcast_ = all_reduce_sum_
