"""Every reader of files that can come from strangers, with a good file for it."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from skylite.adapters.import_adapter import read_warm_start
from skylite.adapters.manifest import read_manifest
from skylite.config.loading import read_run_config
from skylite.data.chat_tokenizer import load_tokenizer
from skylite.data.prompts import FOOTER_KEY, read_prompts
from skylite.hub.resolve import check_folder, safetensors_header, tensor_shapes
from skylite.run.metrics_file import null_to_nan, read_metrics
from skylite.run.rollout_file import mean_reward, read_rollouts, write_rollouts
from skylite.run.status import Status, read_status, write_status
from tests.fuzz.damage import BYTE_KINDS, damaged_bytes, damaged_document, damaged_toml, damaged_yaml
from tests.fuzz.reader import Damage, Reader, copy, document, lines, prepare_nothing, read_all
from tests.fuzz.row_readers import ROW_READERS
from tests.fuzz.run_readers import METRICS, RUN_READERS
from tests.rows import groups_of, random_samples
from tests.settings import load_config
from tests.small_run import settings
from tests.tiny_models import make_tiny_model
from tests.unit.run_cases import begin, make_adapter, write_data

WEIGHTS = hashlib.sha256(b"weights").hexdigest()
MANIFEST = {
    "version": 1, "step": 1, "parent": 0, "weights_sha256": WEIGHTS, "weights_bytes": 7, "base_model": "m",
    "base_fingerprint": "f", "rank": 4, "alpha": 8.0, "dtype": "float32", "target_modules": ["q_proj"],
    "canary": {"sequences": [[1, 2, 3]], "policy_logprobs": [[-1.0, -2.0]], "base_logprobs": [[-1.0, -2.0]]},
}  # fmt: skip
RECIPE = settings().model_dump(mode="json", exclude_none=True)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json")


def _recipe(folder: Path, chosen: random.Random, kind: str) -> None:
    (folder / "recipe.toml").write_bytes(damaged_toml(chosen, RECIPE, kind))


def _yaml_recipe(folder: Path, chosen: random.Random, kind: str) -> None:
    (folder / "recipe.yaml").write_bytes(damaged_yaml(chosen, RECIPE, kind))


def _safetensors(folder: Path, chosen: random.Random, kind: str) -> None:
    """Damage to the header, with a length that fits, or to the bytes of the file."""
    good = (folder / "good-adapter_model.safetensors").read_bytes()
    size = int.from_bytes(good[:8], "little")
    if kind in BYTE_KINDS:
        raw = damaged_bytes(chosen, good, kind)
    else:
        header = damaged_document(chosen, json.loads(good[8 : 8 + size]), kind)
        raw = len(header).to_bytes(8, "little") + header + good[8 + size :]
    for name in ("model.safetensors", "adapter_model.safetensors"):
        (folder / name).write_bytes(raw)


def _parquet(name: str) -> Damage:
    """Damage to the footer's JSON, to a column, or to the bytes of the file."""

    def damage(folder: Path, chosen: random.Random, kind: str) -> None:
        good = folder / f"good-{name}"
        if kind in BYTE_KINDS:
            (folder / name).write_bytes(damaged_bytes(chosen, good.read_bytes(), kind))
            return
        table = pq.read_table(good)
        info = (table.schema.metadata or {}).get(FOOTER_KEY)
        if info is not None and chosen.random() < 0.5:
            footer = damaged_document(chosen, json.loads(info), kind)
            table = table.replace_schema_metadata({FOOTER_KEY: footer})
        else:
            table = _other_column(table, chosen, kind)
        pq.write_table(table, folder / name)

    return damage


def _other_column(table: pa.Table, chosen: random.Random, kind: str) -> pa.Table:
    column = chosen.choice(table.column_names)
    position = table.schema.get_field_index(column)
    if kind == "removed":
        return table.drop_columns([column])
    if kind == "nesting":
        return table.set_column(position, column, pa.array(["[" * 100_000] * table.num_rows))
    if kind == "huge integer":
        return table.set_column(position, column, pa.array([2**63 - 1] * table.num_rows))
    values = chosen.choice([[None], [float("nan")], [""], [[1]], [{"a": 1}], [b"\xff"], [True]])
    return table.set_column(position, column, pa.array(values * table.num_rows))


def _tokenizer(folder: Path, chosen: random.Random, kind: str) -> None:
    for name in TOKENIZER_FILES:
        copy(folder, f"good-{name}", name)
    document(chosen.choice(TOKENIZER_FILES))(folder, chosen, kind)


def _prepare_run(folder: Path) -> None:
    begin(folder)
    copy(folder, "run/config.json", "good-config.json")


def _prepare_adapter(folder: Path) -> None:
    make_adapter(folder / "a", "base")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        copy(folder, f"a/{name}", name)
        copy(folder, f"a/{name}", f"good-{name}")


def _prepare_prompts(folder: Path) -> None:
    write_data(folder, 5)
    copy(folder, "train.parquet", "good-train.parquet")


def _prepare_rollouts(folder: Path) -> None:
    write_rollouts(folder / "good-step.parquet", groups_of(random_samples(1)))


def _prepare_manifest(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"weights")


def _prepare_status(folder: Path) -> None:
    status = Status(phase="done", step=3, num_steps=3, adapter_version=3, pids={"trainer": 5})
    write_status(folder / "good-status.json", status)


def _prepare_model(folder: Path) -> None:
    make_tiny_model(folder)
    for name in TOKENIZER_FILES:
        if not (folder / name).exists():
            (folder / name).write_text('{"eos_token_id": 0}')
        copy(folder, name, f"good-{name}")


def _read_model(folder: Path) -> None:
    check_folder(folder, "")
    tokenizer = load_tokenizer(folder)
    try:
        tokenizer.encode_chats([[{"role": "user", "content": "1 + 1?"}]])
    finally:
        tokenizer.close()


READERS = {
    "config.json": Reader(
        _prepare_run, document("config.json"), lambda f: read_run_config(f / "config.json")
    ),
    "recipe": Reader(prepare_nothing, _recipe, lambda f: load_config(f / "recipe.toml", {})),
    "YAML recipe": Reader(prepare_nothing, _yaml_recipe, lambda f: load_config(f / "recipe.yaml", {})),
    "manifest": Reader(
        _prepare_manifest,
        document("manifest.json", MANIFEST),
        read_all(read_manifest, lambda f: read_manifest(f, verify_hash=False)),
    ),
    "adapter_config": Reader(_prepare_adapter, document("adapter_config.json"), read_warm_start),
    "safetensors": Reader(
        _prepare_adapter,
        _safetensors,
        read_all(read_warm_start, tensor_shapes, lambda f: safetensors_header(f / "model.safetensors")),
    ),
    "prompts.parquet": Reader(
        _prepare_prompts, _parquet("train.parquet"), lambda f: read_prompts(f / "train.parquet")
    ),
    "rollouts": Reader(
        _prepare_rollouts,
        _parquet("step.parquet"),
        read_all(lambda f: read_rollouts(f / "step.parquet"), lambda f: mean_reward(f / "step.parquet")),
    ),
    "metrics": Reader(
        prepare_nothing,
        lines("metrics.jsonl", METRICS),
        lambda f: [null_to_nan(m) for m in read_metrics(f / "metrics.jsonl")],
    ),
    "status": Reader(
        _prepare_status, document("status.json"), lambda f: asdict(read_status(f / "status.json"))
    ),
    "tokenizer": Reader(_prepare_model, _tokenizer, _read_model, share=0.1),
    **ROW_READERS,
    **RUN_READERS,
}
