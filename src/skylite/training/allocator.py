"""TBB's allocator, which trainers on a CPU preload where pip brought it (`launch/torchrun.py`)."""

from __future__ import annotations

import ctypes

CLEAN_ALL_BUFFERS = 0
"""Of <oneapi/tbb/scalable_allocator.h>."""


def release_cached_memory() -> bool:
    """Have TBB's allocator give its free blocks back; False where it is not there.

    It keeps them by their size, and every pass has sizes of its own: without this the blocks of one pass lie idle through the next.
    """
    clean = getattr(ctypes.CDLL(None), "scalable_allocation_command", None)
    if clean is None:
        return False
    clean(CLEAN_ALL_BUFFERS, None)
    return True
