"""skylite: reinforcement learning of a LoRA adapter on one machine."""

# The `skylite` program imports this file before its import path is safe, so it imports nothing (start.py).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from skylite.api import Run
    from skylite.notebook import LocalTrainer

__version__ = "0.2.0"
DISTRIBUTION = "skylite-rl"
"""Name of the package that pip installs. `skylite` on PyPI is another project."""


def load_run(path: "str | Path") -> "Run":
    """Read a run folder; docs/reference/python-api.md shows what is in it. Raises ConfigError."""
    from skylite.api import load_run as load

    return load(path)


def connect(url: str, api_key: "str | None" = None) -> "Any":
    """Tinker's ServiceClient of a running `skylite service`; docs/how-to/from-tinker.md. Raises ConfigError.

    `api_key`: None: SKYLITE_API_KEY.
    """
    from skylite.tinker_client import connect as make

    return make(url, api_key)


def open_trainer(
    model: str,
    folder: "str | Path" = "notebook",
    *,
    rank: int = 16,
    seed: int = 0,
    settings: "dict[str, Any] | None" = None,
) -> "LocalTrainer":
    """A LoRA policy on a base in this process; docs/how-to/write-your-own-loop.md. Raises SkyliteError.

    `folder`: for its logs and adapters. `settings`: others, such as {"lora.alpha": 64}.
    """
    from skylite.notebook import open_trainer as make

    return make(model, folder, rank, seed, settings or {})
