"""metrics.jsonl and status.json: only complete lines and files are read."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from skylite.errors import ConfigError, DataError
from skylite.rollout.session import append_event, read_events
from skylite.run.metrics_file import append_metrics, null_to_nan, read_metrics, write_metrics
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


@pytest.mark.parametrize(
    "wrong",
    [
        {"phase": "idle"}, {"phase": None}, {"step": "3"}, {"step": True}, {"num_steps": 2.0},
        {"adapter_version": "1"}, {"pids": {"a": "1"}}, {"pids": [1]}, {"restarts": None},
        {"restarts": {"a": 1.5}}, {"error": 5}, {"updated_at": None},
    ],
)  # fmt: skip
def test_a_status_with_a_wrong_type_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = tmp_path / "status.json"
    good = asdict(
        Status(phase="training", step=3, num_steps=24, adapter_version=None, restarts={"trainer": 1})
    )
    path.write_text(json.dumps(good))
    assert read_status(path).restarts == {"trainer": 1}
    path.write_text(json.dumps(good | wrong))
    with pytest.raises(ConfigError, match=r"status\.json is not a valid run status"):
        read_status(path)


@pytest.mark.parametrize("name", ["phase", "pids", "updated_at"])
def test_a_status_without_a_field_is_refused_and_a_new_field_is_ignored(tmp_path: Path, name: str) -> None:
    path = tmp_path / "status.json"
    good = asdict(Status(phase="done", step=3, num_steps=3, adapter_version=3))
    path.write_text(json.dumps(good | {"newer": 1}))
    assert read_status(path).phase == "done"
    del good[name]
    path.write_text(json.dumps(good))
    with pytest.raises(ConfigError, match=f"KeyError '{name}'"):
        read_status(path)
    with pytest.raises(ConfigError, match=r"is not a skylite run: status\.json is missing"):
        read_status(tmp_path / "nowhere" / "status.json")


def test_events_have_both_clocks_and_a_torn_one_is_skipped(tmp_path: Path) -> None:
    path, before = tmp_path / "events.jsonl", (time.monotonic(), time.time())
    append_event(path, "sampling_started", step=3, version=2)
    with path.open("a") as stream:
        stream.write('{"event": "samp')
    append_event(path, "sampling_ended", step=3)
    (first, second), after = read_events(path), (time.monotonic(), time.time())
    assert (first["event"], first["step"], first["version"], second["event"]) == (
        "sampling_started", 3, 2, "sampling_ended",
    )  # fmt: skip
    assert before[0] <= first["monotonic"] <= second["monotonic"] <= after[0]
    assert before[1] <= first["wall"] <= second["wall"] <= after[1]


def test_events_after_a_damaged_line_are_read(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "a"}\n{"event": "b\n7\n{"event": "c"}\n')
    assert [e["event"] for e in read_events(tmp_path / "events.jsonl")] == ["a", "c"]


def test_all_metrics_are_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_metrics(path, {"step": 9})
    write_metrics(path, [{"step": 1, "text": "\u00e9"}, {"step": 2, "a": math.inf}])
    assert path.read_text(encoding="utf-8") == '{"step": 1, "text": "\u00e9"}\n{"step": 2, "a": null}\n'
    numbers = null_to_nan(read_metrics(path)[1])
    assert numbers["step"] == 2
    assert math.isnan(numbers["a"])
