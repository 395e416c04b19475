"""RUN/loggers/NAME.jsonl: which steps a logger has, and under which id.

A line {"run_id", "name"} opens a run of the logger. The lines after it are its steps, {"step",
"fingerprint"}, and its held-out results, {"evaluated"}. A second such line starts over.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from skylite.errors import DataError
from skylite.run.files import append_line, convert_os_errors
from skylite.run.private_folder import open_lock
from skylite.untrusted_files import read_bytes
from skylite.untrusted_text import parse_json

FROM_ROLLOUTS = ("reward/", "completion/")
"""Metrics that are computed from a step's rollouts alone."""
RUN_ID = re.compile("[0-9a-f]{12}")


def fingerprint(metrics: Mapping[str, Any]) -> str:
    """Equal for two lines of metrics.jsonl that come from the same rollouts.

    A step that is trained again from its stored rollouts differs in its times and by rounding only.
    """
    same = {key: value for key, value in metrics.items() if key.startswith(FROM_ROLLOUTS)}
    return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:16]


def fingerprints(lines: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    """Step -> fingerprint."""
    return {metrics["step"]: fingerprint(metrics) for metrics in lines}


@dataclass(slots=True)
class Journal:
    """What a logger has logged. The holder of its lock is the only one who logs."""

    path: Path
    lock: FileIO | None = None
    """None: only read."""
    run_id: str = ""
    name: str = ""
    """The run's name in the logger."""
    runs: int = 0
    """Runs that this skylite run has in the logger; more than 1 after the curve went back."""
    steps: dict[int, str] = field(default_factory=dict)
    """Step -> fingerprint, in order."""
    evaluated: set[int] = field(default_factory=set)
    """Adapter versions whose held-out score is logged."""

    @property
    def last_step(self) -> int:
        return max(self.steps, default=0)

    def start_over(self, name: str) -> None:
        """Begin another run in the logger, under a new id."""
        self.runs += 1
        self.run_id = uuid.uuid4().hex[:12]
        self.name = name if self.runs == 1 else f"{name}-{self.runs}"
        self.steps, self.evaluated = {}, set()
        self._append({"run_id": self.run_id, "name": self.name})

    def forget(self) -> None:
        """Begin as if nothing was logged."""
        with convert_os_errors(self.path):
            self.path.unlink(missing_ok=True)
        self.run_id, self.name, self.runs, self.steps, self.evaluated = "", "", 0, {}, set()

    def go_back(self, step: int) -> None:
        """Forget the steps after `step`, in the same run of the logger."""
        self._append({"back_to": step})
        self._forget_after(step)

    def add_step(self, step: int, print_: str) -> None:
        """The logger has this step."""
        self._append({"step": step, "fingerprint": print_})
        self.steps[step] = print_

    def add_evaluation(self, version: int) -> None:
        """The logger has the held-out score of this version."""
        self._append({"evaluated": version})
        self.evaluated.add(version)

    def replay(self, line: Any) -> None:
        """Apply one line of the file. Raises KeyError, TypeError or ValueError for a line that is none."""
        if "run_id" in line:
            if not RUN_ID.fullmatch(line["run_id"]):  # libraries put it into paths
                raise ValueError("run_id is not one of skylite")
            self.runs += 1
            self.run_id, self.name = line["run_id"], str(line["name"])
            self.steps, self.evaluated = {}, set()
        elif "back_to" in line:
            self._forget_after(int(line["back_to"]))
        elif "evaluated" in line:
            self.evaluated.add(int(line["evaluated"]))
        else:
            self.steps[int(line["step"])] = str(line["fingerprint"])

    def _forget_after(self, step: int) -> None:
        self.steps = {k: v for k, v in self.steps.items() if k <= step}
        self.evaluated = {v for v in self.evaluated if v <= step}

    def _append(self, line: Mapping[str, Any]) -> None:
        append_line(self.path, json.dumps(line))


def open_journal(path: Path) -> Journal | None:
    """Lock and read the journal. None: another process logs this run to this logger.

    Raises DataError for a damaged file, WriteFailed.
    """
    with convert_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    lock = open_lock(path.with_suffix(".lock"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    journal = Journal(path, lock)
    _read(journal)
    return journal


def logged_steps(path: Path) -> dict[int, str]:
    """The steps that a logger has so far, while its process logs. Raises DataError for a damaged file."""
    journal = Journal(path)
    _read(journal)
    return journal.steps


def _read(journal: Journal) -> None:
    path = journal.path
    for number, text in enumerate(read_bytes(path).split(b"\n")[:-1] if path.exists() else [], 1):
        try:
            journal.replay(parse_json(text))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} line {number} is not a line of a logger's journal: {type(error).__name__} {error}.",
                "Delete the file; the run is then logged again from its start.",
            ) from None
