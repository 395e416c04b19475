"""Runs whose processes are dead, and what dead processes left in memory and in /tmp."""

from __future__ import annotations

import glob
import os
import shlex
import tempfile
from pathlib import Path

from skylite.doctor.finding import Finding, note, ok
from skylite.errors import ConfigError
from skylite.hub.shared_memory_copy import SHARED_MEMORY, USERS_LOCK
from skylite.processes.file_tree import tree_bytes
from skylite.processes.private_folders import unused_folders
from skylite.processes.reaper import OPENMP_FILE
from skylite.run.lock import is_locked
from skylite.run.status import ENDED, is_alive, read_status


def check_runs(folder: Path) -> list[Finding]:
    """No run in the folder claims to be alive without a process."""
    findings = []
    for path in sorted(folder.glob("*/status.json")):
        try:
            status = read_status(path)
        except ConfigError as error:
            findings.append(note("runs", error.what, error.hint))
            continue
        if status.phase == "dead" or (status.phase not in ENDED and not is_alive(path.parent, status)):
            text = f"{path.parent} was killed at step {status.step} of {status.num_steps}"
            findings.append(note("runs", text, f"skylite train --resume {shlex.quote(str(path.parent))}"))
    return findings or [ok("runs", f"no dead run in {folder}")]


def check_leftovers(memory: Path = SHARED_MEMORY, temporary: Path | None = None) -> Finding:
    """Dead processes left nothing of ours behind."""
    folders = unused_folders(temporary or Path(tempfile.gettempdir()))
    found = [*_openmp_files(memory), *_model_copies(memory), *folders]
    if not found:
        return ok("leftovers", f"none in {memory} and {temporary or tempfile.gettempdir()}")
    size = sum(tree_bytes(path) for path in found)
    text = f"dead processes left {len(found)} file(s) or folder(s), {size / 1e6:.1f} MB"
    return note("leftovers", text, f"rm -r {shlex.join(map(str, found))}")


def _openmp_files(memory: Path) -> list[Path]:
    """Intel's OpenMP leaves a file with the process id in its name when it is killed."""
    paths = glob.glob(f"{memory}/{OPENMP_FILE}*_{os.getuid()}")
    pids = [path.rpartition("/")[2].removeprefix(OPENMP_FILE).partition("_")[0] for path in paths]
    return [Path(p) for p, pid in zip(paths, pids, strict=True) if not Path("/proc", pid).exists()]


def _model_copies(memory: Path) -> list[Path]:
    """Copies of models (model.use_shm) that no run uses."""
    copies = [p for p in (memory / f"skylite-{os.geteuid()}").glob("model-*") if p.is_dir()]
    return [p for p in copies if not is_locked(p.with_name(p.name + USERS_LOCK))]
