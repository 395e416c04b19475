"""The command line: its verbs, and what every command does at its start and on an error."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from skylite import __version__
from skylite.cli.help import Commands, Program
from skylite.cli.options import Verbose, set_level
from skylite.errors import ConfigError, SkyliteError, write_failed
from skylite.processes.guarded import run_guarded
from skylite.processes.import_path import protect_imports
from skylite.progress_reporting import show_long_work
from skylite.ui.logs import configure_logging, show, unforeseen_text
from skylite.ui.progress_line import show_progress
from skylite.untrusted_text import encodable


class Skylite(Program):
    """Each verb is a function in the file of its name; the file's docstring is its help."""

    headings = {
        "Train": ("prepare", "train", "sweep", "worker", "receive", "replay", "env"),
        "Look at runs": ("watch", "report", "samples", "runs", "adapters"),
        "Use an adapter": ("eval", "serve", "chat", "export", "probe"),
        "Write your own loop": ("service",),
        "Machine and loggers": ("doctor", "models", "plan", "log"),
    }


app = Commands(
    cls=Skylite,
    name="skylite",
    help="Train a LoRA adapter with reinforcement learning on one machine: "
    "FSDP2 trains, vLLM samples, and every adapter sync is verified.",
    add_completion=True,
)


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version; with -v also the versions of torch, vLLM and others."
        ),
    ] = False,
    verbose: Verbose = None,
) -> None:
    """Set up logging before a command runs."""
    if version:
        show(version_text(verbose=bool(verbose)))
        raise typer.Exit
    if context.invoked_subcommand is None:
        context.fail("Missing command.")
    show_long_work(show_progress)
    configure_logging(info_on_stdout=context.invoked_subcommand == "prepare")
    set_level(verbose)


def version_text(*, verbose: bool) -> str:
    """The version in one line, or a line for each library."""
    if not verbose:
        return f"skylite {__version__}"
    from skylite.processes.hardware import library_versions

    versions = {"skylite": __version__, "python": platform.python_version()} | library_versions()
    return "\n".join(f"{name} {found}" for name, found in versions.items())


def main(begin: Callable[[], None] = lambda: None) -> None:
    """Run `begin`, then the command line. An error becomes one message on stderr and a nonzero exit code."""
    protect_imports()
    raise SystemExit(_exit_code(begin))  # not sys.exit, which a user's code may have replaced


def guarded_main(begin: Callable[[], None]) -> None:
    """`main` as a program. A command that runs a user's code in this process gets one of its own."""
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    if words[:1] not in (["prepare"], ["eval"], ["env"]) and "--dry-run" not in sys.argv:
        main(begin)
    try:
        code = run_guarded(lambda: _exit_code(begin), f"`skylite {words[0] if words else ''}`")
    except SkyliteError as error:
        show(f"skylite: {error}", to_stderr=True)
        code = error.exit_code
    raise SystemExit(code)


def _exit_code(begin: Callable[[], None]) -> int:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # closed, or replaced by a test
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # no print may fail
    try:
        begin()
        _check_arguments()
        app()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except SkyliteError as error:
        show(f"skylite: {error}", to_stderr=True)
        log_tail = getattr(error, "log_tail", "")
        if log_tail:
            show(f"\nThe last lines of its log:\n{log_tail}", to_stderr=True)
        return error.exit_code
    except OSError as error:
        # Nearly all writes raise WriteFailed; this handles the rest, such as creating a folder.
        show(f"skylite: {write_failed(error)}", to_stderr=True)
        return 1
    except Exception as error:  # noqa: BLE001 a sentence for every error; its traceback is saved
        show(f"skylite: {unforeseen_text(error)}", to_stderr=True)
        return 1
    return 0


def _check_arguments() -> None:
    """Raise ConfigError for a path or a text that no file of a run can record."""
    for argument in sys.argv[1:]:
        if encodable(argument) != argument:
            raise ConfigError(
                f"The argument {os.fsencode(argument)!r} is not valid UTF-8, so no run can record it.",
                "Rename that file or folder, or type the text in a terminal with UTF-8.",
            )
