"""vLLM gives freed memory back to the system when it takes a new adapter."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.vllm
FRAGMENTED = """
import ctypes
from pathlib import Path
from skylite.engine.vllm.plugin.released_memory import release_free_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

blocks = [ctypes.create_string_buffer(b"x" * 60_000) for _ in range(4_000)]
before = resident()
kept = blocks[::50]  # holes between them; the last is near the top of the heap
del blocks
held = before - resident()
release_free_memory()
print(held, before - resident())
"""


def test_a_heap_with_holes_is_released() -> None:
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        [sys.executable, "-c", FRAGMENTED], env=env, capture_output=True, text=True, check=True, timeout=120
    )
    freed, released = map(float, done.stdout.split()[-2:])
    assert freed < 20, "glibc keeps what is below the top"
    assert released > 150


def test_memory_is_released_after_each_new_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.lora.model_manager import LoRAModelManager

    from skylite.engine.vllm.plugin import released_memory

    events: list[Any] = []

    def activate(manager: Any, lora_id: int) -> bool:
        events.append(lora_id)
        return lora_id not in events[:-1]

    monkeypatch.setattr(LoRAModelManager, "activate_adapter", activate)
    monkeypatch.setattr(released_memory, "release_free_memory", lambda: events.append("released"))
    released_memory.install()
    released_memory.install()  # the second does nothing
    manager: Any = object()
    for lora_id in (1, 1, 2):
        LoRAModelManager.activate_adapter(manager, lora_id)
    assert events == [1, "released", 1, 2, "released"]
