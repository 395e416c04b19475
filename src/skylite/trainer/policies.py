"""The policies of the service or of a notebook: the verbs by the policy's name, with values that a socket
carries."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skylite.adapters.manifest import Canary
from skylite.config.lora import LoraConfig
from skylite.config.train import RunConfig
from skylite.errors import ConfigError, SkyliteError, convert_os_errors
from skylite.model.policy import Policy
from skylite.model.process_group import Dist
from skylite.processes.file_tree import remove_tree
from skylite.run.files import swap_paths, temporary_sibling
from skylite.run.run_dir import RunDir
from skylite.trainer import verbs
from skylite.trainer.canary import base_canary_logprobs, canary_logprobs
from skylite.trainer.checkpoint import load_checkpoint, write_checkpoint
from skylite.trainer.micro_batch_memory import resolve_micro_batch_tokens
from skylite.trainer.publish_adapter import write_adapter
from skylite.trainer.shared_base import SharedBase, load_shared_base
from skylite.trainer.trainer import Trainer
from skylite.verbs import AdamParams, Datum


@dataclass(slots=True)
class Policies:
    """A shared base and what may be done with its policies. All ranks call each verb in the same order."""

    base: SharedBase
    run_config: RunConfig
    """Of the base. A policy has a LoRA configuration and a seed of its own."""
    canary: list[list[int]]
    _base_logprobs: list[list[float]] = field(default_factory=list)
    """[S][L - 1] canary logprobs of the base model."""

    def verbs(self) -> dict[str, Callable[..., Any]]:
        """By their names in a command."""
        return {
            "add": self.add,
            "remove": self.remove,
            "forward_backward": self.forward_backward,
            "optim_step": self.optim_step,
            "save": self.save,
            "load": self.load,
            "publish": self.publish,
        }

    def add(self, policy: str, lora: dict[str, Any], seed: int) -> None:
        """A new policy. `lora`: the fields of LoraConfig that differ from the base's."""
        config = self.run_config.config
        own = LoraConfig.model_validate({**config.lora.model_dump(), **lora})
        self.base.add_policy(policy, config.model_copy(update={"lora": own, "seed": seed}))

    def remove(self, policy: str) -> None:
        """Forget the policy, and free its memory."""
        self.base.remove_policy(policy)

    def forward_backward(
        self,
        policy: str,
        data: Sequence[Mapping[str, Any]],
        loss: str,
        settings: Mapping[str, float],
        backward: bool,
    ) -> dict[str, Any]:
        """`data`: Datum.to_message of each."""
        scored = verbs.forward_backward(
            self._trainer(policy), [Datum(**datum) for datum in data], loss, settings, backward=backward
        )
        return {"logprobs": scored.logprobs, "loss": scored.loss}

    def optim_step(self, policy: str, params: Mapping[str, float]) -> float:
        """`params`: the fields of AdamParams. Returns the gradient's norm before clipping."""
        return verbs.optim_step(self._trainer(policy), AdamParams(**params))

    def save(self, policy: str, path: str) -> None:
        """Write the parameters and AdamW's moments as a folder, in place of one that exists."""
        trainer, place = self._trainer(policy), Path(path)

        def write() -> None:
            new = temporary_sibling(place) if place.exists() else place
            write_checkpoint(new, 0, trainer.config, [trainer.optimizer])
            if new != place:
                with convert_os_errors(place):
                    swap_paths(new, place)
                    remove_tree(new)

        self._on_main(write)

    def load(self, policy: str, path: str, optimizer: bool) -> None:
        """Load parameters, and the moments or fresh ones. A gradient that was not used is forgotten."""
        trainer = self._trainer(policy)
        load_checkpoint(Path(path), [trainer.optimizer])
        if not optimizer:
            trainer.optimizer.adamw.state.clear()
        trainer.optimizer.grads.zero_()

    def publish(self, policy: str, version: int) -> None:
        """Write the adapter for the engines as this version, with the canary's logprobs."""
        trainer = self._trainer(policy)
        canary = self._scored_canary(trainer.policy)
        config = self.run_config.model_copy(update={"config": trainer.config})
        self._on_main(lambda: write_adapter(trainer.policy, config, version, canary))

    def _on_main(self, write: Callable[[], object]) -> None:
        """Rank 0 writes. What it cannot write is refused on all ranks, so that they stay in step."""
        refusal = ""
        if self.base.dist.is_main:
            try:
                write()
            except SkyliteError as error:
                refusal = str(error)
        if refusal := self.base.dist.share(refusal):
            raise ConfigError(refusal)

    def _scored_canary(self, policy: Policy) -> Canary:
        """Raises ConfigError on all ranks if the policy's logprobs are not finite."""
        logprobs = canary_logprobs(policy, self.canary)
        if not all(math.isfinite(x) for row in logprobs for x in row):
            raise ConfigError(
                "The policy's logprobs are not finite, so it cannot be sampled from.",
                "Load a state from before, or train a new policy with a lower learning rate.",
            )
        self._base_logprobs = self._base_logprobs or base_canary_logprobs(policy, self.canary)
        return Canary(sequences=self.canary, policy_logprobs=logprobs, base_logprobs=self._base_logprobs)

    def _trainer(self, policy: str) -> Trainer:
        if policy not in self.base.trainers:
            raise ConfigError(f"There is no policy {policy!r}.", "Create it first.")
        return self.base.trainers[policy]


def load_policies(run: RunDir, run_config: RunConfig, canary: list[list[int]], dist: Dist) -> Policies:
    """Load the base, without a policy."""
    base = load_shared_base(run_config.resolved, run_config.config, max(canary, key=len), dist)
    measured = base.add_policy("", run_config.config).policy
    run_config = resolve_micro_batch_tokens(run, run_config, measured, dist)
    del measured
    base.remove_policy("")
    return Policies(base, run_config, canary)
