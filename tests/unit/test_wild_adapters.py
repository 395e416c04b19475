"""Adapters as other frameworks and versions of PEFT write them: each loads bit-equal or is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import torch as torch_file
from safetensors.numpy import load_file, save_file

from skylite.adapters.folder import find_adapter
from skylite.adapters.import_adapter import adopt_adapter, copy_adapter, read_warm_start
from skylite.config.lora import LoraConfig
from skylite.config.train import TrainConfig
from skylite.errors import ConfigError, ModelError
from skylite.hub.resolve import tensor_shapes
from skylite.model.policy import load_policy
from skylite.run.run_dir import RunDir
from skylite.trainer.publish_adapter import adapter_tensors
from tests.decisions import resolved
from tests.small_run import lone_rank

RANK, ALPHA = 8, 16
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
OLD_KEYS = ("base_model_name_or_path", "bias", "inference_mode", "lora_dropout", "r", "lora_alpha",
            "target_modules", "modules_to_save", "peft_type", "task_type")  # fmt: skip


def write(
    folder: Path,
    base: Path,
    names: tuple[str, ...] = LAYERS,
    dtype: Any = np.float32,
    layer: str = "",
    ranks: dict[str, int] | None = None,
    **peft: Any,
) -> Path:
    """An adapter as PEFT writes it, with random matrices on the modules `names` of the base."""
    folder.mkdir(parents=True)
    random, tensors = np.random.default_rng(1), {}
    for name, shape in tensor_shapes(base).items():
        path = name.removesuffix(".weight")
        if path.rpartition(".")[2] in names and layer in path:
            key = f"base_model.model.{path}"
            rank = next((r for end, r in (ranks or {}).items() if path.endswith(end)), RANK)
            tensors[f"{key}.lora_A.weight"] = random.normal(size=(rank, shape[1])).astype(dtype)
            tensors[f"{key}.lora_B.weight"] = random.normal(size=(shape[0], rank)).astype(dtype)
    save_file(tensors, folder / WEIGHTS)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none",
        "base_model_name_or_path": "somewhere/base", "target_modules": list(names), "lora_dropout": 0.0,
        "inference_mode": True, "modules_to_save": None, "use_dora": False, "use_rslora": False,
        "rank_pattern": ranks or {}, "alpha_pattern": {}, "peft_version": "0.19.0", "init_lora_weights": True,
    }  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(config | peft))
    return folder


def pickled(folder: Path) -> Path:
    torch.save(torch_file.load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()
    return folder


def rewritten(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    tensors = torch_file.load_file(folder / WEIGHTS)
    torch_file.save_file({name: change(tensor) for name, tensor in tensors.items()}, folder / WEIGHTS)
    return folder


def with_tensor(folder: Path, name: str, tensor: torch.Tensor) -> Path:
    torch_file.save_file(torch_file.load_file(folder / WEIGHTS) | {name: tensor}, folder / WEIGHTS)
    return folder


def base_tensor(base: Path, path: str) -> torch.Tensor:
    return torch_file.load_file(base / "model.safetensors")[f"{path}.weight"]


def matrices(folder: Path) -> list[torch.Tensor]:
    """Of LoRA, sorted by name, in float32."""
    path = folder / "adapter_model.bin"
    tensors = torch.load(path) if path.is_file() else torch_file.load_file(folder / WEIGHTS)
    return [tensor.float() for name, tensor in sorted(tensors.items()) if ".lora_" in name]


def renamed(folder: Path, change: Callable[[str], str]) -> Path:
    save_file({change(k): v for k, v in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS)
    return folder


def with_default(name: str) -> str:
    return name.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default.")


def old_config(folder: Path) -> Path:
    config = json.loads((folder / CONFIG).read_text())
    kept = {k: config[k] for k in OLD_KEYS} | {"enable_lora": None, "merge_weights": False}
    (folder / CONFIG).write_text(json.dumps(kept))
    return folder


EMBEDDING = "base_model.model.model.embed_tokens.base_layer.weight"
REGEX = r"model\.layers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj"
UNSLOTH: dict[str, Any] = {
    "base_model_name_or_path": "unsloth/qwen2.5-0.5b-instruct-unsloth-bnb-4bit",
    "unsloth_fixed": True,
}
LOADS: dict[str, tuple[Callable[[Path, Path], Path], dict[str, Any]]] = {
    "peft03_config_safetensors": (lambda d, b: old_config(write(d, b)), {}),
    "keys_with_default": (lambda d, b: renamed(write(d, b), with_default), {}),
    "keys_without_prefix": (
        lambda d, b: renamed(write(d, b), lambda k: k.removeprefix("base_model.model.")), {},
    ),
    "qv_only": (
        lambda d, b: write(d, b, ("q_proj", "v_proj")), {"target_modules": ["q_proj", "v_proj"]},
    ),
    "regex_targets": (lambda d, b: write(d, b, target_modules=REGEX), {}),
    "alpha_pattern_same": (
        lambda d, b: write(d, b, alpha_pattern={"layers.1.self_attn.q_proj": ALPHA}), {},
    ),
    "fp16_weights": (lambda d, b: write(d, b, dtype=np.float16), {}),
    "future_peft": (lambda d, b: write(d, b, peft_version="0.99.0", some_new_option=None), {}),
    "one_layer": (
        lambda d, b: write(d, b, layer="layers.1.", layers_to_transform=[1]),
        {"target_modules": sorted(
            [f"model.layers.1.self_attn.{n}" for n in LAYERS[:4]]
            + [f"model.layers.1.mlp.{n}" for n in LAYERS[4:]]
        )},
    ),
    "rank_pattern": (
        lambda d, b: write(d, b, ranks={"layers.1.self_attn.q_proj": 4}),
        {"rank_pattern": {"layers.1.self_attn.q_proj": 4}},
    ),
    "alpha_pattern": (
        lambda d, b: write(d, b, alpha_pattern={r"layers\.1\..*q_proj": 64}),
        {"alpha_pattern": {r"layers\.1\..*q_proj": 64}},
    ),
    "peft05_bin": (lambda d, b: pickled(old_config(write(d, b))), {}),
    "embeddings_saved": (
        lambda d, b: with_tensor(write(d, b, ("q_proj",)), EMBEDDING, base_tensor(b, "model.embed_tokens")),
        {"target_modules": ["q_proj"]},
    ),
    "bf16_weights": (lambda d, b: rewritten(write(d, b), torch.Tensor.bfloat16), {}),
    "rslora": (lambda d, b: write(d, b, use_rslora=True), {"use_rslora": True}),
    "alpha_float": (lambda d, b: write(d, b, lora_alpha=16.5), {"alpha": 16.5}),
    "unsloth_like": (lambda d, b: write(d, b, **UNSLOTH), {}),
}  # fmt: skip
"""Name of the case -> how it is made, and the settings that a run takes from it beside rank and alpha."""


def settings(adapter: Path, **lora: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {"lora": {"from_adapter": str(adapter), **lora}, "trainer": {"num_threads": 1}}
    )


@pytest.mark.parametrize("name", LOADS)
def test_version_0_has_the_bits_of_the_adapter_and_nobody_types_its_settings(
    name: str, tmp_path: Path, tiny_llama: Path
) -> None:
    make, expected = LOADS[name]
    adapter = make(tmp_path / "adapter", tiny_llama)
    config, _ = adopt_adapter(settings(adapter), (), tiny_llama)
    usual = {
        "rank": RANK, "alpha": ALPHA, "use_rslora": False, "target_modules": "all-linear",
        "rank_pattern": {}, "alpha_pattern": {},
    }  # fmt: skip
    assert {key: getattr(config.lora, key) for key in usual} == usual | expected

    run = RunDir(tmp_path / "run")
    copy_adapter(adapter, run.warm_start)
    started = resolved(tiny_llama, tmp_path, identity={"warm_start": run.warm_start})
    with lone_rank() as dist:
        published = adapter_tensors(load_policy(started, config, dist))
    given = matrices(adapter)
    assert len(published) == len(given)
    assert all(torch.equal(published[k], v) for k, v in zip(sorted(published), given, strict=True))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a rank that no matrix has": (
        {"rank_pattern": {"layers.1.self_attn.q_proj": 4}},
        r"q_proj\.lora_A\.weight of rank 8, but its adapter_config\.json says 4",
    ),
    "a pattern that is not a regex": ({"rank_pattern": {"q_proj(": 4}}, r"q_proj\(' is not a regex"),
    "an alpha of 0 for one module": ({"alpha_pattern": {"q_proj": 0}}, "alpha_pattern.*greater than 0"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "fully trained modules.*merge_and_unload"),
    "dora": ({"use_dora": True}, "DoRA adapter.*merge_and_unload"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
    "verl_alpha_zero": ({"lora_alpha": 0}, "lora_alpha 0.*Give --alpha"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_plain_lora_is_refused_with_what_to_do(
    name: str, tmp_path: Path, tiny_llama: Path
) -> None:
    peft, words = REFUSED[name]
    adapter = write(tmp_path / "adapter", tiny_llama, **peft)
    with pytest.raises(ModelError, match=f"(?s){words}"):
        adopt_adapter(settings(adapter), (), tiny_llama)


def test_the_alpha_that_verl_did_not_write_can_be_given(tmp_path: Path, tiny_llama: Path) -> None:
    adapter = write(tmp_path / "adapter", tiny_llama, lora_alpha=0)
    config, _ = adopt_adapter(settings(adapter, alpha=16), ("lora.alpha",), tiny_llama)
    assert (config.lora.alpha, config.lora.rank) == (16, RANK)


def test_trained_embeddings_and_heads_are_refused(tmp_path: Path, tiny_llama: Path) -> None:
    trained = base_tensor(tiny_llama, "model.embed_tokens") + 1e-3
    saved = with_tensor(write(tmp_path / "saved", tiny_llama), EMBEDDING, trained)
    with pytest.raises(ModelError, match=r"base_layer\.weight.*it was trained.*merge_and_unload"):
        adopt_adapter(settings(saved), (), tiny_llama)
    head = write(tmp_path / "head", tiny_llama, (*LAYERS, "lm_head"), target_modules="all-linear")
    with pytest.raises(ModelError, match=r"LM head.*train_unembed=False.*merge_and_unload"):
        adopt_adapter(settings(head), (), tiny_llama)


def test_a_pickle_that_holds_code_is_refused_and_does_not_run(tmp_path: Path, tiny_llama: Path) -> None:
    class Code:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    adapter = pickled(write(tmp_path / "adapter", tiny_llama))
    file = adapter / "adapter_model.bin"
    file.write_bytes(b"")
    with pytest.raises(ModelError, match="damaged or holds more than tensors"):
        read_warm_start(adapter)
    torch.save({"base_model.model.a.lora_A.weight": Code()}, file)
    with pytest.raises(ModelError, match="damaged or holds more than tensors, such as code"):
        read_warm_start(adapter)
    assert not (tmp_path / "ran").exists()


def test_a_folder_of_adapters_names_those_that_can_be_given(tmp_path: Path, tiny_llama: Path) -> None:
    write(tmp_path / "two" / "default", tiny_llama)
    shutil.copytree(tmp_path / "two" / "default", tmp_path / "two" / "ref")
    with pytest.raises(ModelError) as caught:
        read_warm_start(tmp_path / "two")
    named = caught.value.hint.split("--from-adapter ")[1].rstrip(".")
    assert read_warm_start(Path(named)).rank == RANK
    assert "default, ref" in caught.value.hint
    with pytest.raises(ModelError, match="hf download owner/name"):
        read_warm_start(Path("owner/name"))


def test_an_adapter_of_another_model_is_refused(tmp_path: Path, tiny_llama: Path) -> None:
    adapter = write(tmp_path / "adapter", tiny_llama, ("q_proj",))
    wide = renamed(shutil_copy(adapter, tmp_path / "wide"), lambda k: k.replace("q_proj", "down_proj"))
    with pytest.raises(ModelError, match=r"down_proj.*own base model"):
        adopt_adapter(settings(wide), (), tiny_llama)
    other = renamed(adapter, lambda k: k.replace("layers.1.", "layers.7."))
    with pytest.raises(ModelError, match=r"layers\.7\.self_attn\.q_proj, which .* does not have"):
        adopt_adapter(settings(other), (), tiny_llama)


def shutil_copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def test_settings_of_the_user_that_contradict_the_adapter_are_refused(
    tmp_path: Path, tiny_llama: Path
) -> None:
    adapter = write(tmp_path / "adapter", tiny_llama, ("q_proj", "v_proj"))
    with pytest.raises(ConfigError, match=r"rank 8, but this run uses 32"):
        adopt_adapter(settings(adapter), ("lora.rank",), tiny_llama)
    targets = {"target_modules": ["q_proj"]}
    with pytest.raises(ConfigError, match=r"leaves out model\.layers\.0\.self_attn\.v_proj"):
        adopt_adapter(settings(adapter, **targets), ("lora.target_modules",), tiny_llama)
    config, notes = adopt_adapter(settings(adapter, rank=4, **targets), (), tiny_llama)  # of a recipe
    assert (config.lora.rank, config.lora.target_modules) == (RANK, ["q_proj", "v_proj"])
    assert "lora.rank=8" in notes[0]
    assert adopt_adapter(TrainConfig(), (), tiny_llama) == (TrainConfig(), [])
    assert LoraConfig().target_modules == "all-linear"


def test_serving_such_names_is_refused_because_vllm_does_not_know_them(
    tmp_path: Path, tiny_llama: Path
) -> None:
    adapter = renamed(write(tmp_path / "adapter", tiny_llama), with_default)
    with pytest.raises(ModelError, match=r"lora_A\.default\.weight.*--from-adapter"):
        find_adapter(adapter, None)
    assert find_adapter(write(tmp_path / "usual", tiny_llama), None).rank == RANK
