"""Trackio: a SQLite file in TRACKIO_DIR (by default in the Hugging Face cache), or a Space of the user."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import ClassVar

import pandas
import trackio

from skylite.loggers.interface import LoggedSample, LoggerRun, NewFolder

REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
"""Variables that send the run away from this machine."""


class Writer:
    """Trackio finds a run by its name, so the name ends with part of the id."""

    can_go_back: ClassVar[bool] = False

    @staticmethod
    def new_folder(offline: bool) -> NewFolder:
        return NewFolder.NEVER

    def __init__(self, run: LoggerRun) -> None:
        if run.offline:
            for name in REMOTE:
                os.environ.pop(name, None)
        self._run = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.run_id[:6]}",
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        rows = [[s.question, s.completion, s.answer, s.reward] for s in samples]
        frame = pandas.DataFrame(rows, columns=["question", "completion", "answer", "reward"])
        self._run.log({"samples": trackio.Table(dataframe=frame)}, step=step)

    def close(self) -> None:
        self._run.finish()
