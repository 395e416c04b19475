"""The scripts that write pages of docs/, as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[2] / "docs"


def script(name: str) -> ModuleType:
    """A script of docs/, as a module. They import each other from their own folder."""
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(DOCS))
