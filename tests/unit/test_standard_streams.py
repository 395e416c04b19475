"""Closed streams, a reader that goes away, an ASCII terminal: no traceback, and no file is printed into."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-c", "from skylite.entry_point import main; main()"]
PRINT = (
    "from skylite.processes.streams import protect_streams; protect_streams(); import os, sys\n"
    "file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)\n"
    "os.write(1, b'from C')\n"
    "print(chr(0xe9) * 100_000, flush=True)\n"
    "print(chr(0xd800) + chr(0xe9), file=sys.stderr, flush=True)\n"
    "print('more', flush=True)\n"
    "print('at the end')\n"
    "os.write(file, b'done')\n"
)


def shell(line: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which "$@" is the command."""
    return subprocess.run(
        ["bash", "-c", line, "bash", *words],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize(
    "line",
    [
        '"$@" >&-',
        '"$@" 2>&-',
        '"$@" <&- >&- 2>&-',
        '"$@" | head -c 5',
        '"$@" 2>&1 | head -c 5',
        '"$@" > /dev/null',
    ],
)
def test_prints_fail_on_no_stream(tmp_path: Path, line: str) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii:strict"}
    for env in ({}, ascii_only):
        reply = shell(f"set -o pipefail; {line}", sys.executable, "-c", PRINT, str(tmp_path / "f"), **env)
        assert reply.returncode == 0, reply.stderr
        assert "Traceback" not in reply.stderr
        assert "Exception ignored" not in reply.stderr
        assert (tmp_path / "f").read_bytes() == b"done", "what is printed comes into no other file"
        (tmp_path / "f").unlink()


@pytest.mark.parametrize("line", ['"$@" >&- 2>&-', '"$@" | head -1', '"$@" 2>&1 >&-'])
def test_a_command_ends_well(line: str) -> None:
    reply = shell(f"set -o pipefail; {line}", *COMMAND, "train", "--help")
    assert reply.returncode == 0, reply.stderr
    assert "Traceback" not in reply.stdout + reply.stderr


def test_a_full_disk_is_still_an_error() -> None:
    """Only a reader that goes away is no error: what a file lost must show."""
    reply = shell('"$@" > /dev/full', *COMMAND, "--version")
    assert reply.returncode != 0
    assert "Traceback" not in reply.stderr


def test_a_program_that_replaces_the_command_has_the_streams_too() -> None:
    code = (
        "from skylite.processes.streams import protect_streams; protect_streams(); import os, sys\n"
        "os.execv(sys.executable, [sys.executable, '-c', 'import os; [os.fstat(n) for n in (0, 1, 2)]'])\n"
    )
    assert shell('"$@" <&- >&- 2>&-', sys.executable, "-c", code).returncode == 0
