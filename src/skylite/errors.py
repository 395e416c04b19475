"""Every error that a user can see.

SkyliteError              bad input or a broken environment; printed as one sentence, exit code 2
|- ConfigError            recipe, flag or `--set` value
|  '- DoesNotFit          the memory plan does not allow it
|- DataError              a data set, row or parquet file
|- ModelError             a model or adapter folder
'- RunFailed              a started run stopped; exit code 1
   |- ChildDied           an engine or a trainer rank exited; carries the last lines of its log
   |  '- TrainerLost      the trainer crashed or hangs; a restart may succeed
   |- EngineFailed        an engine sent no usable answer in time; a retry may succeed
   |  '- EngineDead       the server reports that its engine is dead
   |- SyncFailed          an engine did not load the adapter, or does not sample from it (canary)
   |- TrainingDiverged    loss or gradient is not finite; the optimizer step was skipped
   '- WriteFailed         the disk refused a write; the previous content is intact
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skylite.untrusted_text import plain

_WRITE_HINTS = {
    errno.ENOSPC: "Free space on that disk.",
    errno.EDQUOT: "Free space within your quota.",
    errno.EACCES: "Make that path writable for you.",
    errno.EPERM: "Make that path writable for you.",
    errno.EROFS: "The disk is mounted read-only; mount it writable, or copy the run to another disk.",
    errno.EIO: "The disk failed; check the kernel log and copy the run to another disk.",
    errno.EMFILE: "Raise the limit on open files (ulimit -n).",
    errno.ENFILE: "Raise the system-wide limit on open files.",
    errno.EINVAL: "Choose a name that the file system accepts.",
    errno.ENAMETOOLONG: "Choose a shorter name.",
    errno.ENOTDIR: "Choose a path whose parents are folders.",
    errno.EISDIR: "Move that folder away.",
}


class SkyliteError(Exception):
    """`what` gives the problem with its value and reason; `hint` says what to do."""

    exit_code = 2

    def __init__(self, what: str, hint: str = "") -> None:
        self.what = what
        self.hint = hint
        super().__init__(f"{what} {hint}".strip())


class ConfigError(SkyliteError):
    """A recipe, flag or `--set` value is invalid."""


class DoesNotFit(ConfigError):
    """Engines and trainer do not fit into the memory together."""


class DataError(SkyliteError):
    """A data set, row or parquet file is invalid."""


class ModelError(SkyliteError):
    """A model or adapter folder is invalid."""


class RunFailed(SkyliteError):
    """A started run cannot continue."""

    exit_code = 1


class ChildDied(RunFailed):
    """A child process exited. `log_tail`: the last lines of its log. `child`: its name, or empty."""

    def __init__(self, what: str, hint: str = "", log_tail: str = "", child: str = "") -> None:
        super().__init__(what, hint)
        self.log_tail = log_tail
        self.child = child


class TrainerLost(ChildDied):
    """The trainer was killed, hangs, or raised an unexpected error.

    The run may continue from its last checkpoint.
    """


class OutOfMemory(TrainerLost):
    """A step did not fit into memory; the trainer has chosen smaller micro-batches for the next attempt."""


class EngineFailed(RunFailed):
    """A request got no usable answer: connection lost, timeout, HTTP 5xx, or a malformed reply."""


class EngineDead(EngineFailed):
    """An engine reports that it is dead."""


class SyncFailed(RunFailed):
    """An engine did not load the published adapter, or does not sample from it."""


class WriteFailed(RunFailed):
    """A file or folder could not be written.

    The previous content is intact, and no partial file has a final name.
    """


class TrainingDiverged(RunFailed):
    """A number of the step is not finite, the KL is over its limit, or the reference changed."""


def non_finite_reward(name: str, value: str, prompt_id: str, completion: str) -> RunFailed:
    """The error for a reward that is NaN, infinite or not a number where one is required."""
    return RunFailed(
        f"The reward function {name} returned {value} for prompt {prompt_id} "
        f"(completion {completion[:80]!r}).",
        "A reward must return a finite number.",
    )


def error_line(error: BaseException) -> str:
    """Class and first line of any error, at most 500 characters, none of which controls a terminal.

    It skips lines without letters and digits, such as the frame of a box.
    """
    try:
        first, *more = str(error).strip().split("\n")
        text = next((line.strip() for line in (first, *more) if any(map(str.isalnum, line))), first)[:500]
    except BaseException:  # noqa: BLE001 a user's class may raise anything here
        text = ""
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return plain(line)


def write_failed(error: OSError, path: Path | None = None) -> WriteFailed:
    """Convert an OSError; give `path` when it differs from the path in the error."""
    where = path if path is not None else error.filename
    reason = os.strerror(error.errno) if error.errno else str(error)
    code = (
        f" ({errno.errorcode[error.errno]})"
        if error.errno is not None and error.errno in errno.errorcode
        else ""
    )
    other = (
        f", at {error.filename}"
        if error.filename is not None and path is not None and str(error.filename) != str(path)
        else ""
    )
    return WriteFailed(
        f"{where or 'A file'} could not be written: {reason}{code}{other}. Its previous content is intact.",
        _WRITE_HINTS.get(error.errno or 0, "Check the disk and the path's permissions."),
    )


@contextmanager
def convert_os_errors(path: Path) -> Iterator[None]:
    """Convert an OSError inside the block to a WriteFailed that names `path`."""
    try:
        yield
    except OSError as error:
        raise write_failed(error, path) from error
