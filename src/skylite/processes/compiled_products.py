"""How many compiled matrix products a process on a CPU keeps.

oneDNN compiles a bfloat16 product for each new shape, about 0.5 MB of code. It keeps 1,024 of them, and torch
keeps as many again. Each micro-batch of the trainer, and each size of an engine's batch, brings new shapes.
Without a bound a trainer took 2.2 GiB after 20 steps (with it 1.8), and the engine 2.7 (with it 2.25).
"""

from __future__ import annotations

FEW_PRODUCTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "1"}
"""Environment variables of oneDNN and torch. A micro-batch has about 85 shapes, so three fit."""
