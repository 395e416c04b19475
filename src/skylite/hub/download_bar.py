"""Hands the bytes that huggingface_hub downloads to our own progress, instead of its bars."""

from __future__ import annotations

from typing import Any

from skylite.long_work import LongWork

BYTES_BAR = "huggingface_hub.snapshot_download"
"""Name of the bar that counts the bytes of all files."""


def download_bar(work: LongWork) -> type[Any]:
    """A `tqdm_class` for snapshot_download that draws nothing and advances `work`."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):  # type: ignore[misc, unused-ignore]
        def __init__(self, *args: Any, **settings: Any) -> None:
            self._counts = settings.get("name") == BYTES_BAR
            super().__init__(*args, **{**settings, "disable": True})  # type: ignore[no-untyped-call]

        def refresh(self, *_: Any, **__: Any) -> None:
            """Called when another file adds its size to the total."""
            if self._counts:
                work.total = int(self.total)

        def update(self, n: float | None = 1) -> None:
            if self._counts:
                work.advance(int(n or 0))

    return Bar
