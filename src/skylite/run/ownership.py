"""Which folders are a run's own. A run may be somebody's gift, and what its config.json or a link in it claims is never deleted from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from skylite.config.train import RunConfig
from skylite.errors import ConfigError
from skylite.run.files import TEMPORARY_MARK, write_json
from skylite.run.run_dir import RunDir, published_versions

MARK_NAME = "skylite-run.json"
"""In a lora_sync_path of the user's own: {"run_id": of the run whose adapters lie there}."""


def mark_sync_folder(recorded: RunConfig) -> None:
    """Write the run's mark into its lora_sync_path, which must be there. The default one lies in the run and needs none."""
    if recorded.config.lora.lora_sync_path is not None:
        write_json(Path(recorded.resolved.lora_sync_path) / MARK_NAME, {"run_id": recorded.resolved.run_id})


def require_own_folders(run: RunDir, recorded: RunConfig) -> None:
    """Raise ConfigError where going on with the run, or cleaning it up, could delete or write what is not the run's. Nothing is written.

    A folder outside without adapters (memory-backed, after a reboot) harms nobody: the run marks it again.
    """
    for link in _links_out(run.root):
        raise ConfigError(
            f"{link} is a link that leads out of the run, to {os.path.realpath(link)}: what lies there would be changed or deleted.",
            "Put a real file or folder in its place (lora.lora_sync_path and --run say where things lie), or remove the link.",
        )
    folder = run.adapters(recorded)
    if recorded.config.lora.lora_sync_path is None:
        return
    if not folder.is_absolute() or "\0" in str(folder):
        raise ConfigError(
            f"{run.config_path} names {str(folder)!r} as its lora_sync_path, which is no absolute path.",
            "Correct it there.",
        )
    held = next(_deletable_paths(folder), None)
    if held is not None and (
        recorded.resolved.run_id is None or _recorded_run_id(folder) != recorded.resolved.run_id
    ):
        raise ConfigError(
            f"{run.config_path} names {folder} as its lora_sync_path, but {held.name} in there is not known to be this run's "
            f"({MARK_NAME} beside it is another run's, or missing), and going on would delete adapters there.",
            "If they are this run's, move them away: it publishes its adapter again from its checkpoint.",
        )


def _deletable_paths(folder: Path) -> Iterator[Path]:
    """What a run would delete from its sync folder sooner or later."""
    yield from (adapter.path for adapter in published_versions(folder))
    yield from (
        path for path in folder.glob(f".*{TEMPORARY_MARK}*") if not path.name.startswith(f".{MARK_NAME}")
    )


def _recorded_run_id(folder: Path) -> object:
    """Id of the run that the folder belongs to; None when no mark says so."""
    try:
        mark = json.loads((folder / MARK_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return mark.get("run_id") if isinstance(mark, dict) else None


def _links_out(root: Path) -> Iterator[Path]:
    """Symbolic links below `root` that lead out of it."""
    inside = os.path.realpath(root)
    for folder, folders, files in os.walk(root):
        for path in (Path(folder, name) for name in (*folders, *files)):
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
                yield path
