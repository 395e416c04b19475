"""SwanLab, online or offline (RUN/loggers/swanlab; `swanlab sync` uploads it later)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import swanlab

from skylite.loggers.interface import LoggedSample, LoggerRun, NewFolder


class Writer:
    """SwanLab keeps the first value of a step that is logged twice."""

    can_go_back: ClassVar[bool] = False

    @staticmethod
    def new_folder(offline: bool) -> NewFolder:
        return NewFolder.EACH_START

    def __init__(self, run: LoggerRun) -> None:
        swanlab.init(
            project=run.project,
            experiment_name=run.name,
            id=run.run_id,
            resume="allow",
            mode="offline" if run.offline else None,
            logdir=str(run.folder),
            config=dict(run.config),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        swanlab.log(dict(values), step=step)

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        texts = [
            swanlab.Text(f"{s.question}\n\n{s.completion}", caption=f"reward {s.reward:g}, answer {s.answer}")
            for s in samples
        ]
        swanlab.log({"samples": texts}, step=step)

    def close(self) -> None:
        swanlab.finish()
