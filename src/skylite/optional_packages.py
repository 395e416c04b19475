"""What an installed package requires, and how to install the packages of an extra."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

from skylite import DISTRIBUTION


def requirements(package: str, extra: str | None = "") -> Iterator[Requirement]:
    """Requirements of an installed package on this machine; `extra` None: with those of every extra."""
    for text in metadata.requires(package) or []:
        requirement = Requirement(text)
        if requirement.marker is None or extra is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def install_command(extra: str) -> str:
    """`pip install` of the extra's packages by their own names: that needs no skylite on PyPI."""
    needed = [r for r in requirements(DISTRIBUTION, extra) if "extra" in str(r.marker or "")]
    return shlex.join(["pip", "install", *(f"{r.name}{r.specifier}" for r in needed)])
