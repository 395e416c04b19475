"""Whether processes get a core when they need one. On a busy machine a slow process is not a hanging one."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil


class Starvation:
    """How long a process and its descendants wait for a core, by the kernel's count (/proc/PID/schedstat)."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._waited = dict[Path, float]()

    def seconds(self) -> float:
        """The longest wait of one thread since the last call.

        0 for threads that began since then, and on kernels that do not count it.
        """
        before, self._waited = self._waited, {}
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self._pid)
            for process in (root, *root.children(recursive=True)):
                for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
                    with contextlib.suppress(OSError, IndexError, ValueError):
                        self._waited[path] = int(path.read_text(encoding="ascii").split()[1]) / 1e9
        return max((now - before[path] for path, now in self._waited.items() if path in before), default=0.0)
