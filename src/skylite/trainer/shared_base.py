"""Several policies on one frozen base: `skylite sweep` and `skylite service` train them in turn.

A policy of a shared base is a Trainer, as that of a lone run. Its parameters, checkpoints and adapters have
the bits that it would get alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from skylite.config.resolved import Resolved
from skylite.config.train import TrainConfig
from skylite.errors import ConfigError
from skylite.model.fast_path_check import enable_shortcuts
from skylite.model.policy import Policy, TeacherAdapter, add_policy, load_policy, remove_policy
from skylite.model.process_group import Dist
from skylite.trainer.trainer import Trainer, make_trainer


@dataclass(frozen=True, slots=True)
class SharedBase:
    """The base, and the trainers of the policies on it. All ranks call each method in the same order."""

    base: Policy
    """How the model runs. It has no parameters of its own."""
    choices: list[str]
    """A sentence per shortcut: used or not, and why."""
    dist: Dist
    trainers: dict[str, Trainer] = field(default_factory=dict)
    """By the policy's name."""

    def add_policy(
        self,
        name: str,
        config: TrainConfig,
        warm_start: Path | None = None,
        teacher: TeacherAdapter | None = None,
    ) -> Trainer:
        """A new policy with its optimizers, initialised from the config's seed or the adapter `warm_start`.

        Of `config`, what concerns the base does not count. Raises ConfigError if the name is taken, and
        ModelError if the model cannot be adapted so.
        """
        if name in self.trainers:
            raise ConfigError(f"The base already has a policy {name!r}.", "Choose another name.")
        policy = add_policy(self.base, config, warm_start, teacher, self.dist)
        try:
            self.trainers[name] = make_trainer(policy, config, self.dist)
        except Exception:  # such as out of memory
            remove_policy(policy)
            raise
        return self.trainers[name]

    def remove_policy(self, name: str) -> None:
        """Remove a policy. Its memory is free once the caller has dropped its Trainer too.

        Raises ConfigError if there is no such policy.
        """
        if name not in self.trainers:
            names = ", ".join(self.trainers) or "none"
            raise ConfigError(f"The base has no policy {name!r}.", f"Its policies: {names}.")
        remove_policy(self.trainers.pop(name).policy)


def load_shared_base(resolved: Resolved, config: TrainConfig, probe: list[int], dist: Dist) -> SharedBase:
    """Load the base of `resolved`, and choose its shortcuts on `probe`, a sequence of token ids.

    All ranks call it. `config`: settings of the base, and a first LoRA configuration to check the model with.
    """
    policy, choices = enable_shortcuts(load_policy(resolved, config, dist), probe)
    remove_policy(policy)
    bare = replace(policy, lora={}, target_modules=[], target_parameters=[])
    return SharedBase(bare, choices, dist)
