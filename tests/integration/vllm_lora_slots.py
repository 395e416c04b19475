"""What vLLM allocates for LoRA slots: builds a model with vLLM's own LoRA manager, on the CPU, and prints bytes.

python -m tests.integration.vllm_lora_slots MODEL MAX_LORAS MAX_RANK MODULE...
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path


def slot_bytes(model_path: str, max_loras: int, max_rank: int, modules: list[str]) -> int:
    """No engine starts, and no weights are read: only the layers are made."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.model_manager import create_lora_manager
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = EngineArgs(
        model=model_path,
        dtype="bfloat16",
        max_model_len=64,
        enable_lora=True,
        max_loras=max_loras,
        max_cpu_loras=max_loras,
        max_lora_rank=max_rank,
        lora_target_modules=modules,
    ).create_engine_config()
    assert config.lora_config is not None
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{Path(folder, 'store')}", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        with set_default_torch_dtype(config.model_config.dtype):
            model = initialize_model(config)
        sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
        vocabulary = config.model_config.get_vocab_size()
        manager = create_lora_manager(
            model,
            **sizes,
            vocab_size=vocabulary,
            lora_config=config.lora_config,
            vllm_config=config,
            device=torch.device("cpu"),
        )
    layers = [m for m in manager.model.modules() if hasattr(m, "lora_a_stacked")]
    return sum(t.nbytes for layer in layers for t in (*layer.lora_a_stacked, *layer.lora_b_stacked))


if __name__ == "__main__":
    print(slot_bytes(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
