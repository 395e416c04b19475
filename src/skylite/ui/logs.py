"""Where log records go: lines on the terminal, and RUN/logs/skylite.log.

Modules log with `logging.getLogger(__name__)`. Only the command line configures handlers: a program that
imports skylite keeps its own. This module does not import rich, because `skylite --help` loads it.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from skylite.errors import SkyliteError, WriteFailed, convert_os_errors, error_line
from skylite.run.files import append_line, atomic_file
from skylite.untrusted_text import plain, plain_lines

ON_PANEL: dict[str, Any] = {"on_panel": True}
"""`extra` of a record that repeats what the live panel shows: a live terminal does not print it."""
PRINTED: dict[str, Any] = {"is_printed": True}
"""`extra` of a record that a user's program printed: the terminal shows it only if the run has no log."""
MEMBER: ContextVar[str] = ContextVar("member", default="")
"""In the tasks of a sweep's policy, its name."""
_ROOT = logging.getLogger("skylite")


def show(text: str, *, to_stderr: bool = False) -> None:
    """Print what a command was asked for. Names and errors in it may be those of strangers."""
    print(plain_lines(text), file=sys.stderr if to_stderr else sys.stdout, flush=True)


class TerminalHandler(logging.Handler):
    """Prints records for a person: above the live panel while a screen is open, else on stderr."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.info_on_stdout = False
        self.screen: Callable[[str], None] | None = None
        """Prints a line on the open screen."""
        self.has_panel = False
        """The open screen draws a live panel."""
        self.show_work: Callable[[str], None] | None = None
        """Shows long work on the live panel."""
        self.shows_printed = False

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "is_printed", False) and not self.shows_printed:
            return
        if self.screen is not None:
            if not (self.has_panel and getattr(record, "on_panel", False)):
                self.screen(self.format(record))
        elif self.info_on_stdout and record.levelno < logging.WARNING:
            print(self.format(record), flush=True)
        else:
            name = "" if self.level == logging.DEBUG else "skylite: "
            print(f"{name}{self.format(record)}", file=sys.stderr, flush=True)

    def format(self, record: logging.LogRecord) -> str:
        """The message, with its level from warnings up; with time and logger name at the level DEBUG."""
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        level += f"{name}: " if (name := MEMBER.get()) else ""
        head, (first, *lines) = "", super().format(record).split("\n")
        if self.level == logging.DEBUG:
            head = f"{_FILE_FORMAT.formatTime(record, '%H:%M:%S')} {record.name}: "
        return "\n".join([f"{head}{level}{plain(first)}", *map(plain, lines)])


class RunLogHandler(logging.Handler):
    """Appends records from info up to a file. Records that come before `open` wait in memory."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._path: Path | None = None
        self._waiting: list[str] = []
        self._is_refused = False

    def emit(self, record: logging.LogRecord) -> None:
        head, *lines = _FILE_FORMAT.format(record).split("\n")
        head += f" [{name}]" if (name := MEMBER.get()) else ""
        text = "\n".join([plain(head), *(f"  {plain(line)}" for line in lines)])
        if self._path is None:
            self._waiting.append(text)
        else:
            self._append(self._path, text)

    def open(self, path: Path) -> None:
        """Write what waited, and every later record, to `path`."""
        self._path, self._is_refused = path, False
        waiting, self._waiting = self._waiting, []
        try:
            with convert_os_errors(path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
        except WriteFailed as error:
            self._warn_once(error)
        for text in waiting:
            self._append(path, text)

    def shut(self) -> None:
        """Forget what waited; later records wait again."""
        self._path, self._waiting = None, []

    def _append(self, path: Path, text: str) -> None:
        try:
            append_line(path, text)
        except WriteFailed as error:
            self._warn_once(error)

    def _warn_once(self, error: WriteFailed) -> None:
        if not self._is_refused:
            self._is_refused = True
            _ROOT.warning(f"{error} The run continues without these log lines.")


@contextmanager
def _error_as_last_record(handler: RunLogHandler) -> Iterator[None]:
    """Give the handler an error that leaves the block, with its traceback if it was not foreseen."""
    try:
        yield
    except BaseException as error:
        trace = None if isinstance(error, SkyliteError) else sys.exc_info()
        handler.handle(_ROOT.makeRecord(_ROOT.name, logging.ERROR, __file__, 0, str(error), (), trace))
        raise


@contextmanager
def member_log(name: str, path: Path) -> Iterator[None]:
    """Mark the records of this block, and of tasks and threads that it starts, and write them to `path`."""
    handler = RunLogHandler()
    handler.addFilter(lambda _: MEMBER.get() == name)
    handler.open(path)
    _ROOT.addHandler(handler)
    token = MEMBER.set(name)
    try:
        with _error_as_last_record(handler):
            yield
    finally:
        MEMBER.reset(token)
        _ROOT.removeHandler(handler)


_FILE_FORMAT = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
_TERMINAL = TerminalHandler()
_RUN_LOG = RunLogHandler()


def configure_logging(level: int = logging.INFO, *, info_on_stdout: bool = False) -> None:
    """Set up the handlers of the command line. `info_on_stdout`: info is what the command was asked for."""
    _TERMINAL.info_on_stdout, _TERMINAL.shows_printed = info_on_stdout, False
    _RUN_LOG.shut()
    for handler in (_TERMINAL, _RUN_LOG):
        _ROOT.addHandler(handler)
    _ROOT.propagate = False  # a reward file may configure the root logger: each line would come twice
    set_terminal_level(level)


def log_printed(line: str) -> None:
    """Log a line that a user's program printed."""
    _ROOT.info(f"printed: {line}", extra=PRINTED)


def show_printed() -> None:
    """Show such lines on the terminal: this command writes no run, so they have no other place."""
    _TERMINAL.shows_printed = True


def set_terminal_level(level: int) -> None:
    """What the terminal shows: INFO by default, WARNING for --quiet, DEBUG for --verbose."""
    _TERMINAL.setLevel(level)
    _ROOT.setLevel(min(level, logging.INFO))  # the log file gets info in any case


def has_screen() -> bool:
    """Whether a screen is open."""
    return _TERMINAL.screen is not None


def show_on_panel(text: str) -> None:
    """Show what the run waits for on the live panel; "" for nothing. Without a panel, do nothing."""
    if _TERMINAL.has_panel and _TERMINAL.show_work is not None:
        _TERMINAL.show_work(text)


def shows_info() -> bool:
    """Whether the terminal shows more than warnings."""
    return _TERMINAL.level <= logging.INFO


def shows_debug() -> bool:
    """Whether the terminal shows debug messages (--verbose)."""
    return _TERMINAL.level <= logging.DEBUG


@contextmanager
def run_log(path: Path) -> Iterator[None]:
    """Write log records to `path` too, beginning with those of the command so far.

    An error that leaves the block is the last record.
    """
    _RUN_LOG.open(path)
    try:
        with _error_as_last_record(_RUN_LOG):
            yield
    finally:
        _RUN_LOG.shut()


def unforeseen_text(error: Exception) -> str:
    """The message for an error that no command foresaw; saves its traceback in the user's state folder."""
    from skylite.processes.private_folders import state_folder

    path = state_folder() / "last-error.log"
    try:
        with atomic_file(path) as temporary:
            text = "".join(traceback.format_exception(error))
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    except WriteFailed:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"Unforeseen error: {error_line(error)} ({last.filename}, line {last.lineno})."
    return f"Unforeseen error: {error_line(error)}. Its traceback is in {path}."


@contextmanager
def lines_on_screen(
    print_line: Callable[[str], None], *, has_panel: bool, show_work: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Print the terminal's lines with `print_line` in this block."""
    _TERMINAL.screen, _TERMINAL.has_panel, _TERMINAL.show_work = print_line, has_panel, show_work
    try:
        yield
    finally:
        _TERMINAL.screen, _TERMINAL.has_panel, _TERMINAL.show_work = None, False, None
