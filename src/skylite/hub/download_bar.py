"""Hands the bytes that huggingface_hub downloads to our own progress, instead of its bars."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from skylite.progress_reporting import LongWork

BYTES_BARS = (
    "huggingface_hub.snapshot_download",
    "huggingface_hub.http_get",
    "huggingface_hub.xet_get",
)
"""Names of the bars that count bytes: of all files of a snapshot, or of one file."""


def download_bar(work: LongWork) -> type[Any]:
    """A `tqdm_class` for snapshot_download and hf_hub_download that draws nothing and advances `work`."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):  # type: ignore[misc, unused-ignore]
        def __init__(self, *args: Any, **settings: Any) -> None:
            self._counts = settings.get("name") in BYTES_BARS
            super().__init__(*args, **{**settings, "disable": True})  # type: ignore[no-untyped-call]
            if self._counts:
                work.total = int(self.total or 0)
                work.advance(int(settings.get("initial") or 0))  # an earlier download left these bytes

        def refresh(self, *_: Any, **__: Any) -> None:
            """Called when another file adds its size to the total."""
            if self._counts:
                work.total = int(self.total)

        def update(self, n: float | None = 1) -> None:
            if self._counts:
                work.advance(int(n or 0))

    return Bar


@contextmanager
def without_hub_bars() -> Iterator[None]:
    """Hide the bars of calls that take no `tqdm_class`: they know nothing of --quiet."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    were_shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if were_shown:
            enable_progress_bars()
