"""The folder of a sweep: a run folder per policy, and what they share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skylite.errors import ConfigError
from skylite.run.files import atomic_file
from skylite.run.run_dir import RunDir
from skylite.untrusted_files import read_text


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
        """{"policies": {name: {setting: value}}, "together": N, "halve_every": N}: what the sweep varies, and
        how."""
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
    def rungs_path(self) -> Path:
        """{step: {name: score}}: the held-out scores with which policies reached a rung (--halve-every)."""
        return self.root / "rungs.json"

    @property
    def left_early(self) -> Path:
        """A file NAME, with the reason, for each policy that left: a resumed sweep leaves it out."""
        return self.root / "left_early"

    def leave(self, name: str, why: str) -> None:
        """Let a policy leave before its last step; a running sweep sees it. Raises WriteFailed."""
        with atomic_file(self.left_early / name) as temporary:
            temporary.write_text(why, encoding="utf-8")

    def why_left(self, name: str) -> str:
        """Why a policy has left, or must leave, before its last step; empty if it has not."""
        path = self.left_early / name
        return read_text(path) if path.exists() else ""

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

    def halve_every(self) -> int:
        """Steps between two rungs; 0: no policy leaves by its score. Raises ConfigError."""
        value = RunDir(self.root).read_json(self.manifest_path).get("halve_every")
        if type(value) is not int or not 0 <= value < 2**31:
            raise ConfigError(f"{self.manifest_path} has no halve_every.", "Start a new sweep.")
        return value

    @classmethod
    def is_one(cls, folder: Path) -> bool:
        return cls(folder).manifest_path.is_file()
