"""Train, publish, load with PEFT: every form of adapter computes the trainer's log-probabilities."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from skylite.adapters.import_adapter import adopt_adapter, copy_adapter, read_warm_start
from skylite.export.weights import equalise_ranks
from skylite.model.policy import load_policy
from skylite.run.run_dir import RunDir
from skylite.trainer.publish_adapter import adapter_tensors
from tests.adapter_forms import FORMS, difference, publish
from tests.decisions import resolved
from tests.small_run import lone_rank, settings


@pytest.mark.parametrize("name", FORMS)
def test_peft_computes_the_logprobs_and_a_run_continues_from_the_same_bits(
    name: str, tiny_llama: Path, tmp_path: Path
) -> None:
    adapter, logprobs = publish(name, tiny_llama, tmp_path / "adapters")
    base = AutoModelForCausalLM.from_pretrained(tiny_llama)
    assert difference(logprobs, base) > 0.01, "the adapter changes the model"
    model = PeftModel.from_pretrained(base, str(adapter)).eval()
    assert difference(logprobs, model) < 1e-5

    warm = settings(lora={"from_adapter": str(adapter)})
    config, _ = adopt_adapter(warm, (), tiny_llama)
    run = RunDir(tmp_path / "run")
    copy_adapter(adapter, run.warm_start)
    started = resolved(tiny_llama, tmp_path, identity={"warm_start": run.warm_start})
    with lone_rank() as dist:
        continued = adapter_tensors(load_policy(started, config, dist))
    published = load_file(adapter / "adapter_model.safetensors")
    assert published.keys() == continued.keys()
    assert all(torch.equal(published[key], tensor) for key, tensor in continued.items())
    for setting in ("rank", "alpha", "use_rslora", "rank_pattern", "alpha_pattern"):
        assert getattr(config.lora, setting) == getattr(settings(lora=FORMS[name]).lora, setting)


def test_patterns_give_each_module_its_rank_and_scale(tiny_llama: Path, tmp_path: Path) -> None:
    adapter, _ = publish("ranks and alphas", tiny_llama, tmp_path / "adapters")
    tensors = load_file(adapter / "adapter_model.safetensors")
    ranks = {n.split(".")[6]: t.shape[0] for n, t in tensors.items() if "lora_A" in n}
    assert ranks == {"q_proj": 4, "k_proj": 6, "v_proj": 4, "o_proj": 4, "gate_proj": 3, "up_proj": 4,
                     "down_proj": 4}  # fmt: skip
    assert json.loads((adapter / "adapter_config.json").read_text())["rank_pattern"] == {
        "k_proj": 6,
        "gate_proj": 3,
    }
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_llama), str(adapter))
    layer = model.get_base_model().model.layers[1]
    scales = {n: getattr(layer.self_attn, f"{n}_proj").scaling["default"] for n in "qko"}
    assert scales == pytest.approx({"q": 8 / 4**0.5, "k": 30 / 6**0.5, "o": 1 / 4**0.5})


@pytest.mark.parametrize("name", [name for name, lora in FORMS.items() if "pattern" in str(lora)])
def test_an_export_without_patterns_computes_the_same(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    adapter, logprobs = publish(name, tiny_llama, tmp_path / "adapters")
    lora = read_warm_start(adapter)
    equalise_ranks(adapter / "adapter_model.safetensors", lora)
    config = json.loads((adapter / "adapter_config.json").read_text())
    plain: dict[str, object] = {"r": lora.max_rank, "lora_alpha": lora.max_rank, "use_rslora": False}
    plain |= {"rank_pattern": {}, "alpha_pattern": {}}
    (adapter / "adapter_config.json").write_text(json.dumps(config | plain))
    (adapter / "manifest.json").unlink()
    assert {*read_warm_start(adapter).rank_pattern} == set(), "all matrices have the highest rank"
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_llama), str(adapter)).eval()
    assert difference(logprobs, model) < 1e-5
