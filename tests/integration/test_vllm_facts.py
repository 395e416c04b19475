"""What skylite believes of vLLM is what the installed vLLM says: flags, sizes of layers, models with LoRA."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from skylite.config.lora import LoraConfig
from skylite.config.train import TrainConfig
from skylite.data.chat_tokenizer import ChatTemplate
from skylite.engine.connections import Address
from skylite.engine.model_sizes import model_sizes, sizes_of
from skylite.engine.vllm.launcher import VllmLauncher
from skylite.engine.vllm.memory import engine_memory, served_rank, slots_per_rank
from skylite.engine.vllm.models import TABLE
from skylite.run.run_dir import AdapterVersion
from tests.adapter_forms import difference, publish
from tests.integration.in_vllm import (
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    INNER,
    KEY_VALUE_HEADS,
    LORA_RANK,
    VOCABULARY,
)
from tests.quantised_models import quantise_model, widen_model
from tests.tiny_models import make_tiny_model
from tests.unit.engine_cases import SPEC as CPU_SPEC

pytestmark = pytest.mark.vllm
GIB = 2**30
WIDENED = ("awq", "nf4 nested")
"""Formats of tests/quantised_models.py that vLLM loads as plain models."""
SPEC = replace(
    CPU_SPEC,
    device="cuda",
    dtype="bfloat16",
    max_model_len=1536,
    gpu_memory_utilization=0.0123,
    kv_cache_bytes=123456789,
    cpu_lora="dense",
    gpus=(0, 1),
    tensor_parallel=2,
)
READ = {
    "model": str(CPU_SPEC.model_path),
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
ENGINE = READ | {"uds": "run/engine.sock", "logprobs_mode": "processed_logprobs"}
SERVER = READ | {
    "max_model_len": -1,
    "host": "::",
    "port": 8000,
    "chat_template": "{{ messages }}",
    "default_chat_template_kwargs": {"thinking": False},
    "h11_max_incomplete_event_size": 65536,
    "middleware": ["skylite.engine.vllm.plugin.api_key.RequireKey"],
}
"""Every flag is here, so a flag that vLLM renames or reads otherwise is noticed."""
MAX_LORAS = 3
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SLOTS = {
    "rank 4 in slots of 8": ("llama", ALL, 4),
    "a part of a packed layer": ("llama", ["q_proj", "o_proj"], 16),
    "qwen3": ("qwen3", ALL, 8),
    "gemma3, half of a packed MLP": ("gemma3", ["up_proj"], 8),
}
FREE = ((80 * GIB, 36 * GIB, 0.44), (80 * GIB, 35 * GIB, 0.45))
GPUS = (2, 8)
"""2 GPUs divide the 4 key-value heads, and 8 have copies."""
QUERIES, KEYS = HEADS * HEAD_SIZE, KEY_VALUE_HEADS * HEAD_SIZE
LAYER = {
    "self_attn.q_proj": (QUERIES, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, QUERIES),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}


VLLM_FORMS = ("plain", "rslora", "ranks and alphas", "one layer, by wildcard", "embeddings")
DELTAS = "deltas.safetensors"
LOADED = "loaded"


def flags(command: list[str]) -> list[str]:
    """The command without `python -m MODULE`."""
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    return command[3:]


def commands() -> list[list[str]]:
    """The flags of an engine and of `skylite serve`."""
    template = ChatTemplate(text="{{ messages }}", args={"thinking": False})
    served = replace(
        SPEC,
        max_model_len=-1,
        fixed_adapter=AdapterVersion(1, Path("a,b")),
        address=Address("http://[::]:8000", "secret"),
        template=template,
    )
    return [flags(VllmLauncher().command(spec)) for spec in (SPEC, served)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {family: make_tiny_model(root / family, family) for family in {f for f, *_ in SLOTS.values()}}
    return made | {name: quantise_model(made["qwen3"], root / name, name) for name in WIDENED}


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Published adapters with the trainer's logprobs, by form."""
    root = tmp_path_factory.mktemp("adapters")
    return {form: publish(form, tiny_llama, root / str(k)) for k, form in enumerate(VLLM_FORMS)}


@pytest.fixture(scope="module")
def answers(models: dict[str, Path], adapters: dict[str, Any]) -> dict[str, Any]:
    """What vLLM says, by question."""
    questions: dict[str, list[Any]] = {
        name: ["slot_bytes", str(models[family]), MAX_LORAS, served_rank(rank), modules]
        for name, (family, modules, rank) in SLOTS.items()
    }
    questions |= {f"flags {k}": ["parsed_flags", command] for k, command in enumerate(commands())}
    questions |= {f"starts {k}": ["starts", *free] for k, free in enumerate(FREE)}
    questions |= {f"{gpus} GPUs": ["divided_layers", gpus] for gpus in GPUS}
    questions["models"] = ["servable_models"]
    questions |= {f"quantised {dtype}": ["quantised_differences", dtype] for dtype in ("float32", "bfloat16")}
    for name in WIDENED:
        launched = VllmLauncher().command(replace(CPU_SPEC, model_path=models[name]))[3:]
        questions[f"loaded {name}"] = ["loaded_as_plain", launched, str(models[name] / LOADED)]
    questions |= {f: ["adapter_deltas", str(a), str(a / DELTAS)] for f, (a, _) in adapters.items()}
    command = [sys.executable, "-m", "tests.integration.in_vllm"]
    done = subprocess.run(
        command, input=json.dumps(list(questions.values())), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(questions, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", SLOTS)
def test_vllm_allocates_the_predicted_bytes_for_lora(
    name: str, answers: dict[str, Any], models: dict[str, Path]
) -> None:
    family, modules, rank = SLOTS[name]
    lora = LoraConfig(rank=rank, target_modules=modules)
    config, sizes = TrainConfig(lora=lora), model_sizes(models[family], lora)
    predicted = engine_memory(sizes, config, "cpu", "bfloat16", max_loras=MAX_LORAS, cpu_lora="dense")
    assert answers[name] == predicted.lora_slots


@pytest.mark.parametrize("form", VLLM_FORMS)
def test_vllm_loads_an_adapter_as_the_trainer_computes_it(
    form: str, answers: dict[str, Any], adapters: dict[str, Any], tiny_llama: Path
) -> None:
    folder, logprobs = adapters[form]
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    assert difference(logprobs, model) > 0.01, "the adapter changes the model"
    deltas = load_file(folder / DELTAS)
    assert answers[form] == sorted(deltas)
    for path, delta in deltas.items():
        model.get_submodule(path).weight.data += delta
    assert difference(logprobs, model) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_matrices_have_vllms_values(dtype: str, answers: dict[str, Any]) -> None:
    names = ("gptq 4", "gptq 8", "awq", "fp8 128", "fp8 1", "fp8 256")
    assert answers[f"quantised {dtype}"] == dict.fromkeys(names, 0.0)


@pytest.mark.parametrize("name", WIDENED)
def test_vllm_loads_a_quantised_model_as_a_plain_one(
    name: str, answers: dict[str, Any], models: dict[str, Path], tmp_path: Path
) -> None:
    assert answers[f"loaded {name}"] is None
    loaded = load_file(models[name] / LOADED)
    values = load_file(widen_model(models[name], tmp_path / "widened") / "model.safetensors")
    for layer in ("model.layers.0", "model.layers.1"):
        for packed, names in (
            ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
            ("mlp.down_proj", ("mlp.down_proj",)),
        ):
            expected = torch.cat([values[f"{layer}.{name}.weight"] for name in names])
            assert torch.equal(loaded[f"{layer}.{packed}.weight"], expected)


@pytest.mark.parametrize("gpus", GPUS)
def test_vllm_allocates_the_predicted_part_on_each_gpu(gpus: int, answers: dict[str, Any]) -> None:
    vllm = answers[f"{gpus} GPUs"]
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in LAYER.items()}
    adapted = {name.removesuffix(".weight") for name in shapes}
    shapes["model.embed_tokens.weight"] = (VOCABULARY, HIDDEN)
    sizes = sizes_of(shapes, {"num_attention_heads": HEADS}, dict.fromkeys(adapted, LORA_RANK))
    part = sizes.per_gpu(gpus)
    # On 8 GPUs vLLM copies key-value heads, which the prediction leaves out.
    assert part.parameters == pytest.approx(vllm["layer"] + vllm["embedding"], rel=0.02 if gpus == 2 else 0.1)
    assert slots_per_rank(sizes, gpus) == pytest.approx(vllm["slots"], rel=0.02)


def test_vllm_reads_every_flag_of_a_gpu_server_and_starts_in_its_share(answers: dict[str, Any]) -> None:
    for k, (command, expected) in enumerate(zip(commands(), (ENGINE, SERVER), strict=True)):
        assert {name: answers[f"flags {k}"][name] for name in expected} == expected
        given = [f[2:].partition("=")[0].removeprefix("no-") for f in command if f.startswith("--")]
        names = {name.replace("-", "_") for name in given}
        assert names - {"lora_modules"} == expected.keys(), "each flag is compared"
    starts = [answers[f"starts {k}"] for k in range(len(FREE))]
    assert starts == [True, False], "with kv_cache_memory_bytes too"


def rows(table: dict[str, Any]) -> dict[str, Any]:
    """Architecture -> its entry."""
    return {
        name: {**entry, "architectures": []} for entry in table["entries"] for name in entry["architectures"]
    }


def test_the_table_is_what_the_installed_vllm_says(answers: dict[str, Any]) -> None:
    """A model class that either side could not import is left out. If this fails: `make vllm-models`."""
    installed, table = answers["models"], json.loads(TABLE.read_text(encoding="utf-8"))
    assert installed["vllm"] == table["vllm"]
    unknown = {*installed["unknown"], *table["unknown"]}
    now, then = rows(installed), rows(table)
    assert {n: now.get(n) for n in now.keys() - unknown} == {n: then.get(n) for n in then.keys() - unknown}
