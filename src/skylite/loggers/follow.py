"""Hand every step of a run to one logger: once each, in order, also over kills, resumes and `--at`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skylite.config.train import RunConfig
from skylite.errors import DataError
from skylite.loggers.interface import LoggedSample, LoggerRun, NewFolder, Writer
from skylite.loggers.journal import Journal, fingerprint
from skylite.loggers.own_folder import new_folder
from skylite.run.files import require_space
from skylite.run.held_out_scores import held_out_scores
from skylite.run.metrics_file import EVAL_METRIC, read_metrics
from skylite.run.rollout_file import read_rollouts
from skylite.run.run_dir import RunDir
from skylite.types import is_number

logger = logging.getLogger(__name__)
SPARE_BYTES = 256 << 20
"""A logger stops before its disk has less than this free: the run needs it."""


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
        if (back_to := common_steps(self.journal.steps, lines)) < self.journal.last_step:
            self._go_back(back_to)
        writer = self.writer or self._open()
        for metrics in lines:
            if (step := metrics["step"]) > self.journal.last_step:
                require_space(self.run.root, SPARE_BYTES)
                writer.log(step, numbers(metrics))
                if samples := self._samples(step):
                    writer.log_samples(step, samples)
                self.journal.add_step(step, fingerprint(metrics))

    def _go_back(self, step: int) -> None:
        """The steps after `step` were sampled again."""
        last, old = self.journal.last_step, self.journal.name
        self.close()
        if self.writer_class.can_go_back:
            self.journal.go_back(step)
            logger.info(f"steps {step + 1} to {last} were sampled again: the curves go back to step {step}")
        else:
            self.journal.start_over(self._name())
            logger.info(
                f"steps {step + 1} to {last} were sampled again, and this logger cannot go back: the run "
                f"continues as {self.journal.name}, with its history; {old} stays as it is"
            )

    def _make_folder(self) -> Path:
        folder = self.run.loggers / self.journal.path.stem
        kind = self.writer_class.new_folder(self.recorded.config.log.offline)
        if kind is NewFolder.EACH_START_WITH_ALL_STEPS:
            self.journal.forget()
        return folder if kind is NewFolder.NEVER else new_folder(folder)

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


def common_steps(logged: Mapping[int, str], lines: Sequence[Mapping[str, Any]]) -> int:
    """The last logged step that is still the run's.

    A step that is missing in metrics.jsonl may be trained again from its rollouts, so it still counts.
    """
    for metrics in lines:
        step = metrics["step"]
        if step in logged and logged[step] != fingerprint(metrics):
            return max((k for k in logged if k < step), default=0)
    return max(logged, default=0)


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
