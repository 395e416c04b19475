"""The run directory: the only module that spells out the paths of a run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skylite.config.train import RunConfig
from skylite.errors import ConfigError
from skylite.untrusted_files import read_text
from skylite.untrusted_text import parse_json, plain


@dataclass(frozen=True, slots=True, order=True)
class AdapterVersion:
    """A published adapter. Version k is the policy after k steps; on-policy, step k samples version k - 1.

    Engines key their prefix cache by LoRA name, so a name must always stand for the same weights.
    """

    version: int
    path: Path
    """Absolute path of the adapter folder, which is complete if it exists."""
    owner: str = ""
    """On engines that several runs share, the start of the run that published it."""

    @property
    def name(self) -> str:
        """The model name in requests to an engine."""
        return f"{self.owner}:{adapter_name(self.version)}" if self.owner else adapter_name(self.version)

    @property
    def manifest_path(self) -> Path:
        return self.path / "manifest.json"

    @property
    def weights_path(self) -> Path:
        return self.path / "adapter_model.safetensors"


def adapter_name(version: int) -> str:
    """Name of the adapter folder and of the served model, such as `policy-v000012`."""
    return f"policy-v{version:06d}"


def sampling_version(step: int, max_staleness: int) -> int:
    """The adapter version whose completions train `step`.

    On-policy (max_staleness 0) this is step - 1. With staleness 1 it is step - 2, except that step 1 uses
    version 0. It depends only on the step, so that a resumed run samples from the same versions.
    """
    return max(0, step - 1 - max_staleness)


def published_versions(lora_sync_path: Path) -> list[AdapterVersion]:
    """The complete adapter folders directly in `lora_sync_path`, oldest first, with absolute paths.

    Ignores links: the run may come from another person, and a link target must be neither served nor deleted.
    """
    found = numbered_paths(lora_sync_path.resolve(), "policy-v")
    return [AdapterVersion(n, path) for n, path in found.items() if path.is_dir() and not path.is_symlink()]


def numbered_paths(folder: Path, start: str, suffix: str = "") -> dict[int, Path]:
    """Number -> the file or folder with the name `start`, at least six digits and `suffix`, lowest first.

    Ignores every other name: a person may copy `step-000010` to `step-000010-backup`.
    """
    name = re.compile(f"{re.escape(start)}([0-9]{{6,}}){re.escape(suffix)}")
    found = [(name.fullmatch(p.name), p) for p in folder.iterdir()] if folder.is_dir() else []
    paths = {int(match.group(1)): path for match, path in found if match is not None}
    return {n: path for n, path in sorted(paths.items()) if path.name == f"{start}{n:06d}{suffix}"}


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run. Steps start at 1; adapter version 0 is the untrained policy."""

    root: Path

    @property
    def config_path(self) -> Path:
        """The resolved config, written once by the parent and read by its children."""
        return self.root / "config.json"

    @property
    def machine_path(self) -> Path:
        """Library versions and hardware of the run's last start (processes/hardware.py)."""
        return self.root / "machine.json"

    @property
    def status_path(self) -> Path:
        return self.root / "status.json"

    @property
    def metrics_path(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def prompt_history_path(self) -> Path:
        """What each step's prompts scored, where later steps choose by it (data/prompt_history.py)."""
        return self.root / "prompt_history.jsonl"

    @property
    def events_path(self) -> Path:
        """Timeline of the parent (rollout/session.py)."""
        return self.root / "events.jsonl"

    @property
    def canary_path(self) -> Path:
        """What the trainer needs of the data at its start.

        {"sequences": [[token ids], ...], "longest_prompt_tokens": N}: the canary, which it scores at each
        publish, and the longest training prompt. With "image" (adapters/manifest.py), the picture with which
        every sequence begins.
        """
        return self.root / "canary.json"

    @property
    def held_out_path(self) -> Path:
        """The held-out rows of a run without an engine, for its trainer, which scores them."""
        return self.root / "held_out.parquet"

    @property
    def micro_batch_path(self) -> Path:
        """Tokens per micro-batch that replace the setting: {"tokens": N, "reason": text, "setting": value}.

        They were measured for "auto", or halved after a step ran out of memory. A resumed run with the same
        setting splits steps into the same micro-batches.
        """
        return self.root / "micro_batch.json"

    @property
    def stop_path(self) -> Path:
        """If this file exists, the trainer writes a checkpoint and exits."""
        return self.root / "stop"

    @property
    def trainer_turn_path(self) -> Path:
        """The last step that the trainer may compute, {"step": N}, in a run whose engines sleep meanwhile."""
        return self.root / "trainer_turn.json"

    @property
    def rendezvous(self) -> Path:
        """Rendezvous files of torchrun and the trainer ranks; useless after the trainer exits."""
        return self.root / "rendezvous"

    @property
    def trainer_error_path(self) -> Path:
        """Error of the failed rank: {"what", "hint", "rank"}."""
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
    def exports(self) -> Path:
        """Where `skylite export` writes by default."""
        return self.root / "exports"

    @property
    def loggers(self) -> Path:
        """Files of the experiment loggers, and which steps each has (loggers/follow.py)."""
        return self.root / "loggers"

    @property
    def rejected_steps(self) -> Path:
        """Skipped optimizer steps: their rollouts and the reason."""
        return self.root / "rejected_steps"

    @property
    def warm_start(self) -> Path:
        """Copy of the adapter that version 0 starts from; a resumed run does not need the original."""
        return self.root / "warm_start"

    @property
    def teacher(self) -> Path:
        """Copy of the teacher's adapter; a resumed run does not need the original."""
        return self.root / "teacher"

    @property
    def default_adapters(self) -> Path:
        """The default of `lora.lora_sync_path`."""
        return self.root / "adapters"

    def adapters(self, recorded: RunConfig) -> Path:
        """The folder of the run's adapters. If the run folder was moved, the default folder moved with it."""
        is_default = recorded.config.lora.lora_sync_path is None
        return self.default_adapters.resolve() if is_default else recorded.resolved.identity.lora_sync_path

    def rollout_path(self, step: int) -> Path:
        """Scored completions of a step, from the parent to the trainer."""
        return self.rollouts / f"step-{step:06d}.parquet"

    def stored_rollouts(self) -> dict[int, Path]:
        """Step -> its rollout file, for all steps that have one."""
        return numbered_paths(self.rollouts, "step-", ".parquet")

    def trainer_step_path(self, step: int) -> Path:
        """Metrics of an optimizer step, from the trainer to the parent, written after its adapter.

        Step 0 is the start of the trainer.
        """
        return self.trainer_steps / f"step-{step:06d}.json"

    def stored_trainer_steps(self) -> dict[int, Path]:
        """Step -> the trainer's file about it, for all steps that have one."""
        return numbered_paths(self.trainer_steps, "step-", ".json")

    def checkpoint_path(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def log_path(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def read_json(self, path: Path) -> dict[str, Any]:
        """Read a JSON object of the run. Raises ConfigError that names the file."""
        try:
            value = parse_json(read_text(path))
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

    def read_count(self, path: Path, key: str) -> int:
        """A positive integer from a JSON object of the run. Raises ConfigError that names the file."""
        value = self.read_json(path).get(key)
        if type(value) is not int or not 0 < value < 2**31:
            raise ConfigError(
                f"{path} has {key}={plain(repr(value))[:60]}, not a positive integer.",
                "The run is damaged; start a new one.",
            )
        return value
