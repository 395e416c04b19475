"""vLLM 0.26, the last release built for torch 2.11, knows every flag and variable that we use on a GPU.

vllm_flags_0.26.0.json holds what its source says. test_vllm_facts.py asks the installed release.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from skylite.data.chat_tokenizer import ChatTemplate
from skylite.engine.vllm.launcher import VllmLauncher
from tests.unit.engine_cases import PUBLIC, SPEC

KNOWN = json.loads(Path(__file__).with_name("vllm_flags_0.26.0.json").read_text(encoding="utf-8"))
CUDA, PUBLIC_CUDA = (
    dataclasses.replace(spec, device="cuda", dtype="bfloat16", gpus=(0,), kv_cache_bytes=1 << 30)
    for spec in (SPEC, PUBLIC)
)


def commands() -> list[list[str]]:
    template = ChatTemplate(text="{{ messages }}", args={"enable_thinking": False})
    return [
        VllmLauncher().command(CUDA),
        VllmLauncher().command(dataclasses.replace(CUDA, lends="weights")),
        VllmLauncher().command(dataclasses.replace(CUDA, lora_rank=None, kv_cache_bytes=None)),
        VllmLauncher().command(dataclasses.replace(PUBLIC_CUDA, template=template)),
    ]


def test_every_flag_of_a_gpu_server_exists() -> None:
    ours = {word.partition("=")[0] for command in commands() for word in command if word.startswith("--")}
    assert {
        "--tensor-parallel-size",
        "--kv-cache-memory-bytes",
        "--uds",
        "--middleware",
        "--chat-template",
        "--enable-sleep-mode",
    } <= ours
    assert {word.replace("--no-", "--") for word in ours} - {*KNOWN["flags"]} == set()


def test_every_variable_of_a_gpu_server_exists() -> None:
    env = VllmLauncher().environment(CUDA) | VllmLauncher().environment(PUBLIC_CUDA)
    ours = {name for name in env if name.startswith("VLLM_")}
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in ours
    assert ours - {*KNOWN["variables"]} == set()


def test_the_logprobs_mode_exists() -> None:
    command = VllmLauncher().command(CUDA)
    assert command[command.index("--logprobs-mode") + 1] in KNOWN["logprobs_modes"]
