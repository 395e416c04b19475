"""Models of other families than Llama, trained as text models. On real vLLM the canary checks each step.

One that also reads pictures is also resumed, evaluated and exported. test_vllm_text_models.py shows that vLLM
applies an adapter on each kind of module of all.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from skylite.adapters.experts import BOTH
from skylite.adapters.manifest import read_manifest
from tests.e2e.project import FAKE_WORDS, Project
from tests.e2e.running import DEADLINE_S
from tests.serving_sweep import make_model
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.dist]


def tensor_names(file: Path) -> set[str]:
    with safe_open(file, framework="np") as tensors:
        return set(tensors.keys())


def test_gemma_3_trains_resumes_and_exports_in_the_published_layout(project: Project, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "gemma3_vl", "gemma3_vl")
    own, run = replace(project, model=model), tmp_path / "wrapper"
    first = own.train_args(str(run), 1, "--set", "checkpoint.every=1", *FAKE_WORDS)
    done = own.run(*first, timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    vllm = ("--set", "engine.launcher=vllm", "--set", "sync.rollout_mismatch=stop")
    resumed = own.run("train", "--resume", str(run), "--steps", "2", *vllm, timeout_s=DEADLINE_S)
    assert resumed.returncode == 0, resumed.stderr
    notes = json.loads((run / "config.json").read_text())["resolved"]["notes"]
    [note] = [n["text"] for n in notes if "vision_tower" in n["text"]]
    assert "(multi_modal_projector, vision_tower): prompts are text" in note
    assert note in done.stderr.replace("\n", " ")

    [*_, line] = own.metrics(str(run))
    assert line["step"] == 2
    assert line["canary/gap_max"] < 1e-4
    assert abs(line["canary/projection"] - 1) < 0.05
    adapter = run / "adapters" / "policy-v000002"
    assert read_manifest(adapter).dtype == "float32"
    matrices = load_file(adapter / "adapter_model.safetensors")
    b = {name: array for name, array in matrices.items() if "lora_B" in name}
    assert len(b) == 2 * 7
    assert all(array.any() for array in b.values()), "every kind of module learns"

    assert 0 <= line["eval/score"] <= 1, "vLLM has evaluated version 2"
    exported = own.run("export", str(run), "--merge", "--out", str(tmp_path / "out"), timeout_s=DEADLINE_S)
    assert exported.returncode == 0, exported.stderr
    names = tensor_names(model / "model.safetensors")
    assert tensor_names(tmp_path / "out" / "model.safetensors") == names
    assert any(name.startswith("vision_tower.") for name in names)


MLP = {"gate_proj", "up_proj", "down_proj"}
PER_LAYER = {"per_layer_input_gate", "per_layer_projection"}
EXPERTS = {"base_layer", "experts"}
"""Whose matrices PEFT names so: gate_up_proj and down_proj of the experts."""


@pytest.mark.parametrize(
    ("family", "experts", "kinds"),
    [
        ("gpt_oss", BOTH, {"q_proj", "k_proj", "v_proj", "o_proj"} | EXPERTS),
        ("deepseek_v3", BOTH, {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"} | MLP | EXPERTS),
        ("gemma4", [], {"q_proj", "k_proj", "v_proj", "o_proj"} | MLP | PER_LAYER),
    ],
)
def test_two_steps_train_every_kind_of_module(
    family: str, experts: list[str], kinds: set[str], project: Project, tmp_path: Path
) -> None:
    """gpt-oss on vLLM: sinks, windows, biases. DeepSeek-V3: latent attention, a shared expert. Gemma 4: heads
    of two sizes, frozen experts, a tower that stays.
    """
    make_model(tmp_path / family, family)
    own, run = replace(project, model=tmp_path / family), tmp_path / "run"
    setting = f"lora.target_parameters={json.dumps(experts)}"
    engine = [] if family == "gpt_oss" else FAKE_WORDS
    done = own.run(*own.train_args(str(run), 2, "--set", setting, *engine), timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    [*_, line] = own.metrics(str(run))
    assert line["step"] == 2
    assert line["canary/gap_max"] < 1e-3
    assert abs(line["canary/projection"] - 1) < 0.05
    matrices = load_file(run / "adapters" / "policy-v000002" / "adapter_model.safetensors")
    learned = {name.partition(".lora_B")[0] for name, b in matrices.items() if ".lora_B" in name and b.any()}
    assert {path.rpartition(".")[2] for path in learned} == kinds
