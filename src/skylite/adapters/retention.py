"""Which adapters and checkpoints a run keeps, as pure functions, and the code that deletes the others."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from skylite.config.train import CheckpointConfig, SyncConfig, TrainConfig
from skylite.errors import convert_os_errors
from skylite.processes.file_tree import remove_tree, tree_bytes
from skylite.run.checkpoint_folder import checkpoint_steps
from skylite.run.files import TEMPORARY_MARK, temporary_sibling
from skylite.run.metrics_file import held_out_scores
from skylite.run.run_dir import RunDir, published_versions, sampling_version

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Removed:
    """What a clean-up deleted."""

    adapters: list[int]
    """Versions."""
    checkpoints: list[int]
    """Steps."""
    num_bytes: int


def kept_checkpoints(steps: Iterable[int], config: CheckpointConfig, scores: Mapping[int, float]) -> set[int]:
    """The newest `keep_last`, and the `keep_best` with the highest held-out score (ties: older first)."""
    ordered = sorted(steps)
    best = sorted((s for s in ordered if s in scores), key=lambda s: (-scores[s], s))[: config.keep_best]
    return {*ordered[-config.keep_last :], *best}


def kept_adapters(
    versions: Iterable[int], newest: int, config: SyncConfig, checkpoints: Iterable[int]
) -> set[int]:
    """The adapter versions to keep.

    These are version 0, the last `keep_last` up to `newest`, any after it, every `keep_every`-th version, and
    `checkpoints`, the versions that a run resumed from a checkpoint needs.
    """
    history = {v for v in versions if config.keep_every and v % config.keep_every == 0}
    return {v for v in versions if v == 0 or v > newest - config.keep_last} | history | set(checkpoints)


def clean_up(run: RunDir, lora_sync_path: Path, newest: int, config: TrainConfig) -> Removed:
    """Delete the adapters and checkpoints that the rules do not keep. `newest`: the newest version in use.

    keep_last is at least 2, so this never deletes an adapter that an engine may still read: one re-reads an
    evicted adapter from its folder, and a missing folder kills the engine.
    """
    steps = checkpoint_steps(run)
    kept_steps = kept_checkpoints(steps, config.checkpoint, held_out_scores(run, config.eval))
    old_steps = [s for s in steps if s not in kept_steps]
    freed = sum(remove_folder(run.checkpoint_path(s)) for s in old_steps)
    adapters = published_versions(lora_sync_path)
    # Besides the version of the checkpoint, a resumed run needs the version that it samples first from.
    sources = {sampling_version(step + 1, config.rollout.max_staleness) for step in kept_steps}
    sources |= set(range(newest - config.rollout.max_staleness, newest))  # requests may use them still
    kept = kept_adapters([a.version for a in adapters], newest, config.sync, kept_steps | sources)
    old_adapters = [a for a in adapters if a.version not in kept]
    freed += sum(remove_folder(a.path) for a in old_adapters)
    return Removed([a.version for a in old_adapters], old_steps, freed)


def remove_unfinished_files(run: RunDir, lora_sync_path: Path) -> list[Path]:
    """Delete and return unfinished files of killed writers. The caller must hold the lock of the run."""
    folders = (
        run.root,
        run.rollouts,
        run.trainer_steps,
        run.checkpoints,
        run.evals,
        run.rejected_steps,
        run.logs,
        lora_sync_path,
    )
    found = [p for folder in folders for p in sorted(folder.glob(f".*{TEMPORARY_MARK}*"))]
    for path in found:
        if problem := remove_tree(path):
            logger.warning(f"{path}, an unfinished file of a killed process, cannot be removed: {problem}")
    return found


def remove_folder(folder: Path) -> int:
    """Delete a folder and return its size in bytes. Raises WriteFailed.

    Renames it to a temporary name first, so that a kill leaves no partial folder under the final name.
    """
    with convert_os_errors(folder):
        size = tree_bytes(folder)
        hidden = temporary_sibling(folder)
        folder.rename(hidden)
        if problem := remove_tree(hidden):
            raise problem
    return size
