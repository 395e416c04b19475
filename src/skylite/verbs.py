"""What the trainer's verbs take and give, as the service's front and the ranks share it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from skylite.errors import ConfigError, DataError
from skylite.types import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class LossForm:
    """What a loss reads."""

    inputs: tuple[str, ...]
    """Values of each target token."""
    settings: Mapping[str, float]
    """Numbers of the call, with their defaults."""


OF_SAMPLED = ("logprobs", "advantages")
LOSS_FORMS = {
    "cross_entropy": LossForm(("weights",), {}),
    "importance_sampling": LossForm(OF_SAMPLED, {}),
    "ppo": LossForm(OF_SAMPLED, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": LossForm(OF_SAMPLED, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": LossForm(OF_SAMPLED, {"beta": 0.05}),
}
"""Tinker's losses, by its names and with its defaults. algorithms/token_losses.py computes them."""


def loss_settings(loss: str, given: Mapping[str, float]) -> dict[str, float]:
    """The numbers that the loss takes, with its defaults. Raises ConfigError."""
    if loss not in LOSS_FORMS:
        raise ConfigError(f"The loss {loss!r} is not offered.", f"Use one of {', '.join(LOSS_FORMS)}.")
    known = LOSS_FORMS[loss].settings
    if unknown := sorted(given.keys() - known.keys()):
        raise ConfigError(
            f"The loss {loss} has no setting {unknown[0]}.", f"It has: {', '.join(known) or 'none'}."
        )
    return {**known, **given}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Datum:
    """A sequence to score: Tinker's Datum."""

    token_ids: IntArray
    """[N] what the model reads."""
    targets: IntArray
    """[N * width] after token i, the logprobs of targets[i * width : (i + 1) * width] are wanted."""
    width: int = 1
    """Targets of each token."""
    inputs: Mapping[str, FloatArray]
    """Values of the targets, [N * width] each: what the loss reads (LossForm.inputs)."""

    @classmethod
    def of_text(cls, ids: Sequence[int], **inputs: Sequence[float]) -> Datum:
        """A text whose tokens are each the target of those before it. `inputs`: of all tokens but the first.

        Without `weights`, cross_entropy counts every token once.
        """
        arrays = {name: np.asarray(values, dtype=np.float32) for name, values in inputs.items()}
        tokens = np.asarray(ids, dtype=np.int64)
        return cls(token_ids=tokens[:-1], targets=tokens[1:], inputs=arrays)

    def checked(self, loss: str, vocabulary: int) -> Datum:
        """The datum with what the loss reads. Raises DataError."""
        length, count = len(self.token_ids), len(self.targets)
        if not length or count != length * self.width:
            raise DataError(f"A datum has {count} targets for {length} tokens.", "Give one for each token.")
        for ids in (self.token_ids, self.targets):
            if ids.min() < 0 or ids.max() >= vocabulary:
                raise DataError(
                    f"A datum has the token {int(ids.max())}; the model's ids are below {vocabulary}.",
                    "Encode it with the model's own tokenizer.",
                )
        inputs = {}
        for name in LOSS_FORMS[loss].inputs:
            if name not in self.inputs and name != "weights":
                raise DataError(f"A datum has no {name}.", f"The loss {loss} reads it: one for each target.")
            inputs[name] = self.inputs.get(name, np.ones(count, dtype=np.float32))
            if len(inputs[name]) != count:
                raise DataError(
                    f"A datum has {len(inputs[name])} values of {name} for {count} targets.",
                    "Give one for each target.",
                )
        return replace(self, inputs=inputs)

    def to_message(self) -> dict[str, Any]:
        return {
            "token_ids": self.token_ids,
            "targets": self.targets,
            "width": self.width,
            "inputs": dict(self.inputs),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """An update of AdamW, with Tinker's defaults."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """A gradient with a larger norm is scaled down to it. 0: none is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What `forward` and `forward_backward` give."""

    logprobs: list[FloatArray]
    """Of each datum [N * width], in nats."""
    loss: float
    """The sum over all targets."""
