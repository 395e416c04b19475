"""Prompts with images: from a parquet file to two steps on real vLLM, checked by the trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from skylite.adapters.manifest import read_manifest
from skylite.run.rollout_file import read_examples
from tests.e2e.project import Project
from tests.e2e.running import DEADLINE_S
from tests.pictures import picture
from tests.tiny_models import IMAGE_TOKEN, make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.dist]


def rows() -> list[dict[str, object]]:
    """As verl writes them; every third row has two images."""
    return [
        {
            "prompt": [{"role": "user", "content": "<image>" * (1 + (i % 3 == 0)) + f"How many? {i}"}],
            "images": [
                {"bytes": picture(10 * i + k, 24 + 4 * (i % 5), 32 - 4 * k, form), "path": None}
                for k, form in enumerate(["PNG", "JPEG"][: 1 + (i % 3 == 0)])
            ],
            "answer": str(i % 7),
        }
        for i in range(24)
    ]


def test_a_vision_model_trains_on_images(project: Project, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(rows()), tmp_path / "shapes.parquet")
    names = ("--question", "prompt", "--answer", "answer", "--reward", "exact_match")
    done = project.run("prepare", str(tmp_path / "shapes.parquet"), *names, timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr

    own = replace(project, model=make_tiny_model(tmp_path / "qwen3_vl", "qwen3_vl"))
    own_run = str(tmp_path / "run")
    args = (
        "--data",
        "data/shapes",
        "--set",
        "eval.limit=0",
        "--set",
        'reward.functions=["reward.py:letters"]',
    )
    other = replace(project, model=make_tiny_model(tmp_path / "gemma3_vl", "gemma3_vl"))
    refused = other.run(*other.train_args(own_run, 2, *args, "--dry-run"), timeout_s=DEADLINE_S)
    assert refused.returncode == 2
    assert "skylite trains Qwen2.5-VL and Qwen3-VL on images, not gemma3_vl" in refused.stderr.replace(
        "\n", " "
    )

    unfrozen = ("--set", "lora.freeze_vision=false", "--set", "lora.freeze_projection=false")
    done = own.run(*own.train_args(own_run, 2, *args, *unfrozen), timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert "prompts have up to 2 image(s)" in done.stderr.replace("\n", " ")
    lines = own.metrics(own_run)
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["mismatch/judged_gap"] < 1e-5, "sampled with these images, at these positions"
        assert line["canary/gap_max"] < 1e-4
    assert lines[-1]["tokens/unique"] < 0.6 * lines[-1]["tokens/total"], "groups share their images"
    examples = read_examples(tmp_path / "run" / "rollouts" / "step-000002.parquet")
    assert all(e.images for e in examples)
    assert all(e.token_ids[i.start] == IMAGE_TOKEN for e in examples for i in e.images)
    adapter = tmp_path / "run" / "adapters" / "policy-v000002"
    trained = {n: t for n, t in load_file(adapter / "adapter_model.safetensors").items() if "lora_B" in n}
    assert {n.split(".")[4] for n in trained if ".visual." in n} == {
        "blocks",
        "merger",
        "deepstack_merger_list",
    }
    assert all(tensor.abs().max() > 0 for tensor in trained.values())
    assert read_manifest(adapter).canary.image is not None, "engines are verified with a picture"
    merged = own.run("export", own_run, "--merge", "--out", str(tmp_path / "merged"), timeout_s=DEADLINE_S)
    assert merged.returncode == 0, merged.stderr
    own_weights, base = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", own.model)
    )
    assert own_weights.keys() == base.keys()
    name = "model.visual.blocks.0.attn.qkv.weight"
    assert (own_weights[name] - base[name]).abs().max() > 0
    served = own.run("serve", own_run, timeout_s=DEADLINE_S)
    assert served.returncode == 2
    assert "has LoRA on the tower that reads images" in served.stderr.replace("\n", " ")
