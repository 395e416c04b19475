"""Tinker's client with the address of a running `skylite service`."""

from __future__ import annotations

import os
from typing import Any

from skylite.errors import ConfigError

TESTED = "tinker==0.38.0"
"""What the service's tests run with."""
KEY_VARIABLE = "SKYLITE_API_KEY"


def connect(url: str, api_key: str | None = None) -> Any:
    """See `skylite.connect`."""
    if url.startswith("unix:"):
        raise ConfigError(
            f"Tinker's client does not speak to the Unix socket {url}.",
            "Forward a port to it, such as `ssh -L 8000:PATH HOST`, and give http://127.0.0.1:8000.",
        )
    key = api_key or os.environ.get(KEY_VARIABLE, "").split(",")[0].strip()
    if not key:
        raise ConfigError(
            "skylite.connect needs the API key of the service.",
            f"Give it as api_key, or set {KEY_VARIABLE}; the service keeps its key in FOLDER/api-key.",
        )
    try:
        import tinker
    except ImportError:
        raise ConfigError(
            "skylite.connect makes a client of Tinker's package, and tinker is not installed.",
            f"Install it: pip install {TESTED}.",
        ) from None
    return tinker.ServiceClient(base_url=url, api_key=key)
