"""A filesystem that shows what another machine wrote only some seconds later, as NFS does with its caches.

    python benchmarks/delayed_fs.py mount STORE PLACE --delay 5 [--local-locks]
    python benchmarks/delayed_fs.py run --delay 5 [--local-locks] [--cut]

`mount` shows the folder STORE at PLACE; each mount is a machine. A folder is seen as it was up to --delay
seconds ago: its names, the sizes behind them, and the file that a name stood for, also one that was replaced
or deleted. Each folder has an age of its own, so changes arrive in another order. What the mount itself
changes it sees at once; an open file shows its present bytes (close-to-open); O_EXCL and rename work as on
the store. NFS hides less: it opens a replaced file again. `flock` reaches the other mounts, or, with
--local-locks, does not (`nolock`).

`run` trains the tests' tiny model on two network namespaces, each with its own mount of the run's folder, and
compares the adapter with that of one machine. --cut kills the second machine after step 2 and brings it back.

Needs root, /dev/fuse, `pip install mfusepy`, and libfuse 2 or 3.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import shared  # noqa: F401 -- puts the repository on the path

from tests.e2e.project import COMMAND, WITH_FAKE_ENGINE, Project, make_project
from tests.e2e.running import DEADLINE_S
from tests.e2e.test_two_hosts import adapter, train_args
from tests.tiny_models import make_tiny_model
from tests.two_hosts import TwoHosts, ends_with_block, two_hosts

STAT = ("st_mode", "st_size", "st_nlink", "st_uid", "st_gid", "st_ino")
TIMES = ("st_atime", "st_mtime", "st_ctime")


class Seen:
    """A name as a machine sees it. Its descriptor keeps the file, whatever the name stands for now."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW)
        self.stat = os.fstat(self.descriptor)
        weakref.finalize(self, os.close, self.descriptor)


class View:
    """The folders of STORE as one machine sees them."""

    def __init__(self, store: str, delay_s: float) -> None:
        self.store, self.delay_s = store, delay_s
        self.folders: dict[str, tuple[float, dict[str, Seen]]] = {}
        self.lock = threading.RLock()
        threading.Thread(target=self._look_around, daemon=True).start()

    def real(self, path: str) -> str:
        return self.store + path

    def folder(self, path: str) -> dict[str, Seen]:
        """Its names, as old as they may be."""
        with self.lock:
            expires, names = self.folders.get(path, (0.0, {}))
            if time.monotonic() > expires:
                names = {}
                for name in os.listdir(self.real(path)):
                    with contextlib.suppress(FileNotFoundError):
                        names[name] = Seen(os.path.join(self.real(path), name))
                expires = time.monotonic() + self.delay_s * random.uniform(0.5, 1)
                self.folders[path] = expires, names
            return names

    def find(self, path: str) -> Seen:
        with self.lock:
            if path == "/":
                return Seen(self.store)
            found = self.folder(os.path.dirname(path)).get(os.path.basename(path))
            if found is None:
                raise OSError(errno.ENOENT, path)
            return found

    def changed(self, *paths: str) -> None:
        """This machine changed what these names stand for."""
        with self.lock:
            for path in paths:
                names, name = self.folder(os.path.dirname(path)), os.path.basename(path)
                names.pop(name, None)
                for below in [f for f in self.folders if f == path or f.startswith(path + "/")]:
                    del self.folders[below]
                with contextlib.suppress(FileNotFoundError):
                    names[name] = Seen(self.real(path))

    def _look_around(self) -> None:
        """Look at every folder again and again, so that what is seen is old."""
        while True:
            for folder, _, _ in os.walk(self.store):
                with contextlib.suppress(OSError):
                    self.folder(folder.removeprefix(self.store) or "/")
            time.sleep(0.1)


def flock(self: object, path: str, fh: int, operation: int) -> int:
    """As NFS: an exclusive lock needs a file that is open to write."""
    is_reader = fcntl.fcntl(fh, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    if is_reader and operation & fcntl.LOCK_EX:
        raise OSError(errno.EBADF, path)
    fcntl.flock(fh, operation)
    return 0


def operations(view: View, local_locks: bool) -> Any:
    """The filesystem's calls."""
    from mfusepy import Operations

    class Machine(Operations):  # type: ignore[misc]
        use_ns = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            seen = os.fstat(fh) if fh else view.find(path).stat
            times = {key: getattr(seen, f"{key}_ns") for key in TIMES}
            return {key: getattr(seen, key) for key in STAT} | times

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *view.folder(path)]

        def readlink(self, path: str) -> str:
            return os.readlink(view.real(path))

        def open(self, path: str, flags: int) -> int:
            seen = view.find(path)
            descriptor = os.open(f"/proc/self/fd/{seen.descriptor}", flags & ~(os.O_NOFOLLOW | os.O_CREAT))
            seen.stat = os.fstat(descriptor)
            return descriptor

        def create(self, path: str, mode: int, flags: int) -> int:
            descriptor = os.open(view.real(path), flags | os.O_CREAT, mode)
            view.changed(path)
            return descriptor

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            is_append = fcntl.fcntl(fh, fcntl.F_GETFL) & os.O_APPEND
            return os.write(fh, data) if is_append else os.pwrite(fh, data, offset)

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            os.truncate(fh or f"/proc/self/fd/{view.find(path).descriptor}", length)
            view.changed(path)
            return 0

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            os.fsync(fh)
            return 0

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            with contextlib.suppress(OSError):
                seen = view.find(path)
                seen.stat = os.fstat(seen.descriptor)
            return 0

        def rename(self, old: str, new: str) -> int:
            os.rename(view.real(old), view.real(new))
            view.changed(old, new)
            return 0

        def link(self, target: str, source: str) -> int:
            os.link(view.real(source), view.real(target))
            view.changed(target)
            return 0

        def symlink(self, target: str, source: str) -> int:
            os.symlink(source, view.real(target))
            view.changed(target)
            return 0

        def statfs(self, path: str) -> dict[str, int]:
            found = os.statvfs(view.store)
            return {
                key: getattr(found, key) for key in ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail")
            }

    def changing(call: Any) -> Any:
        def change(self: Any, path: str, *words: Any) -> int:
            call(view.real(path), *words)
            view.changed(path)
            return 0

        return change

    for name in ("unlink", "mkdir", "rmdir", "chmod", "chown"):
        setattr(Machine, name, changing(getattr(os, name)))
    Machine.utimens = changing(lambda path, times: os.utime(path, ns=times))
    if not local_locks:
        Machine.flock = flock
    return Machine()


def mount(store: Path, place: Path, delay_s: float, local_locks: bool) -> None:
    """Serve until it is unmounted."""
    from mfusepy import FUSE

    view = View(str(store.resolve()), delay_s)
    FUSE(
        operations(view, local_locks),
        str(place),
        foreground=True,
        attr_timeout=0,
        entry_timeout=0,
        negative_timeout=0,
    )


@contextlib.contextmanager
def mounted(store: Path, place: Path, delay_s: float, local_locks: bool) -> Iterator[None]:
    """The same in a process of its own, until the block ends."""
    place.mkdir()
    words = ["mount", str(store), str(place), "--delay", str(delay_s), *["--local-locks"] * local_locks]
    process = subprocess.Popen([sys.executable, __file__, *words])
    try:
        while not place.is_mount():
            if process.poll() is not None:
                sys.exit("the mount failed")
            time.sleep(0.1)
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=False)
        process.terminate()
        process.wait()


SHARED = "shared"
IN_PLACE = 'mount --bind "$0" "$1" && shift && exec "$@"'


@dataclass(frozen=True)
class Trial:
    """A run on two machines that see its folder by mounts of their own."""

    project: Project
    hosts: TwoHosts
    folder: Path

    @contextlib.contextmanager
    def on(self, host: int, *words: str) -> Iterator[subprocess.Popen[str]]:
        """skylite on a host, until the block ends. Its output goes to host-N.out."""
        place = [str(self.folder / f"machine-{host}"), str(self.project.root / SHARED)]
        with (self.folder / f"host-{host}.out").open("a") as out:
            process = subprocess.Popen(
                [*self.hosts.command(host), "sh", "-c", IN_PLACE, *place, *COMMAND, *words],
                cwd=self.project.root,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )
        with ends_with_block(process):
            yield process


def run(delay_s: float, local_locks: bool, cut: bool) -> None:
    """Train on one machine and on two, and print what came of it."""
    os.environ[WITH_FAKE_ENGINE] = "1"
    with tempfile.TemporaryDirectory() as name, two_hosts() as hosts, contextlib.ExitStack() as stack:
        folder = Path(name)
        for part in ("project", "store", "model"):
            (folder / part).mkdir()
        project = make_project(folder / "project", make_tiny_model(folder / "model"))
        (project.root / SHARED).mkdir()
        for host in range(2):
            stack.enter_context(mounted(folder / "store", folder / f"machine-{host}", delay_s, local_locks))
        alone = project.run(*train_args(project, "alone", "trainer.num_ranks=2"))
        assert alone.returncode == 0, alone.stderr
        began = time.monotonic()
        codes = train_apart(Trial(project, hosts, folder), cut)
        print(f"exit codes {codes} after {time.monotonic() - began:.0f} s")
        for host in range(2):
            print(f"--- machine {host}\n{(folder / f'host-{host}.out').read_text()}")
        if codes == [0, 0]:
            store = Project(folder / "store", project.model)
            expected, found = adapter(project, "alone"), adapter(store, "apart")
            print("largest difference", max(float(np.abs(expected[k] - found[k]).max()) for k in expected))


def train_apart(trial: Trial, cut: bool) -> list[int | None]:
    """The exit codes of both machines; None: it still waits."""
    hosts = trial.hosts
    several = [
        "trainer.hosts=2",
        f"trainer.interface={hosts.interfaces[0]}",
        f"trainer.max_restarts={2 * cut}",
    ]
    join = ["worker", "--join", f"{SHARED}/apart", "--interface", hosts.interfaces[1]]
    with trial.on(0, *train_args(trial.project, f"{SHARED}/apart", *several)) as first:
        if cut:
            with trial.on(1, *join):
                metrics = trial.folder / "store/apart/metrics.jsonl"
                while first.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < 2):
                    time.sleep(0.1)
        with trial.on(1, *join) as second:
            code = first.wait(DEADLINE_S)
            try:
                return [code, second.wait(60)]
            except subprocess.TimeoutExpired:
                return [code, None]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    mounting, running = kinds.add_parser("mount"), kinds.add_parser("run")
    mounting.add_argument("store", type=Path)
    mounting.add_argument("place", type=Path)
    running.add_argument("--cut", action="store_true", help="kill the second machine after step 2")
    for each in (mounting, running):
        each.add_argument("--delay", type=float, required=True, help="seconds")
        each.add_argument("--local-locks", action="store_true", help="flock does not reach the other mounts")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the mounts and namespaces must end with it
    if args.kind == "mount":
        mount(args.store, args.place, args.delay, args.local_locks)
    else:
        run(args.delay, args.local_locks, args.cut)


if __name__ == "__main__":
    main()
