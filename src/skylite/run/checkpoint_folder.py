"""`checkpoints/step-000010/`: a folder whose `manifest.json` names every other file by its hash. Which of them are whole, without torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from skylite.errors import ConfigError, ModelError
from skylite.run.files import sha256_file
from skylite.run.run_dir import RunDir

FORMAT = 4
MANIFEST = "manifest.json"


class CheckpointFile(BaseModel):
    """One file of a checkpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str
    bytes: int


class CheckpointManifest(BaseModel):
    """Written last into a checkpoint folder, before the rename that makes the folder visible."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int
    step: int
    files: dict[str, CheckpointFile]


def write_checkpoint_manifest(folder: Path, step: int) -> None:
    """Write the manifest over everything that is in the (still unfinished) folder."""
    files = {
        p.name: CheckpointFile(sha256=sha256_file(p), bytes=p.stat().st_size)
        for p in sorted(folder.iterdir())
    }
    manifest = CheckpointManifest(format=FORMAT, step=step, files=files)
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


def verify_checkpoint(folder: Path) -> CheckpointManifest:
    """The manifest, after every file was read and found as it says. Raises ModelError in words."""
    hint = "An older checkpoint can be used: --resume RUN --at STEP."
    try:
        manifest = CheckpointManifest.model_validate_json((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise ModelError(
            f"The checkpoint {folder} has no {MANIFEST}: it is damaged, or of an older skylite.", hint
        ) from None
    except (OSError, ValidationError) as error:
        raise ModelError(
            f"The checkpoint {folder} is damaged: its {MANIFEST} cannot be read ({error}).", hint
        ) from None
    if manifest.format != FORMAT or manifest.step != step_of(folder):
        what = f"its {MANIFEST} says format {manifest.format} and step {manifest.step}, and format {FORMAT} and step {step_of(folder)} belong"
        raise ModelError(f"The checkpoint {folder} is damaged: {what} there.", hint)
    for name, expected in manifest.files.items():
        if damage := _find_damage(folder / name, expected):
            raise ModelError(f"The checkpoint {folder} is damaged: {damage}.", hint)
    return manifest


def step_of(path: Path) -> int:
    """12 for `step-000012`, with or without a suffix."""
    return int(path.stem.removeprefix("step-"))


def checkpoint_steps(run: RunDir) -> list[int]:
    """Steps that have a complete folder, oldest first; whether it is still whole is `verify_checkpoint`'s question."""
    return sorted(step_of(p) for p in run.checkpoints.glob("step-*") if p.is_dir())


def choose_checkpoint(run: RunDir, at: int | None, say: Callable[[str], None]) -> int:
    """The step to go on from: the newest whole checkpoint, or `at`; 0, the start of the run, when there is none.

    A damaged one is said aloud and passed over; asked for by `at`, or when no other is left, it is a ModelError: all that was trained is
    not thrown away unasked. Raises ConfigError when `at` has no checkpoint.
    """
    steps = checkpoint_steps(run)
    if at is not None:
        if at != 0 and at not in steps:
            have = ", ".join(map(str, [0, *steps]))
            raise ConfigError(
                f"{run.root} has no checkpoint of step {at}; it can go on from step {have}.",
                "Give one of those to --at.",
            )
        if at != 0:
            verify_checkpoint(run.checkpoint_path(at))
        return at
    for step in reversed(steps):
        try:
            verify_checkpoint(run.checkpoint_path(step))
        except ModelError as error:
            say(f"warning: {error.what} It is passed over.")
        else:
            return step
    if steps:
        raise ModelError(
            f"None of the {len(steps)} checkpoints of {run.root} is whole.",
            "Give --at 0 to begin again from the run's start.",
        )
    return 0


def _find_damage(path: Path, expected: CheckpointFile) -> str:
    """What is wrong with a file, in words; empty when nothing is."""
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return f"{path.name} has {size} bytes, the manifest says {expected.bytes}"
        found = sha256_file(path)
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return (
        ""
        if found == expected.sha256
        else f"{path.name} has sha256 {found[:12]}..., the manifest says {expected.sha256[:12]}..."
    )
