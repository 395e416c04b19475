"""Files between parent and trainer in a stranger's run: one sentence for each that is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skylite.config.loading import read_run_config
from skylite.errors import ConfigError
from skylite.rollout.replay import copy_for_replay
from skylite.rollout.resume import recover_metrics
from skylite.run.run_dir import RunDir
from skylite.trainer.canary import longest_prompt, read_canary, read_canary_image
from skylite.trainer.micro_batch_memory import recorded_tokens
from tests.logs import logged_messages
from tests.rows import random_samples, write_samples
from tests.small_run import make_run, settings

COUNTS = (None, "64", 0, -1, 1.5, True, [64], 10**290, 2**31)


def tokens(run: RunDir, value: Any) -> int:
    run.micro_batch_path.write_text(json.dumps({"tokens": value, "setting": "auto"}))
    return recorded_tokens(run, "auto")


def longest(run: RunDir, value: Any) -> int:
    run.canary_path.write_text(json.dumps({"longest_prompt_tokens": value}))
    return longest_prompt(run)


@pytest.mark.parametrize("read", [tokens, longest])
@pytest.mark.parametrize("value", COUNTS, ids=lambda value: str(value)[:12])
def test_a_count_that_is_none_is_refused(
    read: Callable[[RunDir, Any], int], value: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"json has \w+=.{1,60}, not a positive integer"):
        read(RunDir(tmp_path), value)
    assert read(RunDir(tmp_path), 64) == 64


def test_a_missing_count_is_refused(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.micro_batch_path.write_text('{"setting": "auto"}')
    with pytest.raises(ConfigError, match="has tokens=None"):
        recorded_tokens(run, "auto")
    assert recorded_tokens(run, 128) == 0, "it was made for another setting"


@pytest.mark.parametrize(
    "sequences", [None, 5, {}, [], [[]], [[1]], [1, 2], ["ab"], [[1, -2]], [[1, 2.0]], [[1, 2**40]]]
)
def test_a_canary_without_token_ids_is_refused(sequences: Any, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.canary_path.write_text(json.dumps({"sequences": sequences}))
    with pytest.raises(ConfigError, match="holds no sequences of token ids"):
        read_canary(run)
    run.canary_path.write_text('{"sequences": [[1, 2], [3, 4, 5]]}')
    assert read_canary(run) == [[1, 2], [3, 4, 5]]
    assert read_canary_image(run) is None


@pytest.mark.parametrize("image", [5, [], {}, {"start": "a", "length": 1, "data": "AAAA"}, {"data": "?"}])
def test_a_canary_with_a_damaged_picture_is_refused(image: Any, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.canary_path.write_text(json.dumps({"image": image}))
    with pytest.raises(ConfigError, match="holds a picture without a place"):
        read_canary_image(run)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("canary.json", None, "is not a skylite run: canary.json is missing"),
        ("canary.json", "[" * 100_000, "cannot be read as JSON: it is nested too deeply"),
        ("trainer_steps/step-000001.json", "{}", "has tokens_per_micro_batch=None"),
        ("micro_batch.json", "5", "holds int, not a JSON object"),
    ],
)
def test_a_replay_of_damaged_files_is_refused(
    name: str, text: str | None, reason: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", tmp_path / "model", settings(), {1: random_samples(1)})
    run.trainer_step_path(1).write_text('{"tokens_per_micro_batch": 64}')
    run.micro_batch_path.write_text('{"tokens": 64}')
    recorded = read_run_config(run.config_path)
    copy_for_replay(run, recorded, RunDir(tmp_path / "good"), 0, 1)
    (run.root / name).unlink()
    if text is not None:
        (run.root / name).write_text(text)
    with pytest.raises(ConfigError, match=reason):
        copy_for_replay(run, recorded, RunDir(tmp_path / "bad"), 0, 1)


@pytest.mark.parametrize(
    "update",
    [{"metrics": [1]}, {"metrics": {"loss": "x"}}, {"metrics": {"loss": {}}}, {"metrics": {}, "skipped": 1}],
    ids=str,
)
def test_metrics_that_are_no_numbers_are_unknown(update: dict[str, Any], tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for folder in (run.rollouts, run.trainer_steps):
        folder.mkdir()
    write_samples(run.rollout_path(1), random_samples(1))
    run.trainer_step_path(1).write_text(json.dumps(update))
    with logged_messages() as logged:
        (recovered,) = recover_metrics(run, 0, 1)
    assert "step-000001.json holds no metrics. The trainer's metrics of step 1 are unknown." in logged[0]
    assert "loss" not in recovered
    assert "anomaly/reason" not in recovered
    run.trainer_step_path(1).write_text('{"metrics": {"loss": 0.5}}')
    assert recover_metrics(run, 0, 1)[0]["loss"] == 0.5
