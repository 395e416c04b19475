"""TensorBoard event files in RUN/loggers/tensorboard, written by the package tensorboard without torch."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import ClassVar

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

from skylite.loggers.interface import LoggedSample, LoggerRun, NewFolder


class Writer:
    """One event file for each start of the logger."""

    can_go_back: ClassVar[bool] = True

    @staticmethod
    def new_folder(offline: bool) -> NewFolder:
        return NewFolder.NEVER

    def __init__(self, run: LoggerRun) -> None:
        # Without the suffix somebody could foresee the name, and put a link there.
        self._file = EventFileWriter(str(run.folder), filename_suffix=f".{uuid.uuid4().hex}")
        # Readers discard what earlier files hold from this step on.
        self._add(Event(step=run.last_step + 1, session_log=SessionLog(status=SessionLog.START)))
        if not run.last_step:
            rows = [f"| {key} | {_escaped(str(value))} |" for key, value in run.config.items()]
            self._add_text("settings", "\n".join(["| setting | value |", "|---|---|", *rows]), 0)
        self._file.flush()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [Summary.Value(tag=key, simple_value=value) for key, value in values.items()]
        self._add(Event(step=step, summary=Summary(value=scalars)))
        self._file.flush()

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        for number, sample in enumerate(samples):
            text = f"{sample.question}\n\n{sample.completion}"
            head = f"reward {sample.reward:g}, answer {_escaped(sample.answer)}"
            self._add_text(f"samples/{number}", f"{head}\n\n{_as_code(text)}", step)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._file.add_event(event)

    def _add_text(self, tag: str, text: str, step: int) -> None:
        metadata = create_summary_metadata(display_name=tag, description="")
        tensor = make_tensor_proto([text.encode(errors="replace")], shape=(1,))
        value = Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
        self._add(Event(step=step, summary=Summary(value=[value])))


def _as_code(text: str) -> str:
    """As a code block: TensorBoard draws Markdown, and the text is the model's."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _escaped(text: str) -> str:
    return "".join(f"\\{c}" if c in "\\`*_{}[]()#+-.!|<>" else c for c in text).replace("\n", " ")
