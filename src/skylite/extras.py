"""How to install the packages of an extra."""

from __future__ import annotations

import shlex
from importlib import metadata

from packaging.requirements import Requirement


def install_command(extra: str) -> str:
    """`pip install` of the extra's packages by their own names: `skylite` on PyPI is another project."""
    requirements = (Requirement(text) for text in metadata.requires("skylite") or [])
    needed = [
        f"{r.name}{r.specifier}"
        for r in requirements
        if r.marker is not None and "extra" in str(r.marker) and r.marker.evaluate({"extra": extra})
    ]
    return shlex.join(["pip", "install", *needed])
