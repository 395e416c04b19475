"""Folders and lock files that no other user can fill: temporary files, compiled code, locks, memory.

A temporary folder has a lock while its process lives, and a mode that other folders of the user with such a
name do not have. The next start of skylite removes those that a killed process left.

torch's own choice is `/tmp/torchinductor_USER`. Any user of the machine can make that folder first, with
compiled code in it.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from skylite.errors import ConfigError, convert_os_errors
from skylite.processes.file_tree import remove_tree
from skylite.processes.streams import private_file

MAX_LINKS = 40
"""As in Linux: more are a circle."""
OWN_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "torchinductor", "TRITON_CACHE_DIR": "triton"}
"""Variable -> folder in skylite's cache. It is set for every process."""
LIBRARY_CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
"""Variable -> a library's own folder in the user's cache. It is set only where that one is not safe."""
OTHER_FOLDERS = (
    "XDG_CACHE_HOME",
    "VLLM_RPC_BASE_PATH",
    "TRITON_HOME",
    "CUDA_CACHE_PATH",
    "NUMBA_CACHE_DIR",
    "PYTHONPYCACHEPREFIX",
)
"""Variables that a user may set to a folder with code or sockets."""
MODE = 0o1700
"""Of a folder that is locked: for this user only, and sticky, which changes nothing for one user."""
_NAME = re.compile(r"skylite-([a-z]+-)*[a-z0-9_]{8}")
"""A prefix, and what tempfile.mkdtemp adds to it."""
_cleared: set[Path] = set()


def walk(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every place on the way to `path` that exists, links and what they lead to included, and its lstat.

    Raises ConfigError for a circle of links.
    """
    left, place, links = list(reversed((Path.cwd() / path).parts)), Path("/"), 0
    while left:
        place = place.parent if (part := left.pop()) == ".." else place / part
        try:
            found = os.lstat(place)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return
        yield place, found
        if stat.S_ISLNK(found.st_mode):
            if (links := links + 1) > MAX_LINKS:
                raise ConfigError(f"{path} has more than {MAX_LINKS} links.", "Choose another folder.")
            left += reversed(Path(os.readlink(place)).parts)
            place = place.parent


def problem(path: Path, *, may_be_shared: bool = False) -> str:
    """Why another user could put files there, such as "/tmp can be written to by other users"; empty if none.

    `may_be_shared`: a sticky folder of all users, such as /tmp, is good enough for a new folder with a random
    name. The members of a user's own group (its number is the user's) count as that user.
    """
    last, is_shared, trusted = Path("/"), False, _trusted_owners()
    for place, found in walk(path):
        if found.st_uid not in trusted:
            return f"{place} belongs to the user with id {found.st_uid}"
        if stat.S_ISLNK(found.st_mode):
            continue
        others = stat.S_IWOTH | (stat.S_IWGRP if found.st_gid != found.st_uid else 0)
        last, is_shared = place, bool(found.st_mode & others)
        if is_shared and not found.st_mode & stat.S_ISVTX:
            return f"{place} can be written to by other users"
    return f"{last} can be written to by other users" if is_shared and not may_be_shared else ""


def cache_env(temporary: Path) -> dict[str, str]:
    """Variables to add to the environment, so that no process loads code from a folder that others can fill.

    A default that is not safe is replaced by one in `temporary`. Raises ConfigError for a user's own value.
    """
    env, added = os.environ, {}
    for name in (*OWN_CACHES, *LIBRARY_CACHES, *OTHER_FOLDERS):
        if env.get(name):
            _require_safe(name, env[name])
    cache = Path(env.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    for name, folder in OWN_CACHES.items():
        if not env.get(name):
            path = cache / "skylite" / folder
            added[name] = str(path if _make(path) else temporary / folder)
    for name, folder in LIBRARY_CACHES.items():
        if not env.get(name) and problem(cache / folder):
            added[name] = str(temporary / folder)
    return added


def use_private_folders() -> None:
    """Give this process, and every process that it starts, a private TMPDIR and private caches.

    A TMPDIR that only this user may write to stays. Raises ConfigError for one that belongs to somebody else.
    """
    parent = Path(tempfile.gettempdir())
    if reason := problem(parent, may_be_shared=True):
        raise ConfigError(
            f"The folder for temporary files, {parent}, is not safe: {reason}.",
            "Set TMPDIR to a folder that only you may write to.",
        )
    temporary = parent
    if problem(parent):
        # Inherited by `skylite serve`, which becomes another program: its lock keeps the folder.
        folder = TemporaryFolder(parent=parent, is_inherited=True)
        owner = os.getpid()
        atexit.register(lambda: folder.remove() if os.getpid() == owner else None)
        temporary = folder.path
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    os.environ.update(cache_env(temporary))


def _trusted_owners() -> set[int]:
    """This user and root. In a user namespace without root (Apptainer) root's files belong to nobody."""
    with suppress(OSError):
        if Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]:
            return {os.geteuid(), 0, int(Path("/proc/sys/kernel/overflowuid").read_text())}
    return {os.geteuid(), 0}


def _require_safe(name: str, value: str) -> None:
    path = Path(value).expanduser()
    if not path.is_absolute():
        raise ConfigError(f"{name}={value} is not an absolute path.", f"Set {name} to one, or unset it.")
    if not _make(path):
        reason = problem(path) or "it cannot be created"
        raise ConfigError(
            f"{name}={value} is not safe, because skylite runs code from there: {reason}.",
            f"Unset {name}, or set it to a folder that only you may write to.",
        )


def _make(path: Path) -> bool:
    """Create the folder for this user only, unless it exists. Whether it is there and safe."""
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    return path.is_dir() and not problem(path)


class TemporaryFolder:
    """A new folder for this user only, whatever the umask."""

    def __init__(self, kind: str = "", parent: Path | None = None, *, is_inherited: bool = False) -> None:
        """`kind`: word in its name, such as "lib-". `parent`: None for the folder of tempfile.

        `is_inherited`: a program that replaces this process (exec) keeps the folder.
        """
        parent = parent or Path(tempfile.gettempdir())
        if parent not in _cleared:
            _cleared.add(parent)
            clear_unused(parent)
        self.path = Path(tempfile.mkdtemp(prefix=f"skylite-{kind}", dir=parent))
        self._lock: int | None = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        os.set_inheritable(self._lock, is_inherited)
        with suppress(OSError):  # a file system without locks: then nobody but this process removes it
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.fchmod(self._lock, MODE)  # last: before, clear_unused does not touch it

    def remove(self) -> None:
        """Remove it with everything in it. What cannot be removed stays."""
        if self._lock is not None:
            remove_tree(self.path)
            os.close(self._lock)
            self._lock = None


@contextmanager
def temporary_folder(kind: str = "") -> Iterator[Path]:
    """A `TemporaryFolder` that is removed at the end of the block."""
    folder = TemporaryFolder(kind)
    try:
        yield folder.path
    finally:
        folder.remove()


def clear_unused(parent: Path) -> None:
    """Remove the folders that killed processes of this user left in `parent`."""
    for path in unused_folders(parent):
        remove_tree(path)


def unused_folders(parent: Path) -> Iterator[Path]:
    """Such folders. No living process can use one: it is locked while it is yielded."""
    for path in sorted(parent.glob("skylite-*")):
        if not _NAME.fullmatch(path.name) or not _is_own(path):
            continue
        with suppress(OSError):  # such as BlockingIOError: its process lives
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path
            finally:
                os.close(lock)


def _is_own(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    is_marked = stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == MODE
    return is_marked and found.st_uid == os.getuid()


def make_own_folder(folder: Path, hint: str) -> None:
    """Create the folder with mode 0700, or check an existing one.

    Raises ConfigError if it is a link, is another user's, or others may write to it; WriteFailed.
    """
    with convert_os_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            return
        found = os.lstat(folder)
    if problem := _folder_problem(found):
        raise ConfigError(f"{folder} {problem}; another user could change what this run reads.", hint)


def require_own_links(path: Path, hint: str) -> None:
    """Raise ConfigError if a link on the way to `path` belongs to another user, who can change it."""
    for place, found in walk(path):
        if stat.S_ISLNK(found.st_mode) and found.st_uid not in (os.geteuid(), 0):
            raise ConfigError(
                f"{place} is a link of the user with id {found.st_uid}, not yours; "
                "another user could change what this run reads.",
                hint,
            )


def _folder_problem(found: os.stat_result) -> str:
    if stat.S_ISLNK(found.st_mode):
        return "is a symbolic link"
    if not stat.S_ISDIR(found.st_mode):
        return "is not a folder"
    if found.st_uid != os.geteuid():
        return f"belongs to the user with id {found.st_uid}, not to you"
    mode = stat.S_IMODE(found.st_mode)
    return f"is open to other users (mode 0{mode:o})" if mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


def open_lock(path: Path) -> FileIO:
    """Open or create a lock file, without changing its content. Forked children do not keep it.

    Only this user may read it: who can open a file can hold its lock.
    Raises ConfigError if it is not a plain file with one name: writing the lock would change another file.
    Raises WriteFailed.
    """
    with convert_os_errors(path):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR):
                raise
            kind = "a symbolic link" if error.errno == errno.ELOOP else "a folder"
            raise _no_lock(path, kind) from None
        stream = private_file(descriptor, "r+b")
        found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        stream.close()
        raise _no_lock(path, "a hard link to another file" if found.st_nlink > 1 else "a pipe or device")
    return stream


def _no_lock(path: Path, kind: str) -> ConfigError:
    return ConfigError(
        f"{path} is {kind}, and a lock must be a plain file with one name; it was not used.", "Remove it."
    )


def state_folder() -> Path:
    """Where skylite keeps what it remembers about its user."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "skylite"
