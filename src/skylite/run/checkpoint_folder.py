"""Checkpoint folders such as `checkpoints/step-000010/`, checked without torch.

Their `manifest.json` lists every other file with size and sha256.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from skylite.errors import ConfigError, ModelError
from skylite.run.files import sha256_file
from skylite.run.run_dir import RunDir, numbered_paths
from skylite.untrusted_files import read_bytes

logger = logging.getLogger(__name__)
FORMAT = 5
MANIFEST = "manifest.json"


class CheckpointFile(BaseModel):
    """One file of a checkpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str
    bytes: int


class CheckpointManifest(BaseModel):
    """Written as the last file of a checkpoint folder, before the rename to its final name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int
    step: int
    files: dict[str, CheckpointFile]


def write_checkpoint_manifest(folder: Path, step: int, hashes: Mapping[str, str] | None = None) -> None:
    """Write the manifest for all files in a checkpoint folder that is not yet renamed.

    `hashes`: sha256 of files by name, known from writing them.
    """
    known = hashes or {}
    files = {
        p.name: CheckpointFile(sha256=known.get(p.name) or sha256_file(p), bytes=p.stat().st_size)
        for p in sorted(folder.iterdir())
    }
    manifest = CheckpointManifest(format=FORMAT, step=step, files=files)
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


def verify_checkpoint(folder: Path) -> CheckpointManifest:
    """Read the manifest and check size and sha256 of every file. Raises ModelError.

    `folder`: a `RunDir.checkpoint_path`.
    """
    step = int(folder.name.removeprefix("step-"))
    hint = "Resume from an older checkpoint: --resume RUN --at STEP."
    try:
        manifest = CheckpointManifest.model_validate_json(read_bytes(folder / MANIFEST))
    except FileNotFoundError:
        raise ModelError(
            f"The checkpoint {folder} has no {MANIFEST}: it is damaged or was written by an older skylite.",
            hint,
        ) from None
    except (OSError, ValidationError) as error:
        raise ModelError(
            f"The checkpoint {folder} is damaged: its {MANIFEST} cannot be read ({error}).", hint
        ) from None
    if manifest.format != FORMAT or manifest.step != step:
        found = f"format {manifest.format} and step {manifest.step}"
        expected = f"format {FORMAT} and step {step}"
        raise ModelError(
            f"The checkpoint {folder} is damaged: its {MANIFEST} has {found}, expected {expected}.", hint
        )
    for name, file in manifest.files.items():
        if damage := _find_damage(folder / name, file):
            raise ModelError(f"The checkpoint {folder} is damaged: {damage}.", hint)
    return manifest


def checkpoint_steps(run: RunDir) -> list[int]:
    """Steps that have a checkpoint folder, oldest first. `verify_checkpoint` checks their content."""
    return [step for step, path in numbered_paths(run.checkpoints, "step-").items() if path.is_dir()]


def choose_checkpoint(run: RunDir, at: int | None) -> int:
    """The step to resume from: `at`, else the newest intact checkpoint, else 0 (the start of the run).

    Skips damaged checkpoints with a warning. Raises ModelError when the checkpoint of `at` is damaged, or
    when all are: the user decides whether to discard the training so far. Raises ConfigError when `at` has no
    checkpoint.
    """
    steps = checkpoint_steps(run)
    if at is not None:
        if at != 0 and at not in steps:
            have = ", ".join(map(str, [0, *steps]))
            raise ConfigError(
                f"{run.root} has no checkpoint of step {at}; it can resume from step {have}.",
                "Give --at one of these steps.",
            )
        if at != 0:
            verify_checkpoint(run.checkpoint_path(at))
        return at
    for step in reversed(steps):
        try:
            verify_checkpoint(run.checkpoint_path(step))
        except ModelError as error:
            logger.warning(f"{error.what} It is skipped.")
        else:
            return step
    if steps:
        raise ModelError(
            f"All {len(steps)} checkpoints of {run.root} are damaged.",
            "Give --at 0 to restart the run from its beginning.",
        )
    return 0


def _find_damage(path: Path, expected: CheckpointFile) -> str:
    """What is wrong with a file, for an error message; empty when it is intact."""
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return f"{path.name} has {size} bytes, expected {expected.bytes}"
        found = sha256_file(path)
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    if found != expected.sha256:
        return f"{path.name} has sha256 {found[:12]}..., expected {expected.sha256[:12]}..."
    return ""
