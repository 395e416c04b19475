"""The wrapper that vLLM's LoRA layers call on CPU. Only vLLM imports it, by the name from `register`."""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from skylite.engine.vllm.plugin.lora_math import RowGroup, add_expanded, add_lora, group_rows


class DensePunicaWrapperCPU(PunicaWrapperCPU):  # type: ignore[misc]  # vLLM is untyped to mypy
    """LoRA by dense products over the rows of each adapter slot; base rows stay unchanged.

    The results equal those of one adapter at a time. `update_metadata` computes the row groups once per
    forward pass, not once per layer.
    """

    _token_groups: tuple[RowGroup, ...] = ()
    _sampler_groups: tuple[RowGroup, ...] = ()

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        """Store the mapping of rows to adapters for the next forward pass."""
        super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
        self._token_groups = group_rows(self.token_lora_indices.tolist())
        self._sampler_groups = group_rows(self.sampler_indices.tolist())

    def single_slot(self, num_rows: int) -> int | None:
        """The slot of all rows of the batch; None when rows differ or use the base model."""
        groups = self._token_groups
        return groups[0].slot if len(groups) == 1 and groups[0].rows == slice(0, num_rows) else None

    def groups_of(self, rows: torch.Tensor) -> tuple[RowGroup, ...]:
        """The row groups among `rows` [N] of the batch, numbered from 0."""
        return group_rows(self.token_lora_indices[rows].tolist()) if self._token_groups else ()

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        """y [T, sum(output_slices)] += LoRA of x [T, I], per slice of a fused layer (q, k, v or gate, up)."""
        y = y.view(-1, y.shape[-1])
        x = x.view(-1, x.shape[-1])
        start = 0
        for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            add_lora(y.narrow(1, start, width), x, a, b, self._token_groups, scale)
            start += width

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """y [T, H] += x [T, R] B^T, where x contains the rows of A that vLLM has already looked up."""
        for group in self._token_groups:
            add_expanded(y, x[group.rows], lora_b_stacked, group)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        **kwargs: Any,
    ) -> None:
        """y [N, V] += LoRA of x [N, H], for the N sampled positions.

        Raises NotImplementedError for prompt logprobs in a batch of several adapters: vLLM does not provide
        the mapping of those rows to adapters.
        """
        y = y.view(-1, y.shape[-1])
        x = x.view(-1, x.shape[-1])
        add_lora(y, x, lora_a_stacked, lora_b_stacked, self._logit_groups(x.shape[0]), scale)

    def _logit_groups(self, num_rows: int) -> tuple[RowGroup, ...]:
        slots = self.sampler_indices
        if num_rows == len(slots):
            return self._sampler_groups
        if bool((slots == slots[0]).all()):
            return group_rows([int(slots[0])] * num_rows)
        raise NotImplementedError(
            "prompt_logprobs with LoRA on lm_head need a batch with one adapter; "
            "send them while no other request runs."
        )
