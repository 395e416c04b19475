"""Records what long work the code under test reports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from skylite.progress_reporting import LongWork, show_long_work


@contextmanager
def recorded_work() -> Iterator[list[LongWork]]:
    """Every long work of the block, in the order of its start."""
    found: list[LongWork] = []

    @contextmanager
    def record(work: LongWork) -> Iterator[None]:
        found.append(work)
        yield

    show_long_work(record)
    try:
        yield found
    finally:
        show_long_work(lambda _: nullcontext())


def parts(found: list[LongWork]) -> list[tuple[str, int, int | None]]:
    """(what, done, total) of each."""
    return [(work.what, work.done, work.total) for work in found]
