"""A quantised base from its config.json on: what is refused, its memory, its engine's flags, its export."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from skylite.adapters.target_modules import predict_modules
from skylite.config.lora import LoraConfig
from skylite.config.train import TrainConfig, TrainerConfig
from skylite.engine.model_limits import check_trainable
from skylite.engine.model_sizes import model_sizes
from skylite.engine.vllm.launcher import VllmLauncher
from skylite.errors import ConfigError, ModelError
from skylite.export.plan import plan_export
from skylite.export.run import export
from skylite.hub.quantised import grouped, read_format
from skylite.hub.text_model import model_shapes
from skylite.model.loading import load_base
from skylite.model.process_group import Dist
from skylite.model.quantised_weights import QuantisedWeight
from skylite.processes.gpus import Gpu
from skylite.processes.hardware import choose_dtype
from skylite.resources.gpu_memory_plan import (
    GIB,
    Setup,
    replicate_default,
    require_trainer,
    trainer_memory,
)
from skylite.resources.gpu_placement import GpuChoice
from tests.quantised_models import (
    DYNAMIC,
    FLOAT8,
    FORMATS,
    INT4,
    NF4,
    compressed,
    quantise_model,
    widen_model,
)
from tests.tiny_models import make_tiny_model
from tests.unit.engine_cases import SPEC
from tests.unit.export_cases import flags, make_run

GPTQ, AWQ = FORMATS["gptq"][0], FORMATS["awq"][0]
MATRICES = 2 * (4 * 64 * 64 - 2 * 32 * 64 + 3 * 64 * 128)
"""Elements of the tiny model's layers: q and o of 64 x 64, k and v of 32 x 64, three of 64 x 128."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "plain", "qwen3")


@pytest.fixture(scope="module")
def awq(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantise_model(plain, tmp_path_factory.mktemp("quantised") / "awq", "awq")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes in 8 bits": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True}, "in 8 bits, whose products round activations"
    ),
    "bitsandbytes in other bytes": ({**NF4, "bnb_4bit_quant_storage": "bfloat16"}, "stored in bfloat16"),
    "mxfp4": ({"quant_method": "mxfp4"}, "by mxfp4, which skylite does not read"),
    "activations in 8 bits": (compressed("pack-quantized", DYNAMIC, **INT4), "with activations in 8 bits"),
    "int8 for activations": (
        compressed("int-quantized", DYNAMIC, num_bits=8, type="int", strategy="channel"),
        "as int-quantized with 8-bit int weights by channel",
    ),
    "nvfp4": (
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group"),
        "as nvfp4-pack-quantized with 4-bit float weights by tensor_group",
    ),
    "KV cache": (
        {**compressed("float-quantized", **FLOAT8, strategy="channel"), "kv_cache_scheme": {"num_bits": 8}},
        r"together with its KV cache \(kv_cache_scheme\)",
    ),
    "two groups": (
        {"quant_method": "compressed-tensors", "config_groups": {"a": {}, "b": {}}}, "in 2 ways at once",
    ),
    "sparse": (
        {**compressed("pack-quantized", **INT4), "sparsity_config": {"format": "sparse-24"}}, "or sparse",
    ),
    "activation order of compressed-tensors": (
        compressed("pack-quantized", **INT4, actorder="group"), "activation ordering",
    ),
    "activation order of GPTQ": ({**GPTQ, "desc_act": True}, "with activation ordering .*no longer serves"),
    "asymmetric GPTQ": ({**GPTQ, "sym": False}, "in 4 bits, sym=False; vLLM serves 4 and 8"),
    "GPTQ in 3 bits": ({**GPTQ, "bits": 3}, "in 3 bits"),
    "rules of GPTQ": ({**GPTQ, "dynamic": {"+:x": {}}}, "by other rules in other modules"),
    "AWQ for matrix-vector products": ({**AWQ, "version": "gemv"}, "version gemv"),
    "a damaged config": ({"quant_method": "gptq"}, "quantization_config is not complete: KeyError 'bits'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_formats_are_refused_with_the_reason(name: str) -> None:
    settings, words = REFUSED[name]
    with pytest.raises(ModelError, match=f"^The base m is quantised.*{words}"):
        read_format(settings, "m")


def retell(source: Path, folder: Path, rename: dict[str, str]) -> Path:
    """A quantised model with parts of its tensors' names replaced."""
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    for old, new in rename.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("rename", "words"),
    [
        ({"mlp.": "mlp.experts.3."}, "experts are quantised"),
        ({"model.layers.0.mlp.up_proj": "lm_head"}, "lm_head is quantised, which is not a layer"),
        ({"qweight": "w", "qzeros": "z", ".scales": ".s"}, "its files hold no quantised matrix"),
    ],
)
def test_files_that_the_trainer_cannot_hold_are_refused(
    rename: dict[str, str], words: str, awq: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=rf"^The base m is quantised \(AWQ INT4\): .*{words}"):
        check_trainable(retell(awq, tmp_path / "m", rename))


def test_quantised_layers_for_further_tokens_are_left_out(awq: Path, tmp_path: Path, dist: Dist) -> None:
    module = "model.layers.0.mlp.up_proj."
    model = retell(awq, tmp_path / "m", {module: "mtp.layers.0."})
    tensors = load_file(awq / "model.safetensors")
    tensors |= {
        n.replace(module, "mtp.layers.0."): t.clone() for n, t in tensors.items() if n.startswith(module)
    }
    save_file(tensors, model / "model.safetensors")
    assert check_trainable(model)
    base, how = load_base(str(model), torch.float32, dist, offload=False)
    assert how == "base model: AWQ INT4, kept so"
    assert isinstance(base.get_parameter("model.layers.0.mlp.up_proj.weight"), QuantisedWeight)


def test_a_weight_that_is_missing_is_named(awq: Path, tmp_path: Path, dist: Dist) -> None:
    model = retell(awq, tmp_path / "m", {"model.layers.1.mlp.up_proj.": "mtp."})
    with pytest.raises(
        ModelError, match=r"lacks 1 weights of Qwen3ForCausalLM: model\.layers\.1\.mlp\.up_proj"
    ):
        load_base(str(model), torch.float32, dist, offload=False)


def test_a_quantised_base_is_announced_and_not_offloaded(awq: Path, plain: Path) -> None:
    offload, divided, told = (
        TrainerConfig(num_ranks=2, **given) for given in ({"offload": True}, {"replicate_base": False}, {})
    )
    assert check_trainable(plain, offload) == check_trainable(plain, divided) == ""
    assert check_trainable(awq, told) == check_trainable(awq, TrainerConfig(replicate_base=False))
    assert check_trainable(awq).startswith("awq is quantised (AWQ INT4): it stays so in the trainer")
    with pytest.raises(ModelError, match=r"trainer\.offload=true moves 16-bit weights alone"):
        check_trainable(awq, offload)
    with pytest.raises(ModelError, match=r"trainer\.replicate_base=false divides 16-bit weights alone"):
        check_trainable(awq, divided)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_of_several_ranks_is_recorded_to_hold_a_quantised_base(
    device: Any, awq: Path, plain: Path
) -> None:
    config = TrainConfig(trainer=TrainerConfig(num_ranks=2))
    setup = Setup(
        VllmLauncher(), awq, device, "float32", "dense", GpuChoice(rank_gpus=[], engine_gpus=[], notes=[])
    )
    found, note = replicate_default(config, setup)
    assert found.trainer.replicate_base
    assert note == "trainer.replicate_base=true: each of the 2 ranks holds the quantised base in full"
    assert replicate_default(found, setup) == (found, "")
    if device == "cpu":
        assert replicate_default(config, replace(setup, model_path=plain)) == (config, "")


def test_what_does_not_help_a_quantised_base_is_not_suggested(awq: Path, plain: Path) -> None:
    config, gpu = TrainConfig(), Gpu(0, "", "H100", 9.0, GIB, "", mig=False)
    for model, helps in ((awq, False), (plain, True)):
        trainer = trainer_memory(model_sizes(model, LoraConfig()), config, "cuda", "bfloat16")
        with pytest.raises(ConfigError, match="trainer does not fit") as refusal:
            require_trainer(config, trainer, 1000, gpu, GpuChoice(rank_gpus=[0], engine_gpus=[], notes=[]))
        text = str(refusal.value)
        assert "a lower engine.gpu_memory_utilization" in text
        assert ("trainer.offload=true" in text, "more ranks" in text) == (helps, helps)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nf4 nested", "vLLM does not read bitsandbytes"),
        ("ct fp8 tensor", "would round q, k and v of a layer again to one scale"),
        ("ct fp8 block", r"computes blocks of 128 x 128, and these are of \(48, 40\)"),
        ("fp8 tensor", ""),
        ("ct fp8 channel", ""),
        ("gptq", ""),
    ],
)
def test_on_a_gpu_vllm_loads_the_widened_matrices_of_what_it_would_compute_otherwise(
    name: str, words: str, plain: Path, tmp_path: Path
) -> None:
    model, launcher, config = quantise_model(plain, tmp_path / "m", name), VllmLauncher(), TrainConfig()
    assert launcher.check_model(model, "cpu", 8) == ""
    note, reason = launcher.check_model(model, "cuda", 8), launcher.bf16_reason(model, "cuda")
    spec = replace(SPEC, model_path=model, device="cuda", dtype="bfloat16")
    command, variable = launcher.command(spec), launcher.environment(spec)["SKYLITE_WIDENED_BASE"]
    bytes_of = [
        launcher.memory(config, m, "cuda", "bfloat16", cpu_lora="dense").weights for m in (model, plain)
    ]
    if words:
        assert re.fullmatch(f"vLLM holds m widened, in 16 bits: .*{words}.*", note)
        assert (variable, reason, "--linear-backend" in command) == ("bfloat16", "", False)
        assert json.loads(command[command.index("--hf-overrides") + 1])["quantization_config"] is None
        assert bytes_of[0] == bytes_of[1]
    else:
        assert (variable, note, "--hf-overrides" in command) == ("", "", False)
        assert reason == "vLLM computes quantised weights in no other type"
        assert bytes_of[0] < bytes_of[1]


def test_the_shapes_of_4_bit_matrices_come_from_their_json(plain: Path, tmp_path: Path, dist: Dist) -> None:
    model = quantise_model(plain, tmp_path / "nf4", "nf4 nested")
    assert check_trainable(model).startswith("nf4 is quantised (bitsandbytes NF4): it stays so")
    assert model_shapes(model) == model_shapes(plain)
    sizes = model_sizes(model, LoraConfig())
    assert sizes.quantised == MATRICES
    per_matrix = 16 * 4 + 256 * 4 + 4 + 110  # two maps, a scale of scales, about 110 bytes of JSON
    assert sizes.quantised_bytes == pytest.approx(MATRICES / 2 + MATRICES / 64 + 14 * per_matrix, rel=0.02)
    base, how = load_base(str(model), torch.float32, dist, offload=False)
    assert how == "base model: bitsandbytes NF4, kept so"
    assert base.get_parameter("model.layers.0.self_attn.k_proj.weight").shape == (32, 64)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"shape": [64, 64], "blocksize": 48}, "that skylite does not widen"),
        ({"shape": [64, 64], "blocksize": 64, "nested_offset": 0.1}, "that skylite does not widen"),
        ({"shape": [64], "blocksize": 64}, "that cannot be read: ValueError"),
        ({"shape": [64, 64]}, "that cannot be read: KeyError 'blocksize'"),
    ],
)
def test_a_quant_state_that_is_not_as_config_json_says_is_refused(
    state: dict[str, Any], words: str, plain: Path, tmp_path: Path
) -> None:
    model = quantise_model(plain, tmp_path / "nf4", "nf4")
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight.quant_state.bitsandbytes__nf4"
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ModelError, match=rf"^The quantised model\.layers\.1\.self_attn\.q_proj .*{words}"):
        model_shapes(model)


def test_modules_and_sizes_are_those_of_the_plain_model(awq: Path, plain: Path) -> None:
    assert predict_modules(awq, LoraConfig()) == predict_modules(plain, LoraConfig())
    sizes, of_plain = model_sizes(awq, LoraConfig()), model_sizes(plain, LoraConfig())
    assert sizes.quantised == MATRICES
    groups = MATRICES // 32
    assert sizes.quantised_bytes == MATRICES // 2 + groups * 2 + groups // 2, "4 bits, scales, zero points"
    assert sizes.largest_quantised == 64 * 128
    unquantised = replace(sizes, quantised=0, quantised_bytes=0, largest_quantised=0)
    assert replace(unquantised, config=of_plain.config) == of_plain


def test_memory_counts_the_stored_bytes_and_one_widened_matrix(awq: Path, plain: Path) -> None:
    sizes, of_plain = model_sizes(awq, LoraConfig()), model_sizes(plain, LoraConfig())
    config = TrainConfig()
    trainer, of_16_bits = (trainer_memory(s, config, "cuda", "bfloat16").weights for s in (sizes, of_plain))
    assert of_16_bits - trainer == 2 * MATRICES - sizes.quantised_bytes - 64 * 128 * (3 * 2 + 4)
    on_gpu, on_cpu = (
        [
            VllmLauncher().memory(config, model, device, dtype, cpu_lora="dense").weights
            for model in (awq, plain)
        ]
        for device, dtype in (("cuda", "bfloat16"), ("cpu", "float32"))
    )
    assert on_gpu[1] - on_gpu[0] == 2 * MATRICES - sizes.quantised_bytes
    assert on_cpu[0] == on_cpu[1], "plain weights, see plugin/widened_base.py"


def test_vllm_is_told_to_compute_the_weights_alone(awq: Path, plain: Path) -> None:
    launcher = VllmLauncher()
    on_cpu = replace(SPEC, model_path=awq, device="cpu", dtype="float32")
    command = launcher.command(on_cpu)
    overrides = json.loads(command[command.index("--hf-overrides") + 1])
    assert overrides["quantization_config"] is None
    assert launcher.environment(on_cpu)["SKYLITE_WIDENED_BASE"] == "float32"
    assert launcher.environment(replace(on_cpu, model_path=plain))["SKYLITE_WIDENED_BASE"] == ""
    on_gpu = launcher.command(replace(SPEC, model_path=awq, device="cuda", dtype="bfloat16"))
    assert on_gpu[on_gpu.index("--linear-backend") + 1] == "marlin"
    assert "--linear-backend" not in launcher.command(replace(SPEC, model_path=plain, device="cuda"))


def test_on_a_gpu_the_dtype_is_bfloat16(awq: Path) -> None:
    launcher = VllmLauncher()
    assert launcher.bf16_reason(awq, "cpu") == ""
    with pytest.raises(ConfigError, match="vLLM computes quantised weights in no other type"):
        choose_dtype("float32", "cuda", bf16_reason=launcher.bf16_reason(awq, "cuda"))


def test_an_adapter_is_merged_into_the_widened_weights(plain: Path, tmp_path: Path) -> None:
    model = quantise_model(plain, tmp_path / "fp8", "ct fp8 channel")
    run = make_run(tmp_path, model, scale=0.02)
    out = tmp_path / "out"
    checks = export(plan_export(flags(run, out=out, merge=True)), launcher=None)
    assert max(check.gap_max for check in checks) < 1e-4
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    merged = load_file(out / "model.safetensors")
    values = load_file(widen_model(model, tmp_path / "widened") / "model.safetensors")
    adapter = load_file(run.default_adapters / "policy-v000002" / "adapter_model.safetensors")
    module = "model.layers.1.self_attn.q_proj"
    a, b = (adapter[f"base_model.model.{module}.lora_{m}.weight"].float() for m in "AB")
    expected = values[f"{module}.weight"] + 8 / 4 * b @ a
    torch.testing.assert_close(merged[f"{module}.weight"].float(), expected, atol=1e-6, rtol=0)
    assert merged.keys() == values.keys()


def test_a_matrix_without_all_its_parts_is_refused(awq: Path) -> None:
    form = read_format(AWQ, "m")
    tensors = load_file(awq / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.scales"]
    with pytest.raises(ModelError, match=r"^The quantised model.layers.1.mlp.up_proj lacks scales"):
        list(grouped(form, tensors.items()))
