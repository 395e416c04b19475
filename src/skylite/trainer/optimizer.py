"""The optimizer: AdamW over one flat gradient, with its learning-rate schedule and gradient clipping.

The policy's adapter has one, PPO's critic another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from skylite.config.train import OptimConfig
from skylite.errors import TrainingDiverged
from skylite.model.process_group import Dist

RATE_SETTINGS = {"policy": "optim.lr", "critic": "critic.lr"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatAdamW:
    """Replicated float32 parameters and their AdamW, whose moments are float32 too."""

    name: str
    """A key of RATE_SETTINGS."""
    params: dict[str, nn.Parameter]
    """By name, sorted. Each `.grad` is a view of `grads`."""
    grads: Tensor
    """[P] float32, all gradients in one tensor: one all-reduce, one norm."""
    adamw: torch.optim.AdamW
    """Each param group keeps its full learning rate as "peak_lr"."""
    max_grad_norm: float
    offload: bool = False
    """Keep the moments in CPU memory between updates."""

    def set_rate(self, step: int, num_steps: int, config: OptimConfig) -> float:
        """Set the learning rate of every param group for `step`. Returns that of the first group."""
        factor = rate_factor(step, num_steps, config)
        for group in self.adamw.param_groups:
            group["lr"] = group["peak_lr"] * factor
        return float(self.adamw.param_groups[0]["lr"])

    def update(self, dist: Dist) -> float:
        """Sum the gradients over ranks, clip by their global norm, update. Returns the norm before clipping.

        Raises TrainingDiverged, and leaves the weights unchanged, if the norm is not finite.
        """
        dist.all_reduce_sum_(self.grads)
        norm = float(
            torch.linalg.vector_norm(
                self.grads, dtype=torch.float64 if self.grads.device.type == "cpu" else torch.float32
            )
        )
        if not np.isfinite(norm):
            raise TrainingDiverged(
                f"the gradient of the {self.name} is not finite (norm {norm})",
                restart_hint(RATE_SETTINGS[self.name], self.adamw.param_groups[0]["peak_lr"]),
            )
        if norm > self.max_grad_norm:
            self.grads.mul_(self.max_grad_norm / norm)
        self._move_moments(self.grads.device)
        self.adamw.step()
        self.offload_moments()
        return norm

    def offload_moments(self) -> None:
        """Move the moments to CPU memory, if `offload` is on."""
        self._move_moments(torch.device("cpu"))

    def _move_moments(self, device: torch.device) -> None:
        if not self.offload:
            return
        for state in self.adamw.state.values():
            state.update({key: value.to(device) for key, value in state.items() if value.dim() > 0})


def make_optimizer(
    name: str,
    params: Mapping[str, nn.Parameter],
    lr: float,
    max_grad_norm: float,
    config: OptimConfig,
    b_ratio: float = 1.0,
    offload: bool = False,
) -> FlatAdamW:
    """AdamW over `params`. B matrices get `b_ratio` times the learning rate (LoRA+, arXiv 2402.12354)."""
    named = dict(sorted(params.items()))
    fast = [p for n, p in named.items() if is_b_matrix(n) and b_ratio != 1.0]
    slow = [p for n, p in named.items() if not (is_b_matrix(n) and b_ratio != 1.0)]
    groups = [
        {"params": part, "lr": rate, "peak_lr": rate}
        for part, rate in ((slow, lr), (fast, lr * b_ratio))
        if part
    ]
    adamw = torch.optim.AdamW(
        groups, lr=lr, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay, fused=True
    )
    return FlatAdamW(
        name=name,
        params=named,
        grads=_flat_grads(list(named.values())),
        adamw=adamw,
        max_grad_norm=max_grad_norm,
        offload=offload,
    )


def restart_hint(setting: str, rate: float) -> str:
    """Advice after numbers that are not finite: the end of a sentence."""
    return f"start a new run from the last adapter (--from-adapter) with a lower {setting} (now {rate:g})."


def is_b_matrix(parameter: str) -> bool:
    """Whether a parameter is a LoRA B matrix, which starts at zero."""
    return ".lora_B." in parameter or ".lora_embedding_B." in parameter


def _flat_grads(params: list[nn.Parameter]) -> Tensor:
    """Give each parameter a view of one flat tensor as its gradient. Autograd accumulates in place."""
    sizes = [p.numel() for p in params]
    flat = torch.zeros(sum(sizes), device=params[0].device)
    for param, part in zip(params, torch.split(flat, sizes), strict=True):
        param.grad = part.view_as(param)
    return flat


def rate_factor(step: int, num_steps: int, config: OptimConfig) -> float:
    """Factor on the full learning rate at `step` (1-based): a linear warmup, then `config.schedule`.

    The linear and cosine schedules reach zero right after the last step.
    """
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    done = (step - 1 - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    if config.schedule == "linear":
        return 1 - done
    if config.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    return 1.0
