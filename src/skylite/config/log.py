"""Settings of the experiment loggers."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator

from skylite.config.base_section import MORE, Flag, Section

LoggerName = Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab"]
LOGGER_NAMES: tuple[LoggerName, ...] = get_args(LoggerName)


class LogConfig(Section):
    """Experiment loggers. Each follows metrics.jsonl in a process of its own; none can stop a run."""

    to: Annotated[list[LoggerName], Flag("--log", MORE, default="no loggers")] = []
    """Experiment loggers, any of tensorboard, wandb, trackio, mlflow, swanlab. Each needs its library."""
    project: str = Field("skylite", min_length=1)
    """Project (mlflow: experiment) that the run appears in."""
    name: str | None = Field(None, min_length=1)
    """Name of the run in the loggers. none: the name of the run folder."""
    samples: int = Field(2, ge=0)
    """Completions to log per step, each of another prompt. 0: none leave this machine."""
    offline: bool = False
    """Only write files on this machine; wandb and swanlab upload them later with their own `sync` command."""

    @field_validator("to")
    @classmethod
    def check_once(cls, value: list[LoggerName]) -> list[LoggerName]:
        if len(set(value)) < len(value):
            raise ValueError(f"{', '.join(value)} names a logger twice")
        return value
