"""Bad input: exit code 2, one clear sentence, no traceback, nothing written."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from tests.e2e.project import Project
from tests.engines import write_random_adapter
from tests.unit.bad_inputs import call

pytestmark = pytest.mark.e2e


def refused(project: Project, *args: str) -> str:
    """What `skylite ARGS` prints, after checking that it exits with 2 and without a traceback."""
    with contextlib.chdir(project.root):
        reply = call(args)
    assert reply.code == 2, reply
    assert "Traceback" not in reply.output
    return reply.output


def test_unknown_settings_and_bad_values_all_at_once(project: Project) -> None:
    message = refused(
        project,
        *project.train_args(
            "x", 1, "--set", "lora.rnk=3", "--set", "algorithm.clip_eps_low=7", "--set", "lora.use_dora=true"
        ),
    )
    for part in ("did you mean rank?", "clip_eps_low", "DoRA"):
        assert part in message
    assert not (project.root / "x").exists()


@pytest.mark.parametrize("content", [b"not parquet at all", b"PAR1\x00\x00PAR1", b""])
def test_a_malformed_parquet_file(project: Project, tmp_path: Path, content: bytes) -> None:
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.parquet").write_bytes(content)
    assert "parquet" in refused(
        project,
        "train",
        "--recipe",
        "gsm8k_cpu",
        "--data",
        str(tmp_path),
        "--model",
        str(project.model),
        "--run",
        "x",
    )
    assert not (project.root / "x").exists()


def test_a_broken_jsonl_line_is_named(project: Project, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"q": "1+1", "a": "2"}\n{"q": "broken\n')
    message = refused(
        project,
        "prepare",
        str(bad),
        "--question",
        "q",
        "--answer",
        "a",
        "--reward",
        "math",
        "--out",
        str(tmp_path / "out"),
    )
    assert "bad.jsonl, line 2" in message or "bad.jsonl:2" in message or "line 2" in message
    assert not (tmp_path / "out").exists()


def test_a_broken_recipe(project: Project, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text("num_steps = = 3")
    assert "not valid TOML" in refused(project, "train", "--recipe", str(tmp_path / "r.toml"))
    assert "no bundled recipe 'nosuch'" in refused(project, "train", "--recipe", "nosuch")


@pytest.mark.parametrize(
    "damage", ["no config", "broken config", "no weights", "truncated weights", "not causal", "no tokenizer"]
)
def test_a_damaged_model_folder(project: Project, tmp_path: Path, damage: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in project.model.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    if damage == "no config":
        (model / "config.json").unlink()
    elif damage == "broken config":
        (model / "config.json").write_text("{")
    elif damage == "no weights":
        (model / "model.safetensors").unlink()
    elif damage == "truncated weights":
        content = (model / "model.safetensors").read_bytes()
        (model / "model.safetensors").write_bytes(content[: len(content) // 2])
    elif damage == "not causal":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(
            json.dumps(config | {"architectures": ["LlamaForSequenceClassification"]})
        )
    else:
        (model / "tokenizer.json").unlink()
    message = refused(
        project,
        "train",
        "--recipe",
        "gsm8k_cpu",
        "--data",
        "data",
        "--set",
        "data.difficulty=[]",
        "--model",
        str(model),
        "--run",
        "x",
    )
    assert str(model) in message
    assert not (project.root / "x").exists()


def test_a_damaged_adapter_folder(project: Project, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    assert "not a skylite run" in refused(project, "eval", str(adapter))
    (adapter / "adapter_config.json").write_text("{}")
    assert "adapter_model.safetensors is missing" in refused(project, "serve", str(adapter))
    (adapter / "adapter_model.safetensors").touch()
    assert "not a PEFT LoRA configuration" in refused(project, "eval", str(adapter), "--data", "data")
    assert "not a PEFT LoRA configuration" in refused(project, "serve", str(adapter))


def test_eval_needs_something_to_evaluate(project: Project) -> None:
    assert "runs holds none" in refused(project, "eval")


def test_resume_takes_no_other_settings(project: Project) -> None:
    assert "--recipe was given too" in refused(project, "train", "--resume", "run", "--recipe", "gsm8k")
    assert "--resume is missing" in refused(project, *project.train_args("x", 1, "--at", "3"))
    assert "not a skylite run" in refused(project, "train", "--resume", "data")


def test_a_warm_start_that_does_not_fit(project: Project, tmp_path: Path) -> None:
    adapter = write_random_adapter(tmp_path / "adapter", project.model, rank=4)
    message = refused(project, *project.train_args("x", 1, "--from-adapter", str(adapter)))
    assert "rank 4, but this run uses 8" in message
    assert "not an adapter folder" in refused(
        project, *project.train_args("x", 1, "--from-adapter", str(tmp_path))
    )
    assert "cannot be combined" in refused(
        project, "train", "--resume", "run", "--from-adapter", str(adapter)
    )
    assert not (project.root / "x").exists()


def test_a_dry_run_starts_and_writes_nothing(project: Project) -> None:
    done = project.run(*project.train_args("dry", 3, "--dry-run"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_steps"] == 3
    assert not (project.root / "dry").exists()
