"""Weights & Biases, online or offline (RUN/loggers/wandb/wandb; `wandb sync` uploads it later)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import wandb

from skylite.loggers.interface import LoggedSample, LoggerRun, NewFolder

COLUMNS = ["step", "question", "completion", "answer", "reward"]


class Writer:
    """The metric `step` is the axis of every curve, so a resumed run extends the same curves."""

    can_go_back: ClassVar[bool] = False  # wandb drops steps that come twice; its rewind is a closed preview

    @staticmethod
    def new_folder(offline: bool) -> NewFolder:
        return NewFolder.EACH_START

    def __init__(self, run: LoggerRun) -> None:
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            resume="allow",
            mode="offline" if run.offline else None,
            dir=str(run.folder),
            config=dict(run.config),
            settings=wandb.Settings(console="off", disable_git=True, save_code=False),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        rows = [[step, s.question, s.completion, s.answer, s.reward] for s in samples]
        self._run.log({"step": step, "samples": wandb.Table(columns=COLUMNS, data=rows)})

    def close(self) -> None:
        self._run.finish()
