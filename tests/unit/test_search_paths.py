"""Empty and relative parts of search paths stand for the working folder: no process keeps them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skylite.processes.child import ProcessSpec, kill, poll, start
from skylite.processes.import_path import SEARCH_PATHS, protected_env

FIND = (
    "import subprocess, sys\n"
    "from skylite.processes.import_path import protect_imports\n"
    "protect_imports()\n"
    "subprocess.run(['planted'])\n"
)


@pytest.mark.parametrize("path", [":{0}", "{0}:", ".:{0}", "{0}::/bin", "bin:{0}", ""])
def test_a_program_in_the_working_folder_does_not_run(tmp_path: Path, path: str) -> None:
    for folder in (tmp_path, tmp_path / "bin"):
        folder.mkdir(exist_ok=True)
        (folder / "planted").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
        (folder / "planted").chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-P", "-c", FIND],
        env={**os.environ, "PATH": path.format("/usr/bin")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "No such file or directory: 'planted'" in done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", SEARCH_PATHS)
def test_only_absolute_parts_stay(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, kept in ((f":{os.defpath}::x:./y:", os.defpath), ("", None), (":", None), ("lib", None)):
        assert protected_env({name: value, "A": ":"}).get(name) == (kept.strip(":") if kept else None)
    monkeypatch.setenv(name, f":{os.environ.get(name) or '/nowhere'}:")
    code = f"import os; print(os.environ[{name!r}])"
    child = start(
        ProcessSpec(name="child", argv=[sys.executable, "-c", code], env={}, log_path=tmp_path / "log")
    )
    while poll(child) is None:
        pass
    kill(child)
    assert (tmp_path / "log").read_text().strip() == os.environ[name].strip(":")
