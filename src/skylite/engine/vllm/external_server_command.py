"""The command of a vLLM server that a person starts themselves, for adapters that come at run time."""

from __future__ import annotations

import shlex

from skylite.config.lora import LoraConfig
from skylite.engine.vllm.server_command import RUNTIME_LORA


def external_server_command(
    model: str, lora: LoraConfig, host: str, port: int, tensor_parallel: int = 1
) -> str:
    """A line for the shell. `tensor_parallel`: GPUs that share the model."""
    command = ["vllm", "serve", model, "--host", host, "--port", str(port), "--enable-lora"]
    command += ["--max-lora-rank", str(lora.vllm_rank), "--max-loras", "2", "--max-cpu-loras", "3"]
    command += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
    command += ["--no-trust-remote-code"]
    command += ["--tensor-parallel-size", str(tensor_parallel)] if tensor_parallel > 1 else []
    return f"{RUNTIME_LORA}=1 {shlex.join(command)}"
