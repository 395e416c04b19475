"""How many compiled matrix products a process on a CPU keeps.

oneDNN compiles a bfloat16 product for each new shape, about 0.5 MB of code. It keeps 1,024 of them, and torch
keeps as many again. A micro-batch of the trainer brings about 85 new shapes, and each size of a batch in vLLM
some more. Without a bound a trainer took 2.2 GiB after 20 steps (with it 1.8), and vLLM 2.7.
"""

from __future__ import annotations

FEW_PRODUCTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "1"}
"""Environment variables of oneDNN and torch. The shapes of three micro-batches, kept once."""
