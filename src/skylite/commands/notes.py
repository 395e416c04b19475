"""What a command says beside its result."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """A note to the user, before there is a screen."""
    print(f"skylite: {text}", file=sys.stderr, flush=True)
