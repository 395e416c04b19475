"""Import this before torch: it gives a CPU build of torch a fake CUDA device (compiler.py)."""

from __future__ import annotations

from tests.fake_gpu.compiler import preload

preload()
