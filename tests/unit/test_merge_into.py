"""`skylite export --merge-into`: the adapter of a quantised base in the model that the base was made from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from skylite.errors import ConfigError, ModelError
from skylite.export.canary_check import flat, load_float32, model_logprobs
from skylite.export.original import check_shapes, check_weights
from skylite.export.plan import plan_export
from skylite.export.run import export
from skylite.hub.quantised import read_format
from skylite.hub.resolve import resolve_model
from skylite.run.run_dir import RunDir
from tests.quantised_models import FORMATS, quantise_model, write_model
from tests.tiny_models import make_tiny_model
from tests.unit.bad_inputs import call
from tests.unit.export_cases import CANARY, flags, make_run, record

MATRIX = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "plain", "qwen3")


@pytest.fixture(scope="module")
def run(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    root = tmp_path_factory.mktemp("nf4")
    return make_run(root, quantise_model(plain, root / "nf4", "nf4 nested"), scale=0.02)


def changed(plain: Path, folder: Path, name: str, change: float) -> Path:
    """The model with one tensor moved at random by `change` of its own size."""
    tensors = load_file(plain / "model.safetensors")
    noise = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(0))
    tensors[name] = tensors[name] + change * tensors[name].square().mean().sqrt() * noise
    return write_model(plain, folder, tensors, None)


def test_the_adapter_is_added_to_the_original_weights_as_peft_does(
    run: RunDir, plain: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    reply = call(["export", str(run.root), "--merge", "--merge-into", str(plain), "--out", str(out)])
    assert reply.code == 0
    shown = " ".join(reply.output.split())
    assert f"merging into {plain}" in shown
    assert "this is not the model that was trained: without the adapter its logprobs differ by" in shown

    merged, adapter = load_float32(out), run.default_adapters / "policy-v000002"
    reference = PeftModel.from_pretrained(load_float32(plain), str(adapter)).merge_and_unload()
    for name, weight in reference.state_dict().items():
        torch.testing.assert_close(merged.state_dict()[name], weight, atol=1e-7, rtol=0)
    moved = (merged.state_dict()[MATRIX] - load_file(plain / "model.safetensors")[MATRIX]).abs().max()
    assert moved > 0.001

    found = record(out)
    assert found["merged_into"] == str(plain)
    assert found["merged_into_fingerprint"] == resolve_model(str(plain)).fingerprint
    on_original, *others = found["checks"]
    base, policy = (torch.tensor(flat(model_logprobs(m, CANARY))) for m in (load_float32(plain), merged))
    canary = json.loads((adapter / "manifest.json").read_text())["canary"]
    start, trained = (torch.tensor(flat(canary[f"{k}_logprobs"])) for k in ("base", "policy"))
    kept = ((policy - base) * (trained - start)).sum() / (trained - start).square().sum()
    assert on_original["projection"] == pytest.approx(float(kept), abs=1e-3)
    assert 0.8 < float(kept) < 1.2
    assert on_original["gap_mean"] == pytest.approx(float((policy - trained).abs().mean()), abs=1e-5)
    assert [check["reference"] for check in others] == ["PEFT's on these weights"] * 2
    assert max(check["gap_max"] for check in others) < 1e-4
    assert "is merged into the one that it was made from, `plain`: near" in (out / "README.md").read_text()
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


def test_without_it_the_record_and_the_card_name_the_widened_weights(run: RunDir, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(plan_export(flags(run, out=out, merge=True)), launcher=None)
    found = record(out)
    assert found["merged_into"].startswith("the widened weights of ")
    assert found["merged_into"].endswith("nf4 (bitsandbytes NF4)")
    assert found["merged_into_fingerprint"] is None
    assert (
        "the widened weights of that quantised model: the model that was" in (out / "README.md").read_text()
    )
    assert record_of_adapter(run, tmp_path)["merged_into"] is None


def record_of_adapter(run: RunDir, root: Path) -> dict[str, object]:
    export(plan_export(flags(run, out=root / "adapter")), launcher=None)
    return record(root / "adapter")


def test_another_model_is_refused_and_nothing_is_written(run: RunDir, plain: Path, tmp_path: Path) -> None:
    tuned = changed(plain, tmp_path / "tuned", MATRIX, 0.1)
    plan = plan_export(flags(run, out=tmp_path / "out", merge=True, merge_into=str(tuned)))
    with pytest.raises(ModelError, match=rf"^tuned is not the model that nf4 was made .* % of {MATRIX} are"):
        export(plan, launcher=None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_knows_its_original_from_a_fine_tune(name: str, plain: Path, tmp_path: Path) -> None:
    base = quantise_model(plain, tmp_path / "base", name)
    check_shapes(base, plain)
    check_weights(base, plain)
    is_calibrated = "int" in name or name in ("gptq", "awq")
    other = changed(plain, tmp_path / "other", MATRIX, 1.0 if is_calibrated else 0.05)
    with pytest.raises(ModelError, match=rf"% of {MATRIX} are further away"):
        check_weights(base, other)
    with pytest.raises(ModelError, match=r"norm\.weight is not quantised, and differs"):
        check_weights(base, changed(plain, tmp_path / "scaled", "model.norm.weight", 0.01))


def test_a_base_whose_other_tensors_were_rounded_has_its_original(plain: Path, tmp_path: Path) -> None:
    base = quantise_model(plain, tmp_path / "base", "nf4")
    tensors = load_file(base / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"model.embed_tokens.weight": embedding.bfloat16()}, base / "model.safetensors")
    check_weights(base, plain)


def test_what_cannot_be_the_original_is_refused_before_anything_is_loaded(
    run: RunDir, plain: Path, tmp_path: Path
) -> None:
    nf4 = str(run.root.parent / "nf4")
    with pytest.raises(ModelError, match=r"^nf4 is quantised, too \(bitsandbytes NF4\)"):
        plan_export(flags(run, merge=True, merge_into=nf4))
    tensors = load_file(plain / "model.safetensors")
    short = write_model(plain, tmp_path / "short", tensors | {MATRIX: tensors[MATRIX][:100]}, None)
    with pytest.raises(
        ModelError, match=r"up_proj\.weight has the shape \[100, 64\] there, and \[128, 64\] in"
    ):
        plan_export(flags(run, merge=True, merge_into=str(short)))
    del tensors[MATRIX]
    lacking = write_model(plain, tmp_path / "lacking", tensors, None)
    with pytest.raises(ModelError, match=r"up_proj\.weight has the shape none there"):
        plan_export(flags(run, merge=True, merge_into=str(lacking)))
    with pytest.raises(ConfigError, match="--merge-into x is for merged weights"):
        plan_export(flags(run, merge_into="x"))
    of_plain = make_run(tmp_path / "plain", plain)
    with pytest.raises(ModelError, match="plain is not quantised, and --merge-into is for a quantised base"):
        plan_export(flags(of_plain, merge=True, merge_into=str(plain)))


def test_half_a_step_of_fp8_grows_with_the_number() -> None:
    form = read_format(FORMATS["fp8 tensor"][0], "m")
    numbers = [0.0, 2.0**-9, 2.0**-6, 1.0, -3.5, 448.0]
    parts = {"weight": torch.tensor([numbers]).to(torch.float8_e4m3fn), "weight_scale": torch.tensor([2.0])}
    expected = [2.0**-10, 2.0**-10, 2.0**-10, 1 / 16, 1 / 8, 16.0]
    assert form.half_step(parts).tolist() == [[2 * step for step in expected]]


def test_half_a_step_of_4_bits_is_half_the_wider_gap() -> None:
    form = read_format(FORMATS["nf4"][0], "m")
    state = json.dumps({"shape": [1, 4], "blocksize": 2}).encode()
    parts = form.prepare("m", {
        "weight": torch.tensor([[0x01], [0xFE]], dtype=torch.uint8),
        "weight.quant_map": torch.tensor([0.0, 1.0, 3.0, *range(4, 17)]),
        "weight.absmax": torch.tensor([2.0, 4.0]),
        form.parts[3]: torch.tensor(list(state), dtype=torch.uint8),
    })  # fmt: skip
    assert form.half_step(parts).tolist() == [[1.0, 2.0, 2.0, 2.0]]
