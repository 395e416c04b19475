"""vLLM's own parser reads every flag of a GPU server, and its own check lets such a server start."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skylite.data.chat_template import ChatTemplate
from skylite.engine.vllm.server_command import EngineSpec, engine_command, serve_command

pytestmark = pytest.mark.vllm
SPEC = EngineSpec(
    name="vllm-0",
    model_path=Path("model"),
    device="cuda",
    dtype="bfloat16",
    uds=Path("vllm-0.sock"),
    max_lora_rank=32,
    target_modules=["q_proj", "v_proj"],
    max_loras=2,
    max_cpu_loras=3,
    max_model_len=1536,
    max_num_seqs=64,
    kv_cache_gib=0.5,
    gpu_memory_utilization=0.0123,
    kv_cache_bytes=123456789,
    cpu_lora="dense",
    enable_lora=True,
    seed=7,
    gpus=(0, 1),
    tensor_parallel=2,
)
READ = {
    "model": "model",
    "served_model_name": ["base"],
    "dtype": "bfloat16",
    "seed": 7,
    "max_model_len": 1536,
    "max_num_seqs": 64,
    "generation_config": "vllm",
    "enable_prefix_caching": True,
    "trust_remote_code": False,
    "disable_uvicorn_access_log": True,
    "uvicorn_log_level": "warning",
    "tensor_parallel_size": 2,
    "gpu_memory_utilization": 0.0123,
    "kv_cache_memory_bytes": 123456789,
    "enable_lora": True,
    "max_lora_rank": 32,
    "max_loras": 2,
    "max_cpu_loras": 3,
    "lora_target_modules": ["q_proj", "v_proj"],
}
ENGINE = READ | {"uds": "vllm-0.sock", "logprobs_mode": "processed_logprobs"}
SERVER = READ | {
    "max_model_len": -1,
    "host": "::",
    "port": 8000,
    "chat_template": "{{ messages }}",
    "default_chat_template_kwargs": {"thinking": False},
    "h11_max_incomplete_event_size": 65536,
    "middleware": ["skylite.engine.vllm.plugin.serve_middleware.RequireKey"],
}
"""Every flag is here, so a flag that vLLM renames or reads otherwise is noticed."""


def ask_vllm(commands: list[list[str]], free: list[tuple[int, int, float]]) -> dict[str, Any]:
    work = json.dumps({"commands": commands, "free": free})
    command = [sys.executable, "-m", "tests.integration.parsed_flags"]
    done = subprocess.run(command, input=work, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def flags(command: list[str]) -> list[str]:
    """The command without `python -m MODULE`."""
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    return command[3:]


def test_vllm_reads_every_flag_of_a_gpu_server_and_starts_in_its_share() -> None:
    template = ChatTemplate(text="{{ messages }}", args={"thinking": False})
    served = serve_command(
        replace(SPEC, max_model_len=-1),
        adapter_name="policy",
        adapter_path=Path("a,b"),
        port=8000,
        host="::",
        template=template,
    )
    commands = [flags(engine_command(SPEC)), flags(served)]
    gib = 2**30
    found = ask_vllm(commands, [(80 * gib, 36 * gib, 0.44), (80 * gib, 35 * gib, 0.45)])
    for command, got, expected in zip(commands, found["commands"], (ENGINE, SERVER), strict=True):
        assert {name: got[name] for name in expected} == expected
        given = [f[2:].partition("=")[0].removeprefix("no-") for f in command if f.startswith("--")]
        names = {name.replace("-", "_") for name in given}
        assert names - {"lora_modules"} == expected.keys(), "each flag is compared"
    assert found["starts"] == [True, False], "with kv_cache_memory_bytes too"
