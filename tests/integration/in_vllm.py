"""Ask the installed vLLM about itself: one import, and a fork for each question.

    python -m tests.integration.in_vllm < QUESTIONS.json     (lists of a function's name and its arguments)

Prints the answers as one line of JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from tests.forks import in_a_fork

HIDDEN, HEADS, KEY_VALUE_HEADS, HEAD_SIZE, INNER, VOCABULARY = 64, 8, 4, 8, 192, 500
LORA_RANK, SLOTS = 8, 2


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


def divided(modules: list[ModuleType], gpus: int) -> ExitStack:
    """Let vLLM's layers believe that they are on the first of `gpus` GPUs."""
    stack = ExitStack()
    for module in modules:
        for name, value in (("world_size", gpus), ("rank", 0)):
            function = f"get_tensor_model_parallel_{name}"
            stack.enter_context(mock.patch.object(module, function, lambda value=value: value))
    return stack


def divided_layers(gpus: int) -> dict[str, int]:
    """Elements of vLLM's weights on rank 0 of several GPUs, and of LoRA slots at rank 1."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.config.lora import LoRAConfig
    from vllm.lora import layers as lora
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    config = LoRAConfig(max_lora_rank=LORA_RANK, max_loras=SLOTS, lora_dtype=torch.bfloat16)
    with (
        set_current_vllm_config(VllmConfig()),
        divided([linear, parameter, vocab_parallel_embedding], gpus),
    ):
        queries = HEADS * HEAD_SIZE
        layers: list[tuple[Any, Any]] = [
            (
                linear.QKVParallelLinear(HIDDEN, HEAD_SIZE, HEADS, KEY_VALUE_HEADS, bias=False),
                lora.MergedQKVParallelLinearWithLoRA,
            ),
            (linear.RowParallelLinear(queries, HIDDEN, bias=False), lora.RowParallelLinearWithLoRA),
            (
                linear.MergedColumnParallelLinear(HIDDEN, [INNER, INNER], bias=False),
                lora.MergedColumnParallelLinearWithLoRA,
            ),
            (linear.RowParallelLinear(INNER, HIDDEN, bias=False), lora.RowParallelLinearWithLoRA),
        ]
        slots = 0
        for layer, wrapper in layers:
            wrapped = wrapper(layer)
            wrapped.create_lora_weights(SLOTS, config)
            slots += sum(t.numel() for t in (*wrapped.lora_a_stacked, *wrapped.lora_b_stacked))
        embedding = vocab_parallel_embedding.VocabParallelEmbedding(VOCABULARY, HIDDEN)
    return {
        "layer": sum(layer.weight.numel() for layer, _ in layers),
        "embedding": embedding.weight.numel(),
        "slots": slots // (SLOTS * LORA_RANK),
    }


def parsed_flags(flags: list[str]) -> dict[str, Any]:
    """What `vllm serve` understands. vLLM ends the process at a flag that it does not know."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
    validate_parsed_serve_args(args)
    engine = AsyncEngineArgs.from_cli_args(args)
    found = {name: value for name, value in {**vars(args), **vars(engine)}.items() if is_plain(value)}
    return json.loads(json.dumps(found, default=str))


def is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | list | dict | None)


def starts(total: int, free: int, share: float) -> bool:
    """Whether vLLM starts when so much of a GPU is free."""
    from vllm.v1.worker.utils import request_memory

    snapshot: Any = SimpleNamespace(total_memory=total, free_memory=free, device_="cuda:0")
    cache: Any = SimpleNamespace(gpu_memory_utilization=share)
    try:
        request_memory(snapshot, cache)
    except ValueError:
        return False
    return True


def adapter_deltas(folder: str, file: str) -> list[str]:
    """Load an adapter with vLLM's own loader; write what it adds to each weight. The names of the modules."""
    from safetensors.torch import save_file
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_local_dir(folder, None)
    assert not helper._validate_features()
    expected = {"embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    loaded = LoRAModel.from_local_checkpoint(folder, expected, helper, lora_model_id=1, device="cpu")
    deltas = {}
    for name, layer in loaded.loras.items():
        product = layer.optimize().lora_b @ layer.lora_a
        deltas[name] = (product.T if name.endswith("embed_tokens") else product).contiguous()
    save_file(deltas, file)
    return sorted(deltas)


def quantised_differences(dtype: str) -> dict[str, float]:
    """The largest difference of skylite's widened matrices to vLLM's own, in matrices that vLLM quantised."""
    import torch
    from vllm.model_executor.layers.quantization.utils import quant_utils
    from vllm.scalar_type import scalar_types

    from skylite.hub.quantised import Awq, Fp8, Gptq

    weight = torch.randn(256, 384, dtype=getattr(torch, dtype))  # [I, O]
    (inputs, outputs), found = weight.shape, {}
    for bits, kind in ((4, scalar_types.uint4b8), (8, scalar_types.uint8b128)):
        expected, numbers, scales = quant_utils.gptq_quantize_weights(weight, kind, 64)
        parts = {"qweight": quant_utils.gptq_pack(numbers, bits, inputs, outputs), "scales": scales}
        found[f"gptq {bits}"] = Gptq("", bits).widen(parts, weight.dtype).t() - expected
    expected, numbers, scales, zeros = quant_utils.quantize_weights(weight, scalar_types.uint4, 64, True)
    packed = [quant_utils.awq_pack(n, 4, len(n), outputs) for n in (numbers, zeros)]
    parts = dict(zip(("qweight", "qzeros", "scales"), (*packed, scales), strict=True))
    found["awq"] = Awq("").widen(parts, weight.dtype).t() - expected
    for block in ((128, 128), (1, outputs), (inputs, outputs)):  # blocks, a scale for each row, or for all
        numbers, scales = quant_utils.scaled_quantize(
            weight.float(), quant_utils.GroupShape(*block), torch.float8_e4m3fn
        )
        parts = {"weight": numbers, "scale": scales}
        rounded = scales.to(weight.dtype)  # as prepare_fp8_layer_for_marlin does
        expected = quant_utils.scaled_dequantize(
            numbers, rounded, quant_utils.GroupShape(*block), out_dtype=weight.dtype
        )
        form = Fp8("", "scale", block if block == (128, 128) else None)
        found[f"fp8 {block[0]}"] = form.widen(parts, weight.dtype) - expected
    return {name: float(difference.abs().max()) for name, difference in found.items()}


def loaded_as_plain(command: list[str], file: str) -> None:
    """Write the weights that vLLM has after it has loaded a quantised model with the plugin."""
    from safetensors.torch import save_file
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.utils.torch_utils import set_default_torch_dtype

    from skylite.engine.vllm.plugin import widened_base

    widened_base.install("float32")
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(command)
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{Path(folder, 'store')}", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        with set_default_torch_dtype(config.model_config.dtype):
            model = initialize_model(config)
        DefaultModelLoader(config.load_config).load_weights(model, config.model_config)
    save_file({name: parameter.detach().clone() for name, parameter in model.named_parameters()}, file)


def servable_models() -> dict[str, Any]:
    """The table of vllm_models.py, which imports every text model."""
    from tests.integration.vllm_models import describe

    return describe()


def main() -> None:
    import vllm.config
    import vllm.engine.arg_utils
    import vllm.lora.model_manager  # noqa: F401 -- here, so that the forks have them

    answers = [
        json.loads(in_a_fork(partial(globals()[name], *words))) for name, *words in json.load(sys.stdin)
    ]
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
