"""`skylite models`: what a model can do, from its files; the same verdict as `train --dry-run`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from skylite.config.train import TrainConfig
from skylite.engine.launchers import load_launcher
from skylite.engine.model_check import DEVICES, ModelFacts, describe_model
from skylite.errors import ModelError, SkyliteError
from skylite.hub import families
from skylite.hub.families import Family, family_of, read_sweep
from skylite.hub.resolve import resolve_model
from tests.tiny_models import make_tiny_model
from tests.unit.bad_inputs import call
from tests.unit.test_dry_run import plan

CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "quantised": {"config": {"quantization_config": {"quant_method": "fp8"}}},
    "unknown type": {"config": {"model_type": "invented"}},
    "no type": {"config": {"model_type": None}},
    "refused family": {"config": {"model_type": "bert"}},
    "not served": {"config": {"architectures": ["StableLmForCausalLM"]}},
    "not served, but nothing is sampled": {
        "config": {"architectures": ["StableLmForCausalLM"]}, "set": {"algorithm": {"name": "sft"}},
    },
    "experts": {"config": {"num_local_experts": 4}},
    "a typo beside a right target": {"set": {"lora": {"target_modules": ["q_proj", "q_prj"]}}},
    "the head": {"set": {"lora": {"target_modules": ["q_proj", "lm_head"]}}},
    "short context": {"config": {"max_position_embeddings": 32}},
    "no tokenizer": {"without": ["tokenizer.json"]},
    "no template": {"without": ["chat_template.jinja"]},
    "an adapter that is missing": {"set": {"lora": {"from_adapter": "/nowhere"}}},
}  # fmt: skip


def changed(tiny_llama: Path, folder: Path, change: dict[str, Any]) -> Path:
    """The tiny model with other settings in config.json, or without some files."""
    shutil.copytree(tiny_llama, folder)
    config = json.loads((folder / "config.json").read_text()) | change.get("config", {})
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    for name in change.get("without", []):
        (folder / name).unlink()
    return folder


def facts_of(model: Path, **sections: Any) -> ModelFacts:
    config = TrainConfig.model_validate({"model": {"name": str(model)}, **sections})
    return describe_model(config, resolve_model(str(model)), load_launcher(config, {}))


def refusal(function: Any, *arguments: Any, **sections: Any) -> str:
    try:
        result = function(*arguments, **sections)
    except SkyliteError as error:
        return str(error)
    return "" if not isinstance(result, ModelFacts) or result.served["cpu"] == "yes" else result.served["cpu"]


@pytest.mark.parametrize("name", [n for n in CHANGES if "sampled" not in n])
def test_models_and_dry_run_say_the_same(name: str, tmp_path: Path, tiny_llama: Path) -> None:
    change = CHANGES[name]
    model, sections = changed(tiny_llama, tmp_path / "model", change), change.get("set", {})
    said, planned = refusal(facts_of, model, **sections), refusal(plan, tmp_path, model, **sections)
    assert said == planned
    assert bool(said) == (name not in ("as it is", "no template"))


def test_a_model_that_no_engine_serves_trains_where_nothing_is_sampled(
    tmp_path: Path, tiny_llama: Path
) -> None:
    change = CHANGES["not served, but nothing is sampled"]
    facts = facts_of(changed(tiny_llama, tmp_path / "model", change), **change["set"])
    assert "samples nothing" in facts.served["cuda"]


def test_a_gpu_serves_experts_and_a_cpu_says_why_not(tmp_path: Path, tiny_llama: Path) -> None:
    facts = facts_of(changed(tiny_llama, tmp_path / "model", CHANGES["experts"]))
    assert facts.served["cuda"] == "yes"
    assert "not tried with vLLM" in facts.served["cpu"]


def test_the_facts_of_a_model(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = facts_of(tiny_llama)
    assert facts.served == dict.fromkeys(DEVICES, "yes")
    assert facts.lora == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert (facts.experts, facts.images, facts.quantised) == ("none", "no", "no")
    assert facts.context == 2048
    assert facts.chat_template == "the model's own"
    assert "prefix tree" in facts.trains
    monkeypatch.setattr(families, "version", lambda _: "6.0")
    assert "prefix tree" in facts_of(tiny_llama).trains


def test_a_wrapper_names_the_parts_that_stay(tmp_path: Path) -> None:
    facts = facts_of(make_tiny_model(tmp_path / "gemma3_vl", "gemma3_vl"))
    assert facts.images == "no; multi_modal_projector, vision_tower stay as they are"
    assert any("prompts are text" in note for note in facts.notes)


def test_the_command_prints_facts_json_and_one_sentence(tiny_llama: Path) -> None:
    reply = call(["models", str(tiny_llama)])
    assert reply.code == 0
    assert "LoRA on CPU    yes" in reply.out
    assert json.loads(call(["models", str(tiny_llama), "--json"]).out)["architecture"] == "LlamaForCausalLM"
    reply = call(["models", str(tiny_llama), "--set", 'lora.target_modules=["q_proj", "q_prj"]'])
    assert reply.code == 2
    assert reply.output.count("\n") == 1
    assert "'q_prj', which matches no module" in reply.output
    assert "Did you mean 'q_proj'?" in reply.output


def test_without_a_model_it_prints_all_families() -> None:
    lines = call(["models"]).out.splitlines()
    row = next(line.split() for line in lines if line.startswith("llama "))
    assert row == ["llama", "prefix", "tree", "yes", "yes"]
    assert any(line.startswith("bert: its tokens see later ones") for line in lines)
    assert len(json.loads(call(["models", "--json"]).out)) == len(read_sweep().families)


def test_no_family_of_the_table_is_both_refused_and_trained() -> None:
    for family in read_sweep().families.values():
        assert bool(family.refused) != (family.packing is not None), family.name
        if family.packing is not None:
            assert 0 <= family.logprobs <= 1e-4, family.name
            assert 0 <= family.gradient <= 1e-5, family.name
            assert bool(family.packing_reason) == (family.packing == "padded"), family.name


def test_what_a_family_says_of_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    found = family_of({"model_type": "qwen3"}, "m")
    assert isinstance(found, Family)
    assert found.packing == "tree"
    with pytest.raises(ModelError, match=r"m is a model of type bert, which skylite does not train: its tok"):
        family_of({"model_type": "bert"}, "m")
    with pytest.raises(ModelError, match="names no model_type"):
        family_of({}, "m")
    with pytest.raises(ModelError, match=r"'invented', which transformers .* does not know"):
        family_of({"model_type": "invented"}, "m")
    monkeypatch.setattr(families, "version", lambda _: "6.0")
    assert family_of({"model_type": "invented"}, "m") is None
