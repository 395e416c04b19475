"""Files from strangers: deep nesting, wrong types and long files give one sentence each, within seconds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from skylite.adapters.import_adapter import read_warm_start
from skylite.adapters.manifest import read_manifest
from skylite.config.loading import read_recipe, read_run_config
from skylite.config.provenance import parse_value
from skylite.data.prompts import FOOTER_KEY, PromptFileInfo, read_prompts, write_rows
from skylite.data.raw_rows import read_table
from skylite.errors import SkyliteError
from skylite.hub.resolve import check_folder, safetensors_header
from skylite.rollout.session import read_events
from skylite.run.checkpoint_folder import verify_checkpoint
from skylite.run.metrics_file import read_metrics
from skylite.run.rollout_file import read_rollouts, write_rollouts
from skylite.run.run_dir import RunDir
from skylite.run.status import read_status
from tests.rows import groups_of, random_samples
from tests.settings import load_config
from tests.unit.data_cases import prompt
from tests.unit.run_cases import make_model

DEEP = 200_000
NESTED = '{"step": ' * DEEP
TENSOR = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def footer(**changes: Any) -> dict[str, Any]:
    info = PromptFileInfo(
        dataset="t", source_kind="file", source="t", source_sha256="", count=1, seed=0, split="train",
        reward="gsm8k", system="", few_shot=[],
    )  # fmt: skip
    return asdict(info) | changes


def prompt_file(path: Path, raw: bytes) -> Path:
    write_rows(path, [prompt()], PromptFileInfo(**footer()))
    table = pq.read_table(path).replace_schema_metadata({FOOTER_KEY: raw})
    pq.write_table(table, path)
    return path


def safetensors(path: Path, header: str) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))
    return path


READERS = {
    "config.json": read_run_config,
    "recipe.toml": read_recipe,
    "status.json": read_status,
    "metrics.jsonl": read_metrics,
    "rows.jsonl": read_table,
    "run.json": lambda path: RunDir(path.parent).read_json(path),
    "manifest.json": lambda path: read_manifest(path.parent),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    "text", [NESTED, "[" * DEEP, 'a = {"b" = ' * 2000, "a = " + "[" * DEEP, f'{{"step": {"9" * 5000}}}']
)
def test_deep_nesting_and_long_numbers_are_sentences(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text + "\n")
    with pytest.raises(SkyliteError, match=str(tmp_path)):
        READERS[name](path)


def test_deep_settings_are_sentences_or_text() -> None:
    with pytest.raises(SkyliteError):
        load_config(None, {}, [f"lora.rank={'[' * DEEP}"])
    assert isinstance(parse_value("[" * DEEP), str)
    assert isinstance(parse_value("9" * 6000), str)


def test_deep_events_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(NESTED + '\n{"event": "x"}\n')
    assert read_events(path) == [{"event": "x"}]


@pytest.mark.parametrize(
    "header",
    [
        NESTED,
        json.dumps({"a": {"dtype": "F32", "data_offsets": [0, 4]}}),
        json.dumps({"a": TENSOR | {"shape": None}}),
        json.dumps({"a": TENSOR | {"shape": ["x", "y"]}}),
        json.dumps({"a": TENSOR | {"shape": [-1, 1]}}),
        json.dumps({"a": TENSOR | {"shape": 4}}),
        json.dumps({"a": TENSOR | {"data_offsets": [0, "4"]}}),
        json.dumps({"a": TENSOR | {"data_offsets": [0]}}),
        json.dumps({"a": 4}),
        json.dumps([1]),
    ],
)
def test_a_bad_tensor_header_is_a_sentence(header: str, tmp_path: Path) -> None:
    with pytest.raises(SkyliteError, match=r"model\.safetensors is not a safetensors file"):
        safetensors_header(safetensors(tmp_path / "model.safetensors", header))


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json", "adapter_model.safetensors"])
def test_deep_files_of_models_and_adapters_are_sentences(name: str, tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    folder = tmp_path / "model"
    if name.startswith("adapter"):
        (folder / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1})
        )
        safetensors(folder / "adapter_model.safetensors", json.dumps({"a": TENSOR}))
    if name.endswith("safetensors"):
        safetensors(folder / name, NESTED)
    else:
        (folder / name).write_text(NESTED)
    with pytest.raises(SkyliteError, match=str(folder)):
        read_warm_start(folder) if name.startswith("adapter") else check_folder(folder, "")


def test_a_deep_checkpoint_manifest_is_a_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "step-000001"
    folder.mkdir()
    (folder / "manifest.json").write_text(NESTED)
    with pytest.raises(SkyliteError, match="is damaged"):
        verify_checkpoint(folder)


@pytest.mark.parametrize(
    "raw",
    [
        NESTED.encode(),
        json.dumps(footer(reward=5)).encode(),
        json.dumps(footer(reward=["gsm8k"])).encode(),
        json.dumps(footer(source_kind=[])).encode(),
        json.dumps(footer(few_shot="x")).encode(),
        json.dumps(footer(few_shot=[{"role": "user"}])).encode(),
        json.dumps(footer(split={})).encode(),
        json.dumps(footer(limit="x")).encode(),
        json.dumps(footer(count="1")).encode(),
        json.dumps([footer()]).encode(),
        json.dumps("schema_version").encode(),
        b"\xff",
    ],
)
def test_a_bad_footer_is_a_sentence(raw: bytes, tmp_path: Path) -> None:
    with pytest.raises(SkyliteError, match="has a damaged footer"):
        read_prompts(prompt_file(tmp_path / "train.parquet", raw))


@pytest.mark.parametrize("where", ["answer", "value"])
@pytest.mark.parametrize("reader", ["prompts", "rows", "rollouts"])
def test_parquet_whose_names_or_texts_are_not_utf8_is_a_sentence(
    reader: str, where: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.parquet"
    if reader == "rollouts":
        groups = groups_of(random_samples(1))
        write_rollouts(path, [replace(g, prompt=replace(g.prompt, answer="value")) for g in groups])
    else:
        write_rows(path, [prompt(answer="value")], PromptFileInfo(**footer()))
    # Uncompressed, so that the text is there as it is. The Arrow schema would repeat the names in base64.
    table = pq.read_table(path)
    pq.write_table(table, path, compression="none", use_dictionary=False, store_schema=False)
    path.write_bytes(path.read_bytes().replace(where.encode(), b"\xf3" + where.encode()[1:]))
    readers: dict[str, Callable[[Path], object]] = {
        "prompts": read_prompts,
        "rows": read_table,
        "rollouts": read_rollouts,
    }
    with pytest.raises(SkyliteError, match=str(path)):
        readers[reader](path)


@pytest.mark.parametrize("value", [7, "LlamaForCausalLM", {"LlamaForCausalLM": 1}, [["x"]], True])
def test_architectures_that_are_no_list_of_names_are_a_sentence(value: Any, tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"architectures": value}))
    with pytest.raises(SkyliteError, match=r"is not a causal language model: its config\.json names"):
        check_folder(tmp_path / "model", "")


@pytest.mark.parametrize("extra", [NESTED, "[]", "7"])
def test_a_bad_extra_is_a_sentence(extra: str, tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    write_rows(path, [prompt()], PromptFileInfo(**footer()))
    table = pq.read_table(path)
    position = table.schema.get_field_index("extra")
    pq.write_table(table.set_column(position, table.schema.field(position), [[extra]]), path)
    with pytest.raises(SkyliteError, match="row 1 has no JSON object in column 'extra'"):
        read_prompts(path)


def test_long_metrics_are_read_in_linear_time(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {n}}}\n' for n in [*range(15000), *range(7000, 30000)]))
    started = time.process_time()
    assert [m["step"] for m in read_metrics(path)] == list(range(30000))
    assert time.process_time() - started < 5
