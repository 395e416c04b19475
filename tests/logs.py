"""What skylite logs, as a list."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _ListHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def logged_messages() -> Iterator[list[str]]:
    """The messages, from info up, that skylite logs in this block."""
    handler = _ListHandler()
    logging.getLogger("skylite").addHandler(handler)
    try:
        yield handler.messages
    finally:
        logging.getLogger("skylite").removeHandler(handler)
