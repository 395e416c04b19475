"""Walk and remove folders that other programs have filled: of any depth, and never outside of the folder.

Every step is relative to the descriptor of an open folder and follows no link, so a folder that is renamed or
replaced by a link meanwhile leads nowhere else. Four descriptors are enough, and nothing recurses: standard
functions fail at a thousand nested folders. Imports only the standard library (reaper.py, sandbox/).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, link or folder below the walked folder. Valid until the next one."""

    folder: int
    """Descriptor of the folder that holds it."""
    name: str
    parents: tuple[str, ...] | list[str]
    """Names of the folders from the walked one down to it."""
    info: os.stat_result
    """Of itself, also for a link."""
    was_listed: bool
    """False for a folder that could not be read in full, or is a mount point."""

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.info.st_mode)

    @property
    def path(self) -> str:
        """Path relative to the walked folder."""
        return "/".join((*self.parents, self.name))


@dataclass(slots=True)
class _Level:
    """A folder that the walk has entered."""

    info: os.stat_result
    names: list[str]
    """What is still to be visited in it."""
    was_listed: bool = True


def walk(folder: str | Path, *, unlock: bool = False) -> Iterator[Entry]:
    """Everything below a folder; a folder comes after what is in it. Raises OSError if it cannot be listed.

    What disappears meanwhile is left out. `unlock`: this user's folders get mode 0700 before they are listed.
    """
    top = _open(str(folder), None, unlock)
    here = os.dup(top)
    try:
        levels, parents = [_Level(os.fstat(top), os.listdir(top))], list[str]()
        while True:
            level = levels[-1]
            if level.names:
                name = level.names.pop()
                try:
                    info = os.stat(name, dir_fd=here, follow_symlinks=False)
                except OSError as error:
                    level.was_listed &= isinstance(error, FileNotFoundError)
                    continue
                try:
                    below = _enter(here, name, info, levels[0], unlock)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                if below is None:
                    yield Entry(here, name, parents, info, not stat.S_ISDIR(info.st_mode))
                else:
                    os.close(here)
                    here = below[0]
                    levels.append(below[1])
                    parents.append(name)
            elif parents:
                levels.pop()
                name, depth = parents.pop(), len(parents)
                above = _up(here, top, levels, parents)
                os.close(here)
                here = above
                if len(parents) == depth:
                    yield Entry(here, name, parents, level.info, level.was_listed)
            else:
                return
    finally:
        os.close(here)
        os.close(top)


def remove_tree(path: str | Path) -> OSError | None:
    """Remove a folder with everything in it, or a file or link. Returns why it is not gone; never raises.

    A missing path is gone. What cannot be removed stays, and the rest goes.
    """
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            problem = empty_folder(path)
            try:
                os.rmdir(path)
            except OSError as error:
                raise problem or error from None
        else:
            os.unlink(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    return None


def empty_folder(path: str | Path) -> OSError | None:
    """Remove everything in a folder. Returns the first failure; never raises."""
    problem: OSError | None = None
    try:
        for entry in walk(path, unlock=True):
            try:
                (os.rmdir if entry.is_folder else os.unlink)(entry.name, dir_fd=entry.folder)
            except FileNotFoundError:
                continue
            except OSError as error:
                problem = problem or error
    except OSError as error:
        return error
    return problem


def tree_bytes(path: str | Path) -> int:
    """Size of the files in a folder, or of a file. Never raises."""
    try:
        info = os.lstat(path)
        if not stat.S_ISDIR(info.st_mode):
            return info.st_size
        return sum(entry.info.st_size for entry in walk(path) if not entry.is_folder)
    except OSError:
        return 0


def files_below(folder: Path) -> list[str]:
    """Relative paths of the files in a folder; a link to a file counts. Raises OSError."""
    paths = (entry.path for entry in walk(os.path.realpath(folder)) if not entry.is_folder)
    return sorted(path for path in paths if os.path.isfile(folder / path))


def _open(name: str, folder: int | None, unlock: bool) -> int:
    if unlock:
        handle = os.open(name, _FOLDER | os.O_PATH, dir_fd=folder)
        try:
            info = os.fstat(handle)
            if info.st_uid == os.geteuid() and info.st_mode & stat.S_IRWXU != stat.S_IRWXU:
                with suppress(OSError):  # fchmod refuses O_PATH; this path means the same folder
                    os.chmod(f"/proc/self/fd/{handle}", stat.S_IRWXU)
        finally:
            os.close(handle)
    return os.open(name, _FOLDER, dir_fd=folder)


def _enter(
    here: int, name: str, info: os.stat_result, top: _Level, unlock: bool
) -> tuple[int, _Level] | None:
    """Open and list a folder. None for other files, for mount points and for what cannot be listed.

    Raises FileNotFoundError or NotADirectoryError if the folder was removed or replaced meanwhile.
    """
    if not stat.S_ISDIR(info.st_mode) or info.st_dev != top.info.st_dev:
        return None
    try:
        below = _open(name, here, unlock)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError:
        return None
    try:
        return below, _Level(os.fstat(below), os.listdir(below))
    except OSError:
        os.close(below)
        return None


def _up(here: int, top: int, levels: list[_Level], parents: list[str]) -> int:
    """Open the folder of the last level. If a folder was moved meanwhile, drop the levels that are lost."""
    with suppress(OSError):
        above = os.open("..", _FOLDER, dir_fd=here)
        if os.path.samestat(os.fstat(above), levels[-1].info):
            return above
        os.close(above)
    above = os.dup(top)
    for number, (name, level) in enumerate(zip(parents, levels[1:], strict=True)):
        below = _open_same(name, above, level)
        if below is None:
            del levels[number + 1 :], parents[number:]
            break
        os.close(above)
        above = below
    return above


def _open_same(name: str, folder: int, level: _Level) -> int | None:
    try:
        found = os.open(name, _FOLDER, dir_fd=folder)
    except OSError:
        return None
    if os.path.samestat(os.fstat(found), level.info):
        return found
    os.close(found)
    return None
