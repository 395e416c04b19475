"""Every error a user can meet.

SkyliteError              bad input or a broken surrounding; printed as one sentence, exit code 2
|- ConfigError            recipe, flag or `--set` value
|- DataError              a data set, row or parquet file
|- ModelError             a model or adapter folder
RunFailed                 a run that had started stopped; exit code 1
|- ChildDied              vLLM or a trainer rank ended; carries the last lines of its log
|  '- TrainerLost        the trainer died or hangs for no reason that must come again
|- EngineFailed           an engine did not answer a request in time, or not in a usable way; another attempt may do
|- SyncFailed             an engine did not load the adapter, or does not sample it (canary)
|- TrainingDiverged       loss or gradient is not finite; the update was not applied
|- WriteFailed            the disk refused a write; what was there before is whole
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

_WRITE_HINTS = {
    errno.ENOSPC: "Make room on that disk.",
    errno.EDQUOT: "Make room within your quota.",
    errno.EACCES: "Make that path writable for you.",
    errno.EPERM: "Make that path writable for you.",
    errno.EROFS: "It is mounted read-only; mount it writable, or copy the run to another disk.",
    errno.EIO: "The disk failed; see the kernel's log, and copy the run to another one.",
    errno.EMFILE: "Raise the limit of open files (ulimit -n).",
    errno.ENFILE: "Raise the machine's limit of open files.",
    errno.EINVAL: "Choose a name that the file system takes.",
    errno.ENAMETOOLONG: "Choose a shorter name.",
    errno.ENOTDIR: "Choose a path whose parents are folders.",
    errno.EISDIR: "Move that folder away.",
}


class SkyliteError(Exception):
    """What is wrong (with the value and the reason), and what to do about it."""

    exit_code = 2

    def __init__(self, what: str, hint: str = "") -> None:
        self.what = what
        self.hint = hint
        super().__init__(f"{what} {hint}".strip())


class ConfigError(SkyliteError):
    """A recipe, a flag or a `--set` value that cannot be used."""


class DataError(SkyliteError):
    """A data set, a row or a parquet file that cannot be used."""


class ModelError(SkyliteError):
    """A model or adapter folder that cannot be used."""


class RunFailed(SkyliteError):
    """A run that had started and cannot go on."""

    exit_code = 1


class ChildDied(RunFailed):
    """A child process ended; `log_tail` holds its last lines."""

    def __init__(self, what: str, hint: str = "", log_tail: str = "") -> None:
        super().__init__(what, hint)
        self.log_tail = log_tail


class TrainerLost(ChildDied):
    """The trainer was killed, hangs, or met an error nobody foresaw: the run may go on from its last checkpoint."""


class EngineFailed(RunFailed):
    """A request got no usable answer: connection lost, deadline over, HTTP 5xx, or a reply that is not what vLLM sends."""


class EngineDead(EngineFailed):
    """A server says itself that its engine is dead."""


class SyncFailed(RunFailed):
    """An engine did not load the published adapter, or does not sample from it."""


class WriteFailed(RunFailed):
    """A file or folder could not be written; the state before is whole, and nothing torn is visible under a final name."""


class TrainingDiverged(RunFailed):
    """The loss or the gradient is not finite."""


def non_finite_reward(value: object, prompt_id: str, completion: str) -> RunFailed:
    """For whoever cannot go on without the score of a completion."""
    return RunFailed(
        f"The reward function returned {value!r} for prompt {prompt_id} (completion {completion[:80]!r}).",
        "A reward must return a finite number.",
    )


def write_failed(error: OSError, path: Path | None = None) -> WriteFailed:
    """What, where, why and what to do about an OSError; `path` when it is not the error's own."""
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
        f"{where or 'A file'} could not be written: {reason}{code}{other}. What was there before is whole.",
        _WRITE_HINTS.get(error.errno or 0, "Check the disk and the path's permissions."),
    )
