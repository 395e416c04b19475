"""Folders of a run: one live run uses them at a time, and a run writes and deletes in no others.

A run may come from another person: its config.json and its links could point to folders that are not its own.
The kernel releases a lock when its process ends.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from skylite.config.lora import LoraConfig
from skylite.config.train import RunConfig
from skylite.errors import ConfigError, convert_os_errors
from skylite.processes.file_tree import entries_below
from skylite.processes.private_folders import make_own_folder, open_lock, require_own_links
from skylite.run.files import TEMPORARY_MARK, write_json
from skylite.run.run_dir import RunDir, published_versions
from skylite.untrusted_files import read_text
from skylite.untrusted_text import parse_json

LOCK_NAME = ".skylite.lock"
LOOK_S = 0.05
_HINT = "Choose a new folder, which skylite creates with mode 0700; or make this one yours alone (chmod 700)."
_SYNC_HINT = f"That is lora.lora_sync_path. {_HINT}"
MARK_NAME = "skylite-run.json"
"""File in a lora_sync_path outside the run: {"run_id": id of the run that owns the adapters there}."""


@contextmanager
def lock_run(root: Path, adapters: Path, lora: LoraConfig) -> Iterator[None]:
    """Lock a run's folder and the folder that it publishes adapters in.

    Raises as `lock_folder`, and ConfigError if another user's link leads to one of them.
    """
    require_own_links(root, _HINT)
    if lora.lora_sync_path is not None:
        for path in (Path(lora.lora_sync_path), adapters):  # as given, and as recorded at the run's start
            require_own_links(path, _SYNC_HINT)
    with (
        lock_folder(root.resolve()),
        lock_folder(adapters, _HINT if lora.lora_sync_path is None else _SYNC_HINT),
    ):
        yield


@contextmanager
def lock_folder(folder: Path, hint: str = _HINT) -> Iterator[None]:
    """Lock `folder` while the block runs. Raises ConfigError with the pid of the live owner, or WriteFailed.

    Creates it with mode 0700. Raises ConfigError with `hint` if others own it or may write to it: it may be
    where other users write, such as in /dev/shm.
    The kernel releases the lock even after `kill -9`, so a leftover lock file locks nothing; only its pid is
    stale. At the end the lock file is removed, and the folder too if the lock created it and it is still
    empty.
    """
    path, is_new = folder / LOCK_NAME, not folder.exists()
    with _locked(path, hint) as stream:
        try:
            with convert_os_errors(path):
                stream.truncate(0)
                stream.write(b"%d\n" % os.getpid())
            yield
        finally:
            with suppress(OSError):  # a leftover file locks nothing
                path.unlink()
                if is_new:
                    folder.rmdir()


def is_locked(lock: Path) -> bool:
    """Whether a live process holds this lock. Changes nothing. Raises ConfigError as `_flock`."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        _flock(descriptor, fcntl.LOCK_SH, lock)  # NFS refuses LOCK_EX to who only reads
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def refuse_live(folder: Path) -> None:
    """Raise ConfigError with the pid of the live run that has locked `folder`. Changes nothing."""
    lock = folder / LOCK_NAME
    if is_locked(lock):
        with suppress(OSError):
            raise _owned(folder, read_text(lock).strip())


def _owned(folder: Path, owner: str) -> ConfigError:
    return ConfigError(
        f"{folder} belongs to another live run (pid {owner or 'unknown'}).",
        "Wait for it, stop it, or choose another folder.",
    )


def _locked(path: Path, hint: str) -> FileIO:
    """Open and lock the file. Raises ConfigError when another process holds the lock."""
    looks = 3
    while True:
        make_own_folder(path.parent, hint)
        stream = open_lock(path)
        try:
            _flock(stream.fileno(), fcntl.LOCK_EX, path)
        except BlockingIOError:
            if looks := looks - 1:  # `is_locked` of another process holds it for a moment
                stream.close()
                time.sleep(LOOK_S)
                continue
            owner = stream.read().decode("ascii", errors="replace").strip()
            stream.close()
            raise _owned(path.parent, owner) from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(stream.fileno()), path.stat()):
                return stream
        stream.close()  # the previous owner removed the file between open and lock: try again


def _flock(descriptor: int, operation: int, path: Path) -> None:
    """Raises BlockingIOError while another process holds the lock, ConfigError where there are no locks."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be locked: {error.strerror}.",
            "Choose a folder on a filesystem that has flock: on NFS, version 4, or 3 with a lock daemon; on "
            "Lustre, mounted with `flock`.",
        ) from None


def mark_sync_folder(recorded: RunConfig) -> None:
    """Write the owner file into the run's lora_sync_path, which must exist.

    The default lora_sync_path is inside the run and needs no owner file.
    """
    if recorded.config.lora.lora_sync_path is not None:
        identity = recorded.resolved.identity
        write_json(identity.lora_sync_path / MARK_NAME, {"run_id": identity.run_id})


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
    run_id = recorded.resolved.identity.run_id
    if adapter is not None and (run_id is None or _recorded_run_id(folder) != run_id):
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
    top = os.path.realpath(place)
    for entry in entries_below(top) if place.is_dir() else ():
        path = place / os.path.relpath(entry.path, top)
        is_loggers_own = of_loggers in path.parents and path.parent != of_loggers
        if (
            entry.is_symlink()
            and not is_loggers_own
            and not Path(os.path.realpath(path)).is_relative_to(inside)
        ):
            yield path
