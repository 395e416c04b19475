"""Check which folders belong to a run before writing or deleting in them.

A run may come from another person: its config.json and its links could point to folders that are not its own.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from skylite.config.train import RunConfig
from skylite.errors import ConfigError
from skylite.processes.file_tree import walk
from skylite.run.files import TEMPORARY_MARK, write_json
from skylite.run.run_dir import RunDir, published_versions
from skylite.untrusted_files import read_text
from skylite.untrusted_text import parse_json

MARK_NAME = "skylite-run.json"
"""File in a lora_sync_path outside the run: {"run_id": id of the run that owns the adapters there}."""


def mark_sync_folder(recorded: RunConfig) -> None:
    """Write the owner file into the run's lora_sync_path, which must exist.

    The default lora_sync_path is inside the run and needs no owner file.
    """
    if recorded.config.lora.lora_sync_path is not None:
        write_json(Path(recorded.resolved.lora_sync_path) / MARK_NAME, {"run_id": recorded.resolved.run_id})


def require_own_folders(run: RunDir, recorded: RunConfig) -> None:
    """Raise ConfigError if resuming or cleaning up the run could change files that are not its own.

    Writes nothing. An outside lora_sync_path without adapters (e.g. in memory, after a reboot) is safe: the
    run marks it again.
    """
    for link in _links_out(run.root, run.root):
        raise ConfigError(
            f"{link} is a link out of the run, to {os.path.realpath(link)}; "
            "the run could change or delete files there.",
            "Remove the link, or replace it by a real file or folder. "
            "(lora.lora_sync_path and --run choose other locations.)",
        )
    folder = run.adapters(recorded)
    if recorded.config.lora.lora_sync_path is None:
        return
    if not folder.is_absolute():
        raise ConfigError(
            f"{run.config_path} names {str(folder)!r} as its lora_sync_path, which is not an absolute path.",
            "Fix it in that file.",
        )
    adapter = next(_deletable_paths(folder), None)
    if adapter is not None and (
        recorded.resolved.run_id is None or _recorded_run_id(folder) != recorded.resolved.run_id
    ):
        raise ConfigError(
            f"{run.config_path} names {folder} as its lora_sync_path, but {adapter.name} there may belong to "
            f"another run ({MARK_NAME} is missing or names another run), and resuming would delete adapters.",
            "If they belong to this run, move them away: it publishes its adapter again from a checkpoint.",
        )


def require_own_place(root: Path, *folders: Path) -> None:
    """Raise ConfigError if a command that writes into these folders of `root` could write outside of it.

    Writes nothing. The folders need not exist.
    """
    for folder in folders:
        for link in _links_out(root, folder):
            raise ConfigError(
                f"{link} is a link out of {root}, to {os.path.realpath(link)}; "
                "this command would write files there.",
                "Remove the link, or replace it by a real file or folder.",
            )


def _deletable_paths(folder: Path) -> Iterator[Path]:
    """Adapters and unfinished files in a lora_sync_path, which a run deletes over time."""
    yield from (adapter.path for adapter in published_versions(folder))
    yield from (
        path for path in folder.glob(f".*{TEMPORARY_MARK}*") if not path.name.startswith(f".{MARK_NAME}")
    )


def _recorded_run_id(folder: Path) -> object:
    """Run id in the owner file of a folder; None without a valid owner file."""
    try:
        mark = parse_json(read_text(folder / MARK_NAME))
    except (OSError, ValueError):
        return None
    return mark.get("run_id") if isinstance(mark, dict) else None


def _links_out(root: Path, place: Path) -> Iterator[Path]:
    """`place` and the symbolic links below it that have a target outside of `root`.

    Leaves out what is in the folders of the loggers: their libraries leave links there (wandb, to its logs in
    the user's cache), and skylite writes only new files to them (loggers/follow.py).
    """
    inside, of_loggers = os.path.realpath(root), RunDir(Path(root)).loggers
    if place.is_symlink() and not Path(os.path.realpath(place)).is_relative_to(inside):
        yield place
        return
    for entry in walk(os.path.realpath(place)) if place.is_dir() else ():
        path = place / entry.path
        is_loggers_own = of_loggers in path.parents and path.parent != of_loggers
        if (
            stat.S_ISLNK(entry.info.st_mode)
            and not is_loggers_own
            and not Path(os.path.realpath(path)).is_relative_to(inside)
        ):
            yield path
