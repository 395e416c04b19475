"""vLLM knows every flag and variable that we use on a GPU: the installed release, and 0.26 by its list."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from skylite.data.chat_tokenizer import ChatTemplate
from skylite.engine.vllm.launcher import VllmLauncher
from tests import vllm_flags
from tests.unit.engine_cases import PUBLIC, SPEC

LIST = Path(vllm_flags.__file__).with_name("vllm_flags_0.26.0.json")
CUDA, PUBLIC_CUDA = (
    dataclasses.replace(spec, device="cuda", dtype="bfloat16", gpus=(0,), kv_cache_bytes=1 << 30)
    for spec in (SPEC, PUBLIC)
)


@pytest.fixture(params=["0.26.0", "installed"])
def known(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "0.26.0":
        return json.loads(LIST.read_text(encoding="utf-8"))
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    above = Path(spec.origin).parents[1]
    names = [name for name in vllm_flags.FRONTENDS if (above / name).exists()]
    return vllm_flags.read_source(names, lambda name: (above / name).read_text(encoding="utf-8"))


def commands() -> list[list[str]]:
    template = ChatTemplate(text="{{ messages }}", args={"enable_thinking": False})
    return [
        VllmLauncher().command(CUDA),
        VllmLauncher().command(dataclasses.replace(CUDA, lora_rank=None, kv_cache_bytes=None)),
        VllmLauncher().command(dataclasses.replace(PUBLIC_CUDA, template=template)),
    ]


def test_every_flag_of_a_gpu_server_exists(known: dict[str, Any]) -> None:
    ours = {word.partition("=")[0] for command in commands() for word in command if word.startswith("--")}
    assert {
        "--tensor-parallel-size",
        "--kv-cache-memory-bytes",
        "--uds",
        "--middleware",
        "--chat-template",
    } <= ours
    assert {word.replace("--no-", "--") for word in ours} - {*known["flags"]} == set()


def test_every_variable_of_a_gpu_server_exists(known: dict[str, Any]) -> None:
    env = VllmLauncher().environment(CUDA) | VllmLauncher().environment(PUBLIC_CUDA)
    ours = {name for name in env if name.startswith("VLLM_")}
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in ours
    assert ours - {*known["variables"]} == set()


def test_the_logprobs_mode_exists(known: dict[str, Any]) -> None:
    command = VllmLauncher().command(CUDA)
    assert command[command.index("--logprobs-mode") + 1] in known["logprobs_modes"]
