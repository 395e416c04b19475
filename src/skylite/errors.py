"""Every error a user can meet.

SkyliteError              bad input or a broken surrounding; printed as one sentence, exit code 2
|- ConfigError            recipe, flag or `--set` value
|- DataError              a data set, row or parquet file
|- ModelError             a model or adapter folder
RunFailed                 a run that had started stopped; exit code 1
|- ChildDied              vLLM or a trainer rank ended; carries the last lines of its log
|- EngineFailed           an engine did not answer a request in time, or not in a usable way; another attempt may do
|- SyncFailed             an engine did not load the adapter, or does not sample it (canary)
|- TrainingDiverged       loss or gradient is not finite; the update was not applied
"""

from __future__ import annotations


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


class EngineFailed(RunFailed):
    """A request got no usable answer: connection lost, deadline over, HTTP 5xx, or a reply that is not what vLLM sends."""


class EngineDead(EngineFailed):
    """A server says itself that its engine is dead."""


class SyncFailed(RunFailed):
    """An engine did not load the published adapter, or does not sample from it."""


class TrainingDiverged(RunFailed):
    """The loss or the gradient is not finite."""
