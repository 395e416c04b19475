"""The run directory: every path of a run is spelled here and nowhere else."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skylite.config.train import RunConfig
from skylite.errors import ConfigError

_VERSION_NAME = re.compile(r"policy-v(\d{6,})")


@dataclass(frozen=True, slots=True, order=True)
class AdapterVersion:
    """A published adapter: version k is the policy after k updates, so step k samples from version k - 1.

    The name is unique because vLLM keys its prefix cache by LoRA name: one name must mean one set of weights for ever.
    """

    version: int
    path: Path
    """Absolute; complete or absent."""

    @property
    def name(self) -> str:
        """The model name that requests to vLLM carry."""
        return adapter_name(self.version)

    @property
    def manifest_path(self) -> Path:
        return self.path / "manifest.json"

    @property
    def weights_path(self) -> Path:
        return self.path / "adapter_model.safetensors"


def adapter_name(version: int) -> str:
    """`policy-v000012`: the folder's and the served model's name."""
    return f"policy-v{version:06d}"


def sampling_version(step: int, max_staleness: int) -> int:
    """The adapter version whose completions train step `step`: a function of the step alone, so that a resumed run samples the same.

    On-policy that is step - 1. Sampling one step ahead it is the one before, but for step 1, before which there is nothing to train.
    """
    return max(0, step - 1 - max_staleness)


def published_versions(lora_sync_path: Path) -> list[AdapterVersion]:
    """The complete adapter folders of `lora_sync_path`, oldest first; their paths are absolute and directly below it.

    A link is no folder of ours: what it points to, in a run that somebody gave away, must be neither served nor cleaned up.
    """
    folder = lora_sync_path.resolve()
    found = [(_VERSION_NAME.fullmatch(p.name), p) for p in folder.iterdir()] if folder.is_dir() else []
    return sorted(
        AdapterVersion(int(m.group(1)), p)
        for m, p in found
        if m is not None and p.is_dir() and not p.is_symlink()
    )


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run. Steps are 1-based; adapter version 0 is the untrained policy."""

    root: Path

    @property
    def config_path(self) -> Path:
        """The resolved config, written once by the parent; children read only this."""
        return self.root / "config.json"

    @property
    def status_path(self) -> Path:
        return self.root / "status.json"

    @property
    def metrics_path(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def events_path(self) -> Path:
        """What the parent did and when (run/events.py)."""
        return self.root / "events.jsonl"

    @property
    def canary_path(self) -> Path:
        """Fixed token sequences the trainer scores at every publish: {"sequences": [[token ids], ...]}."""
        return self.root / "canary.json"

    @property
    def micro_batch_path(self) -> Path:
        """What trainer.tokens_per_micro_batch = "auto" found: {"tokens": N, "reason": words}; a resumed run cuts its steps alike."""
        return self.root / "micro_batch.json"

    @property
    def stop_path(self) -> Path:
        """Its presence asks the trainer to write a checkpoint and end."""
        return self.root / "stop"

    @property
    def rendezvous(self) -> Path:
        """Files in which torchrun and the ranks of a trainer find each other; of no use after its end."""
        return self.root / "rendezvous"

    @property
    def trainer_error_path(self) -> Path:
        """{"what", "hint", "rank"} of the rank that failed."""
        return self.logs / "trainer-error.json"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    @property
    def trainer_steps(self) -> Path:
        return self.root / "trainer_steps"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def evals(self) -> Path:
        return self.root / "evals"

    @property
    def rejected_steps(self) -> Path:
        """Steps whose update was not applied: their rollouts and the reason."""
        return self.root / "rejected_steps"

    @property
    def warm_start(self) -> Path:
        """The adapter that version 0 begins as, copied here so that a resumed run does not depend on where it came from."""
        return self.root / "warm_start"

    @property
    def default_adapters(self) -> Path:
        """`lora.lora_sync_path` unless the user sets another."""
        return self.root / "adapters"

    def adapters(self, recorded: RunConfig) -> Path:
        """Where the run's adapters are now: they moved with the run, but for a sync folder of the user's own."""
        own = recorded.config.lora.lora_sync_path is not None
        return Path(recorded.resolved.lora_sync_path) if own else self.default_adapters.resolve()

    def rollout_path(self, step: int) -> Path:
        """Orchestrator -> trainer: the scored completions of a step."""
        return self.rollouts / f"step-{step:06d}.parquet"

    def trainer_step_path(self, step: int) -> Path:
        """Trainer -> orchestrator: metrics of the update, written after its adapter is published. Step 0 is the start."""
        return self.trainer_steps / f"step-{step:06d}.json"

    def checkpoint_path(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def log_path(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def read_json(self, path: Path) -> dict[str, Any]:
        """A JSON object of the run, or a ConfigError that names the file."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"{self.root} is not a skylite run: {path.name} is missing.",
                "Give a folder made by `skylite train`.",
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} cannot be read as JSON: {error}.", "The run is damaged; start a new one."
            ) from None
        if not isinstance(value, dict):
            raise ConfigError(
                f"{path} holds {type(value).__name__}, not a JSON object.",
                "The run is damaged; start a new one.",
            )
        return value
