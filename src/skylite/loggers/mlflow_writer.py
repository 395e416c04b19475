"""MLflow: the server of MLFLOW_TRACKING_URI, or else a SQLite file RUN/loggers/mlflow/mlflow.db.

The file says where artifacts are written, so each process makes its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from skylite.loggers.interface import LoggedSample, LoggerRun, NewFolder

PARAM_CHARACTERS = 6000
"""Longest parameter that MLflow stores."""
PARAMS_PER_CALL = 100
TAG = "skylite.run_id"


class Writer:
    """Finds its run by a tag, because MLflow chooses run ids itself."""

    can_go_back: ClassVar[bool] = False  # a logged metric stays

    @staticmethod
    def new_folder(offline: bool) -> NewFolder:
        return NewFolder.EACH_START if _server(offline) else NewFolder.EACH_START_WITH_ALL_STEPS

    def __init__(self, run: LoggerRun) -> None:
        server = _server(run.offline)
        self._client = MlflowClient(server or f"sqlite:///{run.folder / 'mlflow.db'}")
        experiment = self._client.get_experiment_by_name(run.project)
        if experiment is None:
            place = None if server else (run.folder / "artifacts").as_uri()
            self._experiment = self._client.create_experiment(run.project, artifact_location=place)
        else:
            self._experiment = experiment.experiment_id
        found = self._client.search_runs([self._experiment], f"tags.`{TAG}` = '{run.run_id}'")
        self._run = found[0].info.run_id if found else self._create(run)
        self._client.set_terminated(self._run, "RUNNING")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._run, [Metric(_key(k), v, now, step) for k, v in values.items()])

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        rows = [[s.question, s.completion, s.answer, s.reward] for s in samples]
        table = {"columns": ["question", "completion", "answer", "reward"], "data": rows}
        self._client.log_dict(self._run, table, f"samples/step-{step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self._run)

    def _create(self, run: LoggerRun) -> str:
        created = self._client.create_run(self._experiment, tags={TAG: run.run_id}, run_name=run.name)
        params = [Param(k, str(v)[:PARAM_CHARACTERS]) for k, v in run.config.items()]
        for start in range(0, len(params), PARAMS_PER_CALL):
            self._client.log_batch(created.info.run_id, params=params[start : start + PARAMS_PER_CALL])
        return str(created.info.run_id)


def _server(offline: bool) -> str:
    return "" if offline else os.environ.get("MLFLOW_TRACKING_URI", "")


def _key(name: str) -> str:
    """A metric's name in the characters that MLflow allows."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)
