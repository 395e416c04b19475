"""What every section of settings shares: its base class, and the flags of its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

WHAT, LENGTH, UPDATE, RUN, SAFETY, MORE = (
    "Model, data and reward", "Length", "Update", "Run folder and resume", "Checks and limits",
    "More settings",
)  # fmt: skip
HEADINGS = (WHAT, LENGTH, UPDATE, RUN, SAFETY, MORE)
"""Headings of flags in `--help`, in this order."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A setting's flag. Its help is the first sentence of the setting's docstring."""

    name: str
    heading: str
    default: str = ""
    """The default in words, where its value would not say it."""
    is_path: bool = False
    metavar: str | None = None


class Section(BaseModel):
    """Immutable; an unknown key, NaN, infinity or a text with a NUL character is an error."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False, defer_build=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_nul(cls, value: Any) -> Any:
        """No path may hold one: the system would refuse it in the middle of a command."""
        texts = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(text, str) and "\0" in text for text in texts):
            raise ValueError("a text with a NUL character")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _accept_none_as_a_choice(cls, value: Any, info: ValidationInfo) -> Any:
        """`none` in `--set` and YAML is null, but some settings have a choice of that name."""
        if value is not None or info.field_name is None:
            return value
        field = cls.model_fields[info.field_name]
        return "none" if "none" in (field.default, *get_args(field.annotation)) else None
