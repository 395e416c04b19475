"""What clients have saved, on disk: states of policies, and adapters to sample from or to download.

`policies/ID/policy.json` names the owner, the LoRA configuration and everything that is saved; states are in
`policies/ID/weights/NAME/`, adapters among those that are published.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from skylite.config.lora import LoraConfig
from skylite.errors import ConfigError, SkyliteError
from skylite.processes.file_tree import remove_tree
from skylite.run.files import write_json
from skylite.service.errors import Rejected
from skylite.service.requests import NAME
from skylite.untrusted_files import read_bytes

Kind = Literal["weights", "sampler_weights", "external_weights"]
KINDS: dict[str, str] = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""Part of a tinker:// path -> the API's word for it."""
POLICY = r"[0-9a-f]{16}:train:[0-9]{1,9}"
PATH = re.compile(rf"tinker://({POLICY})/({'|'.join(KINDS)})/({NAME[1:-1]})")


class Saved(BaseModel):
    """One saved thing."""

    model_config = ConfigDict(extra="forbid")
    time: float
    expires: float | None = None
    """Seconds of the clock, after which it is deleted."""
    version: int | None = None
    """Of a published adapter. None: a state."""
    size_bytes: int = 0


class SavedPolicy(BaseModel):
    """policy.json."""

    model_config = ConfigDict(extra="forbid")
    owner: str
    fingerprint: str
    """Of the base."""
    lora: LoraConfig
    train_attn: bool
    train_mlp: bool
    seed: int
    saved: dict[str, Saved] = {}
    """By "weights/NAME" and so on."""


@dataclass(slots=True)
class SavedPolicies:
    """All of them, by the policy's id."""

    folder: Path
    by_id: dict[str, SavedPolicy] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> SavedPolicies:
        """What earlier services of this folder have saved. Raises ConfigError for a damaged file."""
        found = cls(folder)
        for path in sorted(folder.glob("*/policy.json")):
            name = path.parent.name.replace("-", ":")
            try:
                if re.fullmatch(POLICY, name):
                    found.by_id[name] = SavedPolicy.model_validate_json(read_bytes(path))
            except (OSError, ValidationError):
                raise ConfigError(
                    f"{path} cannot be read.", "Move its folder away; what it saved is then not offered."
                ) from None
        return found

    def state_path(self, policy: str, name: str) -> Path:
        """A state is a checkpoint, whose folder has the name of a step."""
        return self._folder(policy) / "weights" / name / "step-000000"

    def add(self, policy: str, record: SavedPolicy, key: str, saved: Saved) -> str:
        """Record what has been written. Returns its tinker:// path."""
        record = self.by_id.setdefault(policy, record)
        record.saved[key] = saved
        self._write(policy)
        return f"tinker://{policy}/{key}"

    def find(self, path: str, owner: str, *kinds: Kind) -> tuple[str, SavedPolicy, Saved]:
        """The policy's id, its record and what is saved at a tinker:// path. Raises Rejected."""
        match = PATH.fullmatch(path)
        record = self.by_id.get(match[1]) if match else None
        if match is None or record is None or record.owner != owner:
            raise Rejected(f"You have saved nothing at {path[:200]!r}.", 404)
        saved = record.saved.get(f"{match[2]}/{match[3]}")
        if saved is None:
            raise Rejected(f"You have saved nothing at {path!r}.", 404)
        if match[2] not in kinds:
            raise Rejected(f"{path} cannot be used so: only {' or '.join(kinds)} can.")
        return match[1], record, saved

    def remove(self, policy: str, key: str) -> Saved:
        """Delete a state, or the record of an adapter, whose files the caller deletes.

        Raises WriteFailed, and then everything is as before.
        """
        record = self.by_id[policy]
        saved = record.saved.pop(key)
        try:
            self._write(policy)
        except SkyliteError:
            record.saved[key] = saved
            raise
        if saved.version is None:
            remove_tree(self._folder(policy) / key)
        return saved

    def expired(self) -> list[tuple[str, str]]:
        """Policy and key of everything whose time is over."""
        now = time.time()
        return [
            (policy, key)
            for policy, record in self.by_id.items()
            for key, saved in record.saved.items()
            if saved.expires is not None and saved.expires < now
        ]

    def versions(self) -> set[int]:
        """The published adapters that are saved under a name."""
        saved = (saved for record in self.by_id.values() for saved in record.saved.values())
        return {s.version for s in saved if s.version is not None}

    def _folder(self, policy: str) -> Path:
        return self.folder / policy.replace(":", "-")

    def _write(self, policy: str) -> None:
        write_json(self._folder(policy) / "policy.json", self.by_id[policy].model_dump(mode="json"))


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
