"""Threads of a rank while vLLM starts."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from skylite.model.process_group import half_the_threads


@pytest.mark.parametrize(("own", "during_start"), [(4, 2), (1, 1)])
def test_half_the_threads_until_vllm_started_or_failed(own: int, during_start: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(own)
    try:
        with suppress(ValueError), half_the_threads():
            assert torch.get_num_threads() == during_start
            int("a start that fails")
        assert torch.get_num_threads() == own
    finally:
        torch.set_num_threads(before)
