"""Keep the working folder out of every search path: Python would run a torch.py there instead of the package.

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


SEARCH_PATHS = (
    "PYTHONPATH",
    "PATH",
    "LD_LIBRARY_PATH",
    "LIBRARY_PATH",
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
)
"""Where modules, programs, libraries and headers are looked for. In all of them an empty part, as in `/lib:`,
or a relative one stands for the working folder."""


def protected_env(env: "Mapping[str, str]") -> dict[str, str]:
    """`env` for a child that takes no module, program, library or header from the working folder."""
    kept = dict(env)
    for name in SEARCH_PATHS:
        if name in env:
            parts = [part for part in env[name].split(os.pathsep) if os.path.isabs(part)]
            kept[name] = os.pathsep.join(parts)
            if not parts:
                del kept[name]
    return {**kept, "PYTHONSAFEPATH": "1"}


def protect_imports() -> None:
    """Do the same for this process from here on, and for every process that it starts."""
    parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    # Python has made its relative parts absolute, so they are found by what they stand for.
    relative = {os.path.abspath(part) for part in parts if not os.path.isabs(part)} - set(parts)
    env = protected_env(os.environ)
    for name in SEARCH_PATHS:
        os.environ.pop(name, None)
    os.environ.update(env)
    sys.path[:] = [path for path in sys.path if os.path.isabs(path) and path not in relative]
