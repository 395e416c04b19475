"""Generated bad inputs for commands: exit code 2 and one sentence, no traceback, hang or change on disk.

test_fuzz.py gives damaged files to every reader.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skylite.adapters.manifest import Manifest
from skylite.config.loading import read_run_config
from skylite.rollout.resume import plan_resume
from skylite.run.files import sha256_file
from skylite.run.own_folders import require_own_folders
from skylite.run.run_dir import RunDir
from tests.engines import write_random_adapter
from tests.rows import random_samples
from tests.settings import load_config
from tests.small_run import make_run
from tests.small_run import settings as run_settings
from tests.unit.bad_inputs import (
    ODD_VALUES,
    call,
    damaged_bytes,
    damaged_json,
    snapshot,
)
from tests.unit.fuzzing import FACTOR, accepted_or_refused, count, counts, generated, refused

PREPARE = "prepare rows.jsonl --question q --answer a --reward math --out data"
DRY_RUN = "train --recipe gsm8k_cpu --model model --run new --dry-run"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Iterator[Path]:
    """The working directory: data, a model, an adapter, and a run with a checkpoint and rollouts."""
    root = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        rows = "".join(json.dumps({"q": f"{i} + 1?", "a": str(i + 1)}) + "\n" for i in range(30))
        Path("rows.jsonl").write_text(rows)
        assert call(PREPARE.split()).code == 0
        shutil.copytree(tiny_llama, "model")
        write_random_adapter(Path("adapter"), Path("model"))
        config = run_settings(data={"path": str(root / "data")}, lora={"rank": 4, "alpha": 8})
        run = make_run(root / "run", root / "model", config, {1: random_samples(1)})
        run.checkpoint_path(1).mkdir()
        yield root
    assert counts["accepted"] < 0.5 * sum(counts.values())


BASE = {
    "num_steps": 3,
    "seed": 0,
    "data": {"path": "data", "difficulty": []},
    "lora": {
        "rank": 4,
        "alpha": 8,
        "target_modules": "all-linear",
        "exclude_modules": [],
        "lora_sync_path": "sync",
    },
    "rollout": {
        "prompts_per_step": 4,
        "group_size": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "max_completion_tokens": 16,
    },
    "reward": {"functions": ["math"], "weights": [1.0], "num_workers": 1},
    "algorithm": {"name": "grpo", "kl_coef": 0.0, "clip_eps_low": 0.2},
    "importance": {"mode": "truncate", "cap": 2.0},
    "optim": {"lr": 1e-3, "schedule": "constant", "max_grad_norm": 1.0},
    "engine": {"num_engines": 1, "kv_cache_gib": 0.25},
    "eval": {"split": "test", "limit": 4},
}


KEYS = [f"{s}.{k}" for s, v in BASE.items() if isinstance(v, dict) for k in v]
KEYS += ["num_steps", "seed", "lora", "", ".", "a.b.c", "lora.rnk"]


@generated(30)
@given(
    settings_=st.lists(
        st.tuples(
            st.sampled_from(KEYS) | st.text(max_size=8),
            st.sampled_from(ODD_VALUES).map(repr) | st.text(max_size=20),
        ),
        min_size=1,
        max_size=3,
    ),
    equals=st.sampled_from(["=", "=", "=", " = ", "", "=="]),
)
def test_set_values(project: Path, settings_: list[tuple[str, str]], equals: str) -> None:
    words = [word for k, v in settings_ for word in ("--set", f"{k}{equals}{v}")]
    refused([*DRY_RUN.split(), "--data", "data", *words], project)


def table_bytes(kind: str) -> bytes:
    rows = [{"q": f"{i} + 1?", "a": str(i + 1)} for i in range(12)]
    if kind == "jsonl":
        return "".join(json.dumps(r) + "\n" for r in rows).encode()
    if kind == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, ["q", "a"])
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


TABLES = {kind: table_bytes(kind) for kind in ("jsonl", "csv", "parquet")}


@generated(75)
@given(kind=st.sampled_from(sorted(TABLES)), data=st.data())
def test_data_files(project: Path, kind: str, data: st.DataObject) -> None:
    path = project / f"bad.{kind}"
    path.write_bytes(data.draw(damaged_bytes(TABLES[kind])))
    question = data.draw(st.sampled_from(["q", "q", "q", "a", "", "nosuch"]))
    reward = data.draw(st.sampled_from(["math", "math", "gsm8k", "nosuch", "x.py:f", "reasoning-gym", ""]))
    before = snapshot(project)
    reply = call(
        ["prepare", path.name, "--question", question, "--answer", "a", "--reward", reward, "--out", "fresh"]
    )
    count(reply.code, reply.output)
    shutil.rmtree(project / "fresh") if reply.code == 0 else None
    after = snapshot(project)
    assert {k: v for k, v in after.items() if k != "."} == before


def bad_adapter(project: Path, data: st.DataObject, damage: str) -> Path:
    """A damaged copy of the good adapter."""
    folder = project / "bad-adapter"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(project / "adapter", folder)
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    good = weights.read_bytes()
    if damage == "config":
        config.write_bytes(data.draw(damaged_json(json.loads(config.read_bytes()))))
    elif damage == "weights":
        weights.write_bytes(data.draw(damaged_bytes(good)))
    elif damage == "header":
        length = int.from_bytes(good[:8], "little")
        header = data.draw(damaged_json(json.loads(good[8 : 8 + length])))
        weights.write_bytes(len(header).to_bytes(8, "little") + header + good[8 + length :])
    elif damage == "pickle":
        weights.rename(
            folder
            / data.draw(st.sampled_from(["adapter_model.bin", "adapter_model.pt", "pytorch_model.bin"]))
        )
    else:
        (config if data.draw(st.booleans()) else weights).rename(folder / "other")
    return folder


MANIFEST: dict[str, Any] = {
    "version": 1,
    "step": 1,
    "parent": 0,
    "weights_sha256": "e9b9e2f6",
    "weights_bytes": 7,
    "base_model": "m",
    "base_fingerprint": "f",
    "rank": 4,
    "alpha": 8.0,
    "dtype": "float32",
    "target_modules": ["q_proj"],
    "canary": {"sequences": [[1, 2]], "policy_logprobs": [[-1.0]], "base_logprobs": [[-1.0]]},
}
DAMAGES = st.sampled_from(["config", "weights", "header", "pickle", "name"])


@generated(45)
@given(data=st.data(), damage=DAMAGES, has_manifest=st.booleans())
def test_adapter_folders_for_serve_and_eval(
    project: Path, data: st.DataObject, damage: str, has_manifest: bool
) -> None:
    """The adapter is checked first. Model and data are missing, so that vLLM never starts."""
    folder = bad_adapter(project, data, damage)
    if has_manifest:
        good = project / "adapter" / "adapter_model.safetensors"
        facts = {"weights_sha256": sha256_file(good), "weights_bytes": good.stat().st_size}
        manifest = Manifest.model_validate(MANIFEST | facts)
        (folder / "manifest.json").write_text(manifest.model_dump_json())
    is_told = damage in ("pickle", "name") or (has_manifest and damage in ("weights", "header"))
    for command in (
        ["serve", "bad-adapter", "--model", "nosuch"],
        ["eval", "bad-adapter", "--model", "nosuch", "--data", "nosuch"],
    ):
        output = refused(command, project)
        assert "nosuch" not in output or not is_told, output


@generated(45)
@given(data=st.data())
def test_run_configs(project: Path, data: st.DataObject) -> None:
    path = project / "run" / "config.json"
    good = path.read_bytes()
    try:
        path.write_bytes(data.draw(damaged_json(json.loads(good))))
        before = snapshot(project)
        run = RunDir(project / "run")
        accepted_or_refused(lambda: require_own_folders(run, read_run_config(path)))
        accepted_or_refused(lambda: plan_resume(run))
        config = snapshot(project).keys()
        assert config == before.keys()
        reply = call(["eval", "run", "--data", "nosuch"])
        count(reply.code, reply.output)
    finally:
        path.write_bytes(good)


def test_most_inputs_were_bad(project: Path) -> None:
    print(f"bad inputs: {counts['refused']} refused with a reason, {counts['accepted']} accepted as valid")
    assert counts["refused"] >= 200 * min(FACTOR, 1)
    assert load_config(None, {}, ()) is not None
