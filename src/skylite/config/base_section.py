"""Base class of every settings section."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator


class Section(BaseModel):
    """Immutable; an unknown key, NaN, infinity or a text with a NUL character is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_nul(cls, value: Any) -> Any:
        """No path may hold one: the system would refuse it in the middle of a command."""
        texts = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(text, str) and "\0" in text for text in texts):
            raise ValueError("a text with a NUL character")
        return value
