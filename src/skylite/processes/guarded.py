"""Run work that runs a user's code in a child, which must say that it finished.

Such code can end its process with exit code 0, as by os._exit in a thread or by os.execv. A command that
wrote nothing would then look like a success.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from skylite.errors import RunFailed
from skylite.processes.reaper import die_with_parent

SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD}
FROM_TERMINAL = 0x80
"""SI_KERNEL: Ctrl-C reaches the child, too."""
USAGE = 2
"""Exit code."""


def run_guarded(work: Callable[[], int], what: str) -> int:
    """Run `work` in a child and return its exit code. Raises GuardFailed if it ends without one."""
    before, parent = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS), os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    read_end, write_end = os.pipe()
    if (child := os.fork()) == 0:
        die_with_parent(parent)
        os.close(read_end)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            code = work()
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        os.write(write_end, bytes([code]))
        raise SystemExit(code)
    os.close(write_end)
    status = _wait(child)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.set_blocking(read_end, False)  # what the code started may hold the other end
    try:
        said = os.read(read_end, 1)
    except BlockingIOError:
        said = b""
    if said:
        return said[0]
    code = os.waitstatus_to_exitcode(status)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    raise GuardFailed(
        f"{what} {how} before it finished: code of the data or the reward ended its process, "
        "such as by os._exit in a thread or os.execv.",
        "Remove that from the file.",
    )


class GuardFailed(RunFailed):
    """The child ended without saying that it finished."""

    exit_code = USAGE


def _wait(child: int) -> int:
    """The wait status of the child. Signals for this process go to it."""
    while True:
        info = signal.sigwaitinfo(SIGNALS)
        if info.si_signo != signal.SIGCHLD:
            if info.si_code != FROM_TERMINAL:
                os.kill(child, info.si_signo)
            continue
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            sys.stdout.flush()
            return status
