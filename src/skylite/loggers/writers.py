"""What a logger must do, and the loggers. Each imports its library when its process opens it.

CONTRIBUTING.md says how to add one.
"""

from __future__ import annotations

import importlib.util
import os
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from skylite.config.train import LoggerName
from skylite.errors import ConfigError
from skylite.optional_packages import install_command

COLUMNS = ("question", "completion", "answer", "reward")
MLFLOW_PARAM_CHARACTERS, MLFLOW_PARAMS_PER_CALL = 6000, 100
"""Longest parameter that MLflow stores, and most in one call."""
MLFLOW_TAG = "skylite.run_id"
TRACKIO_REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
"""Variables that send the run away from this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerRun:
    """The run as a logger sees it."""

    folder: Path
    """RUN/loggers/NAME: where a logger keeps files on this machine."""
    run_id: str
    """The logger's id of this run; the same after a resume."""
    project: str
    name: str
    config: Mapping[str, Any]
    """The run's settings by dotted name."""
    last_step: int
    """The last step that the logger has; 0 for a new run. Later steps that it holds are discarded."""
    offline: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedSample:
    """A completion of a step."""

    question: str
    completion: str
    answer: str
    reward: float

    @property
    def row(self) -> list[Any]:
        """Values of COLUMNS."""
        return [self.question, self.completion, self.answer, self.reward]


class Writer(ABC):
    """One run in one logger. Any exception ends the logger, never the run."""

    keeps_folder: ClassVar[bool] = False
    """It adds files under names that nobody can foresee, and reads none. The others get an empty folder."""

    @staticmethod
    def starts_over(offline: bool) -> bool:
        """Whether each start logs the whole run again: the files it would continue may be a stranger's."""
        return False

    @abstractmethod
    def __init__(self, run: LoggerRun) -> None: ...

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step, on disk or on their way when it returns."""

    @abstractmethod
    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        """Log some completions of a step."""

    @abstractmethod
    def close(self) -> None:
        """Finish the run; return when everything is written or sent."""


class TensorboardWriter(Writer):
    """Event files in RUN/loggers/tensorboard, one for each start, written without torch."""

    keeps_folder = True

    def __init__(self, run: LoggerRun) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        # Without the suffix somebody could foresee the name, and put a link there.
        self._file = EventFileWriter(str(run.folder), filename_suffix=f".{uuid.uuid4().hex}")
        # Readers discard what earlier files hold from this step on.
        self._add(run.last_step and run.last_step + 1, session_log=SessionLog(status=SessionLog.START))
        if not run.last_step:
            rows = [f"| {key} | {_escaped(str(value))} |" for key, value in run.config.items()]
            self._add_text("settings", "\n".join(["| setting | value |", "|---|---|", *rows]), 0)
        self._file.flush()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=key, simple_value=value) for key, value in values.items()]
        self._add(step, summary=Summary(value=scalars))
        self._file.flush()

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        for number, sample in enumerate(samples):
            # As a code block: TensorBoard draws Markdown, and the text is the model's.
            text = "\n".join(f"    {x}" for x in f"{sample.question}\n\n{sample.completion}".splitlines())
            head = f"reward {sample.reward:g}, answer {_escaped(sample.answer)}"
            self._add_text(f"samples/{number}", f"{head}\n\n{text}", step)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _add(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._file.add_event(Event(step=step, wall_time=time.time(), **content))

    def _add_text(self, tag: str, text: str, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        metadata = create_summary_metadata(display_name=tag, description="")
        tensor = make_tensor_proto([text.encode(errors="replace")], shape=(1,))
        self._add(step, summary=Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)]))


class WandbWriter(Writer):
    """Online, or offline in RUN/loggers/wandb/wandb, which `wandb sync` uploads later.

    The metric `step` is the axis of every curve, so a resumed run extends the same curves. wandb drops steps
    that come twice, and its rewind is a closed preview.
    """

    def __init__(self, run: LoggerRun) -> None:
        import wandb

        self._table = wandb.Table
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
        rows = [[step, *sample.row] for sample in samples]
        self._run.log({"step": step, "samples": self._table(columns=["step", *COLUMNS], data=rows)})

    def close(self) -> None:
        self._run.finish()


class TrackioWriter(Writer):
    """A SQLite file in TRACKIO_DIR (by default in the Hugging Face cache), or a Space of the user.

    Trackio finds a run by its name, so the name ends with part of the id.
    """

    keeps_folder = True

    def __init__(self, run: LoggerRun) -> None:
        if run.offline:
            for name in TRACKIO_REMOTE:
                os.environ.pop(name, None)
        import trackio

        self._table = trackio.Table
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
        import pandas

        frame = pandas.DataFrame([sample.row for sample in samples], columns=list(COLUMNS))
        self._run.log({"samples": self._table(dataframe=frame)}, step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowWriter(Writer):
    """The server of MLFLOW_TRACKING_URI, or else a SQLite file RUN/loggers/mlflow/mlflow.db.

    The file says where artifacts are written, so each process makes its own. A logged metric stays. The run
    is found by a tag, because MLflow chooses run ids itself.
    """

    @staticmethod
    def starts_over(offline: bool) -> bool:
        return not _mlflow_server(offline)

    def __init__(self, run: LoggerRun) -> None:
        from mlflow.tracking import MlflowClient

        server = _mlflow_server(run.offline)
        self._client = MlflowClient(server or f"sqlite:///{run.folder / 'mlflow.db'}")
        experiment = self._client.get_experiment_by_name(run.project)
        if experiment is None:
            place = None if server else (run.folder / "artifacts").as_uri()
            self._experiment = self._client.create_experiment(run.project, artifact_location=place)
        else:
            self._experiment = experiment.experiment_id
        runs = self._client.search_runs([self._experiment], f"tags.`{MLFLOW_TAG}` = '{run.run_id}'")
        self._run = runs[0].info.run_id if runs else self._create(run)
        self._client.set_terminated(self._run, "RUNNING")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        names = {key: "".join(c if c.isalnum() or c in "_-. /" else "_" for c in key) for key in values}
        self._client.log_batch(self._run, [Metric(names[k], v, now, step) for k, v in values.items()])

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        table = {"columns": list(COLUMNS), "data": [sample.row for sample in samples]}
        self._client.log_dict(self._run, table, f"samples/step-{step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self._run)

    def _create(self, run: LoggerRun) -> str:
        from mlflow.entities import Param

        created = self._client.create_run(self._experiment, tags={MLFLOW_TAG: run.run_id}, run_name=run.name)
        params = [Param(k, str(v)[:MLFLOW_PARAM_CHARACTERS]) for k, v in run.config.items()]
        for start in range(0, len(params), MLFLOW_PARAMS_PER_CALL):
            part = params[start : start + MLFLOW_PARAMS_PER_CALL]
            self._client.log_batch(created.info.run_id, params=part)
        return str(created.info.run_id)


class SwanlabWriter(Writer):
    """Online, or offline in RUN/loggers/swanlab, which `swanlab sync` uploads later.

    SwanLab keeps the first value of a step that is logged twice.
    """

    def __init__(self, run: LoggerRun) -> None:
        import swanlab

        self._swanlab = swanlab
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
        self._swanlab.log(dict(values), step=step)

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        texts = [
            self._swanlab.Text(
                f"{s.question}\n\n{s.completion}", caption=f"reward {s.reward:g}, answer {s.answer}"
            )
            for s in samples
        ]
        self._swanlab.log({"samples": texts}, step=step)

    def close(self) -> None:
        self._swanlab.finish()


WRITERS: dict[LoggerName, type[Writer]] = {
    "tensorboard": TensorboardWriter,
    "wandb": WandbWriter,
    "trackio": TrackioWriter,
    "mlflow": MlflowWriter,
    "swanlab": SwanlabWriter,
}
LIBRARIES: dict[LoggerName, tuple[str, ...]] = {name: (name,) for name in WRITERS} | {
    "mlflow": ("mlflow", "sqlalchemy", "alembic")
}
"""Logger -> the packages that its extra installs."""


def require_libraries(names: Iterable[LoggerName]) -> None:
    """Raise ConfigError for a logger whose library is not installed."""
    for name in names:
        missing = [package for package in LIBRARIES[name] if importlib.util.find_spec(package) is None]
        if missing:
            raise ConfigError(
                f"The logger {name} needs the package {missing[0]}, which is not installed.",
                f"Run `{install_command(name)}`, or remove {name} from --log (log.to).",
            )


def _mlflow_server(offline: bool) -> str:
    return "" if offline else os.environ.get("MLFLOW_TRACKING_URI", "")


def _escaped(text: str) -> str:
    return "".join(f"\\{c}" if c in "\\`*_{}[]()#+-.!|<>" else c for c in text).replace("\n", " ")
