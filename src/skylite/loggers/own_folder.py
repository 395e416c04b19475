"""The folder of a logger in a run: RUN/loggers/NAME.

A run may come from another person, and the libraries obey files that they find in their folder: wandb's
`settings` names the server that gets the API key, MLflow's database says where files are written. So each
process of a logger makes a new folder, and reads nothing that it did not write itself.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from skylite.run.files import convert_os_errors


def new_folder(path: Path) -> Path:
    """Make the folder `path`. What has this name becomes `NAME.1`, `NAME.2` and so on. Raises WriteFailed."""
    with convert_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path):
            names = (path.with_name(f"{path.name}.{k}") for k in itertools.count(1))
            path.rename(next(name for name in names if not os.path.lexists(name)))
        path.mkdir(mode=0o700)
    return path
