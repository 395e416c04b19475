"""Parameters that learn together: one flat gradient, one norm, one AdamW. The policy's adapter is one, PPO's critic another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from skylite.config.train import OptimConfig
from skylite.errors import TrainingDiverged
from skylite.model.distributed import Dist

RATE_SETTINGS = {"policy": "optim.lr", "critic": "critic.lr"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatAdamW:
    """fp32 parameters that every rank holds whole, and their optimizer (fp32 moments)."""

    name: str
    """A key of RATE_SETTINGS."""
    params: dict[str, nn.Parameter]
    """By name, sorted. Their `.grad` are views of `grads`."""
    grads: Tensor
    adamw: torch.optim.AdamW
    """Param groups carry their rate at full height as "peak_lr"."""
    max_grad_norm: float
    offload: bool = False
    """Between updates the optimizer's moments wait in the machine's memory."""

    def set_rate(self, step: int, num_steps: int, config: OptimConfig) -> float:
        """Give every param group its rate for `step`; returns the first group's."""
        factor = rate_factor(step, num_steps, config)
        for group in self.adamw.param_groups:
            group["lr"] = group["peak_lr"] * factor
        return float(self.adamw.param_groups[0]["lr"])

    def update(self, dist: Dist, step: int) -> float:
        """Sum the gradients over ranks, clip by the exact global norm, update. Returns the norm before clipping.

        Raises TrainingDiverged, and leaves the weights alone, when it is not finite.
        """
        dist.all_reduce_sum_(self.grads)
        norm = float(
            torch.linalg.vector_norm(
                self.grads, dtype=torch.float64 if self.grads.device.type == "cpu" else torch.float32
            )
        )
        if not np.isfinite(norm):
            raise TrainingDiverged(
                f"The gradient of the {self.name} in step {step} is not finite (norm {norm}); the update was not applied.",
                f"Start again from the last checkpoint's adapter (--from-adapter) with a lower {RATE_SETTINGS[self.name]} (now "
                f"{self.adamw.param_groups[0]['lr']:g}).",
            )
        if norm > self.max_grad_norm:
            self.grads.mul_(self.max_grad_norm / norm)
        self._move_moments(self.grads.device)
        self.adamw.step()
        self.park_moments()
        return norm

    def park_moments(self) -> None:
        """Where they are offloaded: back to the machine's memory."""
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
    """AdamW over `params`; those of B matrices learn at `b_ratio` times the rate (LoRA+, arXiv 2402.12354)."""
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


def is_b_matrix(parameter: str) -> bool:
    """Whether a parameter is the matrix of its LoRA pair that starts at zero."""
    return ".lora_B." in parameter or ".lora_embedding_B." in parameter


def _flat_grads(params: list[nn.Parameter]) -> Tensor:
    """Give each parameter a gradient that is a view of one flat tensor; autograd then accumulates into it in place."""
    sizes = [p.numel() for p in params]
    flat = torch.zeros(sum(sizes), device=params[0].device)
    for param, part in zip(params, torch.split(flat, sizes), strict=True):
        param.grad = part.view_as(param)
    return flat


def rate_factor(step: int, num_steps: int, config: OptimConfig) -> float:
    """Share of the full rate at `step` (1-based): a linear warmup, then constant, or a fall that reaches zero right after the last step."""
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    done = (step - 1 - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    if config.schedule == "linear":
        return 1 - done
    if config.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    return 1.0
