"""metrics.jsonl and status.json: only complete lines and files are read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from skylite.errors import ConfigError, DataError
from skylite.run.metrics_file import append_metrics, read_metrics
from skylite.run.status import Status, read_status, write_status


def test_lines_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    append_metrics(path, {"step": 1, "reward/mean": 0.5})
    append_metrics(path, {"step": 2, "reward/mean": 0.625})
    assert read_metrics(path) == [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.625}]


def test_an_incomplete_last_line_is_ignored_and_the_next_line_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_metrics(path, {"step": 1})
    with path.open("a") as stream:
        stream.write('{"step": 2, "rew')
    assert read_metrics(path) == [{"step": 1}]
    append_metrics(path, {"step": 2})
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]


def test_steps_repeated_after_a_resume_count_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step, value in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.4)):
        append_metrics(path, {"step": step, "value": value})
    assert read_metrics(path) == [{"step": 1, "value": 0.1}, {"step": 2, "value": 0.4}]


def test_nan_and_infinity_become_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_metrics(path, {"step": 1, "a": float("nan"), "b": float("inf"), "c": 1.5})
    assert json.loads(path.read_text()) == {"step": 1, "a": None, "b": None, "c": 1.5}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 2 is not JSON"),
        ("[1]", "line 2 is not a JSON object"),
        ('{"a": 1}', "line 2 is not a JSON object"),
    ],
)
def test_any_other_damage_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(DataError, match=message):
        read_metrics(path)


def test_a_status_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    status = Status(phase="training", step=3, num_steps=24, adapter_version=2, pids={"trainer": 17})
    write_status(path, status)
    assert read_status(path) == status
    write_status(path, replace(status, phase="failed", error="why", pids={}))
    assert read_status(path).error == "why"
    path.write_text('{"phase": "tr')
    with pytest.raises(ConfigError, match=r"status\.json is not a valid run status"):
        read_status(path)
