"""Settings of the optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from skylite.config.base_section import UPDATE, Flag, Section


class OptimConfig(Section):
    """AdamW and its learning rate."""

    lr: Annotated[float, Flag("--lr", UPDATE)] = Field(2e-5, gt=0)
    """Learning rate. LoRA needs about ten times the rate of full fine-tuning; below 5e-6 skylite warns."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warmup: constant, or falling to zero at the last step."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warmup. 0: none."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay of the gradient mean."""
    beta2: float = Field(0.99, ge=0, lt=1)
    """AdamW's decay of the squared gradient mean."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay. 0: none."""
    lora_plus_ratio: float = Field(1.0, gt=0)
    """LoRA+ (arXiv 2402.12354): learning rate of B divided by that of A. 1: plain LoRA."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients with a larger norm are scaled down to it."""
