"""The process of one logger: hands it every step of a run once, in order, over kills, resumes and `--at`.

`python -m skylite.loggers.follow RUN NAME` logs what the run has and ends. With --follow it follows the run
until the file END appears in its temporary folder, then logs the rest and ends. Its output goes to
RUN/logs/logger-NAME.log, and the last line says why it failed.

RUN/loggers/NAME.jsonl, the journal, tells which steps a logger has, and under which id. A line {"run_id",
"name"} opens a run of the logger. The lines after it are its steps, {"step", "fingerprint"}, and its held-out
results, {"evaluated"}. A second such line starts over.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import logging
import os
import re
import resource
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn, get_args

from skylite.config.loading import read_run_config
from skylite.config.train import LoggerName, RunConfig
from skylite.errors import ConfigError, DataError, SkyliteError, convert_os_errors, error_line
from skylite.loggers.writers import WRITERS, LoggedSample, LoggerRun, Writer
from skylite.processes.private_folders import open_lock
from skylite.run.files import append_line, require_space
from skylite.run.metrics_file import EVAL_METRIC, held_out_scores, read_metrics
from skylite.run.rollout_file import read_rollouts
from skylite.run.run_dir import RunDir
from skylite.types import is_number
from skylite.untrusted_files import read_bytes
from skylite.untrusted_text import parse_json

logger = logging.getLogger(__name__)
SPARE_BYTES = 256 << 20
"""A logger stops before its disk has less than this free: the run needs it."""
FROM_ROLLOUTS = ("reward/", "completion/")
"""Metrics that are computed from a step's rollouts alone."""
RUN_ID = re.compile("[0-9a-f]{12}")
POLL_S = 0.5
LOW_PRIORITY = 10
LARGEST_FILE = 4 << 30
"""Bytes of one file that a logger may write, its log included."""
END = "end"
"""File in a logger's TMPDIR that asks it to end. A signal would kill it while it imports its library."""


@dataclass(slots=True)
class Follower:
    """One logger of one run. Call `catch_up` again and again."""

    run: RunDir
    recorded: RunConfig
    journal: Journal
    writer_class: type[Writer]
    writer: Writer | None = None
    _folder: Path | None = None
    """The logger's folder, once this process has made it."""
    _seen: tuple[int, int, int] | None = field(default=None)
    """Identity of metrics.jsonl when it was last read."""

    def catch_up(self) -> None:
        """Log what is new in metrics.jsonl and the held-out results. Raises whatever the library raises."""
        if (seen := _identity(self.run.metrics_path)) != self._seen or self.writer is None:
            self._seen = seen
            self._log_steps(read_metrics(self.run.metrics_path))
        self._log_evaluations()

    def close(self) -> None:
        """Finish the run in the logger."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None

    def _log_steps(self, lines: Sequence[Mapping[str, Any]]) -> None:
        if self._folder is None:
            self._folder = self._make_folder()
        logged = self.journal.steps
        if any(m["step"] in logged and logged[m["step"]] != fingerprint(m) for m in lines):
            self._start_over()
        writer = self.writer or self._open()
        for metrics in lines:
            if (step := metrics["step"]) > self.journal.last_step:
                require_space(self.run.root, SPARE_BYTES)
                writer.log(step, numbers(metrics))
                if samples := self._samples(step):
                    writer.log_samples(step, samples)
                self.journal.add_step(step, fingerprint(metrics))

    def _start_over(self) -> None:
        """Steps were sampled again, and a logger cannot forget: another run gets the whole history."""
        old = self.journal.name
        self.close()
        self.journal.start_over(self._name())
        logger.info(f"steps were sampled again: the run continues as {self.journal.name}, after {old}")

    def _make_folder(self) -> Path:
        folder = self.run.loggers / self.journal.path.stem
        if self.writer_class.starts_over(self.recorded.config.log.offline):
            self.journal.forget()
        return folder if self.writer_class.keeps_folder else new_folder(folder)

    def _open(self) -> Writer:
        journal, config = self.journal, self.recorded.config
        assert self._folder is not None
        if not journal.run_id:
            journal.start_over(self._name())
        self.writer = self.writer_class(
            LoggerRun(
                folder=self._folder,
                run_id=journal.run_id,
                project=config.log.project,
                name=journal.name,
                config=flat_settings(config.model_dump(mode="json")),
                last_step=journal.last_step,
                offline=config.log.offline,
            )
        )
        return self.writer

    def _name(self) -> str:
        return self.recorded.config.log.name or self.run.root.name

    def _log_evaluations(self) -> None:
        if self.writer is None or not self.recorded.config.eval.limit:
            return
        for version, mean in sorted(held_out_scores(self.run, self.recorded.config.eval).items()):
            if version <= self.journal.last_step and version not in self.journal.evaluated:
                self.writer.log(version, {EVAL_METRIC: mean})
                self.journal.add_evaluation(version)

    def _samples(self, step: int) -> list[LoggedSample]:
        count, path = self.recorded.config.log.samples, self.run.rollout_path(step)
        if not count or not path.exists():
            return []
        try:
            groups = read_rollouts(path)
        except DataError as error:
            logger.warning(f"{error.what} Its completions are not logged.")
            return []
        chosen = [g.trajectories[i % len(g.trajectories)] for i, g in enumerate(groups[:count])]
        return [
            LoggedSample(
                question=group.prompt.messages[-1]["content"],
                completion=trajectory.text,
                answer=group.prompt.answer,
                reward=trajectory.reward,
            )
            for group, trajectory in zip(groups[:count], chosen, strict=True)
        ]


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The values that make a curve: no texts, no null, which stands for NaN, and no held-out score."""
    return {key: float(value) for key, value in metrics.items() if _is_curve(key, value)}


def _is_curve(key: str, value: Any) -> bool:
    return key not in ("step", EVAL_METRIC) and isinstance(value, int | float) and is_number(value)


def flat_settings(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= (
            flat_settings(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
        )
    return found


def _identity(path: Path) -> tuple[int, int, int] | None:
    if not path.exists():
        return None
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def fingerprint(metrics: Mapping[str, Any]) -> str:
    """Equal for two lines of metrics.jsonl that come from the same rollouts.

    A step that is trained again from its stored rollouts differs in its times and by rounding only.
    """
    same = {key: value for key, value in metrics.items() if key.startswith(FROM_ROLLOUTS)}
    return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(slots=True)
class Journal:
    """What a logger has logged. The holder of its lock is the only one who logs."""

    path: Path
    lock: FileIO
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
        elif "evaluated" in line:
            self.evaluated.add(int(line["evaluated"]))
        else:
            self.steps[int(line["step"])] = str(line["fingerprint"])

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


def new_folder(path: Path) -> Path:
    """Make the folder `path`. What has this name becomes `NAME.1`, `NAME.2` and so on. Raises WriteFailed.

    A run may come from another person, and the libraries obey files that they find in their folder: wandb's
    `settings` names the server that gets the API key, MLflow's database says where files are written. So each
    process of a logger makes a new folder, and reads nothing that it did not write itself.
    """
    with convert_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path):
            names = (path.with_name(f"{path.name}.{k}") for k in itertools.count(1))
            path.rename(next(name for name in names if not os.path.lexists(name)))
        path.mkdir(mode=0o700)
    return path


def main() -> NoReturn:
    """Exit 0 when everything is logged, else 1."""
    os.nice(LOW_PRIORITY)
    limit_file_size(LARGEST_FILE)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    names = [name for name in get_args(LoggerName) if name == sys.argv[2]]
    try:
        log_run(RunDir(Path(sys.argv[1])), names[0], keep_following="--follow" in sys.argv[3:])
    except SkyliteError as error:
        _fail(str(error))
    except BaseException as error:  # a library may raise anything
        logging.exception("the logger failed")
        _fail(error_line(error))
    _exit(0)


def log_run(run: RunDir, name: LoggerName, *, keep_following: bool) -> None:
    """Log what the run has; with `keep_following`, also what it gets until it is asked to end."""
    journal = open_journal(run.loggers / f"{name}.jsonl")
    if journal is None:
        raise ConfigError(f"Another process logs {run.root} to {name}.", "Wait until it ends.")
    follower = Follower(run, read_run_config(run.config_path), journal, WRITERS[name])
    end = Path(tempfile.gettempdir()) / END
    while keep_following and not end.exists():
        if run.metrics_path.exists():
            follower.catch_up()
        time.sleep(POLL_S)
    follower.catch_up()
    follower.close()


def limit_file_size(num_bytes: int) -> None:
    """Let every write beyond this size of a file fail with EFBIG."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    smaller = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_FSIZE, (smaller, hard))


def _fail(reason: str) -> NoReturn:
    print(reason, file=sys.stderr, flush=True)
    _exit(1)


def _exit(code: int) -> NoReturn:
    """End without the exit hooks of the libraries: they may wait for a network."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
