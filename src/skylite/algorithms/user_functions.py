"""The advantage and the policy loss that the settings name: built in, or the user's as FILE.py:function.

A user's function is called like a built-in, and its result is checked: a wrong shape would broadcast and
train something else.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from skylite.algorithms.advantages import (
    COMPONENT_ADVANTAGES,
    GROUP_ADVANTAGES,
    Components,
    pass_at_k,
    remax,
)
from skylite.algorithms.losses import POLICY_LOSSES, LossInputs
from skylite.config.algorithm import AlgorithmConfig
from skylite.config.rollout import GREEDY
from skylite.errors import RunFailed
from skylite.user_functions import (
    ADVANTAGE,
    POLICY_LOSS,
    FunctionKind,
    UserCodeFailed,
    is_program,
    load_function,
    user_code,
)

GroupAdvantage = Callable[[Tensor, Tensor, Components | None], Tensor]
"""(rewards [N, G], lengths [N, G] in tokens, components if it asks for them) -> advantages [N, G]."""
PolicyLoss = Callable[[LossInputs, AlgorithmConfig], Tensor]
"""-> loss [C]."""
_hashes: dict[str, str] = {}
"""FILE.py:function -> sha256 of the file that the user allowed; the trainer sets it at its start."""


def load_functions(config: AlgorithmConfig, programs: Mapping[str, str]) -> None:
    """Load both, so that a broken file ends the trainer at its start. Raises ConfigError.

    `programs`: spec -> sha256 that the file must have.
    """
    _hashes.update(programs)
    asks_for_components(config.advantage)
    policy_loss(config.policy_loss)


def group_advantage(config: AlgorithmConfig) -> GroupAdvantage:
    """The advantage function over groups. Not for advantages per token: gae, reinforce++ and otb."""
    spec = config.advantage
    if is_program(spec):
        return _load(spec, ADVANTAGE).advantage
    if spec == "remax":
        return _of_greedy
    if asks_for_components(spec):
        return partial(_of_components, COMPONENT_ADVANTAGES[spec], config.component_advantages)
    if spec == "pass_at_k":
        return partial(_of_rewards, partial(pass_at_k, k=config.pass_k))
    return partial(_of_rewards, GROUP_ADVANTAGES[spec])


def asks_for_components(spec: str) -> bool:
    """Whether the advantage needs the components of the rewards."""
    if is_program(spec):
        return _load(spec, ADVANTAGE).takes_components
    return spec == "remax" or spec in COMPONENT_ADVANTAGES


def _of_greedy(rewards: Tensor, lengths: Tensor, components: Components | None) -> Tensor:
    assert components is not None
    return remax(rewards, components[GREEDY])


def _of_rewards(
    function: Callable[[Tensor, Tensor], Tensor], rewards: Tensor, lengths: Tensor, _: Components | None
) -> Tensor:
    return function(rewards, lengths)


def _of_components(
    function: Callable[[Components, Mapping[str, str]], Tensor],
    formulas: Mapping[str, str],
    _: Tensor,
    lengths: Tensor,
    components: Components | None,
) -> Tensor:
    assert components is not None
    return function(components, formulas)


def policy_loss(spec: str) -> PolicyLoss:
    """The loss function per token."""
    return _load(spec, POLICY_LOSS).policy_loss if is_program(spec) else POLICY_LOSSES[spec]


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A FILE.py:function. Its methods raise RunFailed, which names file and function."""

    spec: str
    kind: FunctionKind
    function: Callable[..., Any]

    @property
    def takes_components(self) -> bool:
        """Whether it has a parameter of that name."""
        return "components" in inspect.signature(self.function).parameters

    def advantage(self, rewards: Tensor, lengths: Tensor, components: Components | None) -> Tensor:
        """[N, G] float32."""
        # Copies: the step needs them again, and the function may change them in place.
        more = {"components": copy.deepcopy(components)} if self.takes_components else {}
        found = self._call(rewards.clone(), lengths.clone(), **more)
        return self._checked(found, rewards.shape, inputs=[rewards]).float()

    def policy_loss(self, x: LossInputs, config: AlgorithmConfig) -> Tensor:
        """[C]"""
        if not len(x.policy_logprobs):  # an empty micro-batch, for which max() and similar calls would fail
            return x.policy_logprobs * x.advantages
        found = self._call(x, config)
        inputs = [x.policy_logprobs, x.old_logprobs, x.advantages]
        loss = self._checked(found, x.advantages.shape, inputs)
        if x.policy_logprobs.requires_grad and not loss.requires_grad:
            raise self._error("returned a loss without a gradient", "Compute it from inputs.policy_logprobs.")
        return loss

    def _call(self, *arguments: Any, **named: Any) -> Any:
        try:
            with user_code():
                return self.function(*arguments, **named)
        except UserCodeFailed as error:
            raise self._error(f"raised {error}", "Fix that file.") from error.__cause__ or error

    def _checked(self, value: Any, shape: torch.Size, inputs: Sequence[Tensor]) -> Tensor:
        """The value, if it is a tensor of that shape.

        Non-finite numbers made of non-finite inputs pass: the anomaly rules judge those.
        """
        wanted = f"Return a tensor of the shape {list(shape)}, one number for each input; take no mean."
        if not isinstance(value, Tensor):
            raise self._error(f"returned {type(value).__name__}, not a tensor", wanted)
        if value.shape != shape:
            raise self._error(f"returned the shape {list(value.shape)}, not {list(shape)}", wanted)
        bad = int((~torch.isfinite(value.float())).sum())
        if bad and all(bool(torch.isfinite(x).all()) for x in inputs):
            what = f"returned {bad} of {value.numel()} numbers that are NaN or infinite"
            raise self._error(what, "Guard its divisions and logarithms.")
        return value

    def _error(self, what: str, hint: str) -> RunFailed:
        file, _, name = self.spec.rpartition(":")
        return RunFailed(f"The {self.kind.name} {name} in {file} {what}.", hint)


@cache
def _load(spec: str, kind: FunctionKind) -> UserFunction:
    """Cached, so that a process runs each file once."""
    return UserFunction(spec, kind, load_function(spec, kind, _hashes.get(spec)))
