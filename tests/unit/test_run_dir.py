"""Names and places of everything in a run. Other programs and older runs rely on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from skylite.config.loading import read_run_config
from skylite.errors import ConfigError
from skylite.run.run_dir import (
    AdapterVersion,
    RunDir,
    adapter_name,
    numbered_paths,
    published_versions,
    sampling_version,
)
from tests.small_run import make_run, settings


def test_every_path_of_a_run() -> None:
    run = RunDir(Path("/r"))
    found = {
        name: str(getattr(run, name))
        for name in dir(run)
        if isinstance(getattr(type(run), name, None), property)
    }
    assert found == {
        "config_path": "/r/config.json", "status_path": "/r/status.json", "metrics_path": "/r/metrics.jsonl",
        "events_path": "/r/events.jsonl", "canary_path": "/r/canary.json",
        "held_out_path": "/r/held_out.parquet",
        "micro_batch_path": "/r/micro_batch.json", "stop_path": "/r/stop",
        "trainer_turn_path": "/r/trainer_turn.json", "rendezvous": "/r/rendezvous",
        "trainer_error_path": "/r/logs/trainer-error.json", "rollouts": "/r/rollouts",
        "trainer_steps": "/r/trainer_steps", "checkpoints": "/r/checkpoints", "logs": "/r/logs",
        "evals": "/r/evals", "rejected_steps": "/r/rejected_steps", "warm_start": "/r/warm_start",
        "default_adapters": "/r/adapters",
        "machine_path": "/r/machine.json", "loggers": "/r/loggers", "exports": "/r/exports",
        "teacher": "/r/teacher", "prompt_history_path": "/r/prompt_history.jsonl",
    }  # fmt: skip
    assert str(run.rollout_path(12)) == "/r/rollouts/step-000012.parquet"
    assert str(run.trainer_step_path(0)) == "/r/trainer_steps/step-000000.json"
    assert str(run.checkpoint_path(1234567)) == "/r/checkpoints/step-1234567"
    assert str(run.log_path("engine-0")) == "/r/logs/engine-0.log"


def test_an_adapter_is_named_by_its_version() -> None:
    adapter = AdapterVersion(12, Path("/a/policy-v000012"))
    assert adapter.name == adapter_name(12) == "policy-v000012"
    assert str(adapter.manifest_path) == "/a/policy-v000012/manifest.json"
    assert str(adapter.weights_path) == "/a/policy-v000012/adapter_model.safetensors"
    assert AdapterVersion(2, Path("/z")) < AdapterVersion(10, Path("/a"))


@pytest.mark.parametrize(
    ("step", "staleness", "version"), [(1, 0, 0), (2, 0, 1), (9, 0, 8), (1, 1, 0), (2, 1, 0), (3, 1, 1)]
)
def test_the_version_that_a_step_is_sampled_from(step: int, staleness: int, version: int) -> None:
    assert sampling_version(step, staleness) == version


def test_numbered_paths_come_in_order_and_other_names_are_ignored(tmp_path: Path) -> None:
    for name in (
        "step-000010",
        "step-000002",
        "step-1000000",
        "step-10",
        "step-0000003",
        "step-000004x",
        "s",
    ):
        (tmp_path / name).mkdir()
    assert list(numbered_paths(tmp_path, "step-")) == [2, 10, 1000000]
    assert numbered_paths(tmp_path, "step-")[10] == tmp_path / "step-000010"
    assert numbered_paths(tmp_path / "missing", "step-") == {}
    (tmp_path / "policy-v000001").mkdir()
    (tmp_path / "policy-v000003").touch()
    (tmp_path / "policy-v000002").symlink_to("policy-v000001")
    assert published_versions(tmp_path) == [AdapterVersion(1, tmp_path / "policy-v000001")]


def test_the_default_adapters_move_with_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tmp_path / "model", settings(), {})
    recorded = read_run_config(run.config_path)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert RunDir(tmp_path / "moved").adapters(recorded) == tmp_path / "moved" / "adapters"
    chosen = recorded.model_copy(update={"config": settings(lora={"lora_sync_path": "sync"})})
    assert RunDir(tmp_path / "moved").adapters(chosen) == tmp_path / "run" / "adapters"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "is not a skylite run: x.json is missing"),
        ("{", "cannot be read as JSON"),
        ("[]", "holds list"),
    ],
)
def test_a_bad_json_file_of_a_run_is_named(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        RunDir(tmp_path).read_json(tmp_path / "x.json")
