"""The folder of a sweep: a run folder per policy, and what they share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skylite.errors import ConfigError
from skylite.run.run_dir import RunDir


@dataclass(frozen=True, slots=True)
class SweepDir:
    """Paths of one sweep. It looks like a run folder to the shared trainer and engines: logs, rendezvous."""

    root: Path

    @property
    def shared(self) -> RunDir:
        """Logs and rendezvous of the processes that all policies share."""
        return RunDir(self.root / "shared")

    @property
    def manifest_path(self) -> Path:
        """{"policies": {name: {setting: value}}}: what the sweep varies."""
        return self.root / "sweep.json"

    @property
    def orders(self) -> Path:
        """What the parent asks the shared trainer for: NAME.json with {"root", "resume"} lets a run join."""
        return self.shared.root / "orders"

    @property
    def left(self) -> Path:
        """An empty file NAME for each run that the shared trainer has let go."""
        return self.shared.root / "left"

    @property
    def stops(self) -> Path:
        """A file NAME for each policy that the user has stopped: a resumed sweep leaves it."""
        return self.root / "stopped"

    def run(self, name: str) -> RunDir:
        return RunDir(self.root / name)

    def policies(self) -> dict[str, dict[str, Any]]:
        """Name -> the settings that the sweep chose for it. Raises ConfigError if this is not a sweep."""
        manifest = RunDir(self.root).read_json(self.manifest_path)
        policies = manifest.get("policies")
        if not isinstance(policies, dict) or not all(
            isinstance(v, dict) and Path(name).name == name for name, v in policies.items()
        ):
            raise ConfigError(f"{self.manifest_path} names no policies.", "Start a new sweep.")
        return policies

    @classmethod
    def is_one(cls, folder: Path) -> bool:
        return cls(folder).manifest_path.is_file()
