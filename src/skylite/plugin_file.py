"""Import Python files that the user names: data_prep files and rewards."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from skylite.errors import DataError


def import_file(path: Path, what: str) -> ModuleType:
    """Import a Python file as a separate module. Raises DataError with the exception that the file raised."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise DataError(f"The {what} {path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise DataError(
            f"The {what} {path} cannot be imported: {type(error).__name__}: {error}.", "Fix that file."
        ) from error
    return module
