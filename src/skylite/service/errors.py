"""A request that the service does not answer as it was asked."""

from __future__ import annotations


class Rejected(Exception):
    """The reason, for the client, and the HTTP status where no future holds it."""

    def __init__(self, reason: str, status: int = 400) -> None:
        self.reason = reason
        self.status = status
        super().__init__(reason)
