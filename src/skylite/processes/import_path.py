"""Keep the working folder out of the import path: Python would run a vllm.py there instead of the package.

`python -m` and `python -c` put the working folder first, and multiprocessing starts workers with `-c`. This
file imports only what Python has imported at its start.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


NEUTRAL_FOLDER = "/"
"""Working folder of a short-lived child. Libraries obey files of the user's, which may be a stranger's."""


def protected_env(env: "Mapping[str, str]") -> dict[str, str]:
    """`env` for a child whose imports do not see the working folder.

    An empty part of PYTHONPATH, as in `/lib:`, means the working folder too; only absolute parts stay.
    """
    parts = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(part)]
    others = {name: value for name, value in env.items() if name != "PYTHONPATH"}
    path = {"PYTHONPATH": os.pathsep.join(parts)} if parts else {}
    return {**others, **path, "PYTHONSAFEPATH": "1"}


def protect_imports() -> None:
    """Do the same for this process from here on, and for every process that it starts."""
    parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    # Python has made its relative parts absolute, so they are found by what they stand for.
    relative = {os.path.abspath(part) for part in parts if not os.path.isabs(part)} - set(parts)
    env = protected_env(os.environ)
    os.environ.pop("PYTHONPATH", None)
    os.environ.update(env)
    sys.path[:] = [path for path in sys.path if os.path.isabs(path) and path not in relative]
