"""Keep the working folder out of the import path: Python would run a vllm.py there instead of the package.

`python -m` and `python -c` put the working folder first, and multiprocessing starts workers with `-c`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping


def protected_env(env: Mapping[str, str]) -> dict[str, str]:
    """`env` for a child whose imports do not see the working folder.

    An empty part of PYTHONPATH, as in `/lib:`, means the working folder too; only absolute parts stay.
    """
    parts = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(part)]
    others = {name: value for name, value in env.items() if name != "PYTHONPATH"}
    path = {"PYTHONPATH": os.pathsep.join(parts)} if parts else {}
    return {**others, **path, "PYTHONSAFEPATH": "1"}


def protect_imports() -> None:
    """Do the same for this process from here on, and for every process that it starts."""
    env = protected_env(os.environ)
    os.environ.pop("PYTHONPATH", None)
    os.environ.update(env)
    sys.path[:] = [path for path in sys.path if os.path.isabs(path)]
