"""Every step reaches a logger once, also over kills and resumes. Real files: test_logger_files.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skylite.cli.log import logger_names
from skylite.errors import ConfigError, DataError, WriteFailed
from skylite.loggers import follow, writers
from skylite.loggers.follow import open_journal
from skylite.loggers.writers import LoggerRun
from tests.settings import load_config
from tests.unit.logger_cases import MemoryWriter, follower, log_once, logged_run, set_accuracy, set_metrics


@pytest.fixture(autouse=True)
def calls() -> list[tuple[Any, ...]]:
    MemoryWriter.calls.clear()
    return MemoryWriter.calls


def logged(calls: list[tuple[Any, ...]], key: str = "reward/mean") -> list[tuple[int, float]]:
    return [(c[1], c[2][key]) for c in calls if c[0] == "log" and key in c[2]]


def test_numbers_and_completions_of_a_step_are_logged(tmp_path: Path, calls: list[Any]) -> None:
    log_once(logged_run(tmp_path / "run", [0.5]), MemoryWriter)
    assert calls == [
        ("open", "run", 0),
        ("log", 1, {"reward/mean": 0.5, "time/step_s": 1.0}),  # null is no number, a reason is no curve
        ("samples", 1, ["<b>a1</b>", "<b>b1</b>"]),
        ("close",),
    ]


def test_no_completion_leaves_with_samples_0(tmp_path: Path, calls: list[Any]) -> None:
    log_once(logged_run(tmp_path / "run", [0.5], samples=0), MemoryWriter)
    assert not [c for c in calls if c[0] == "samples"]


def test_new_steps_are_logged_as_they_come(tmp_path: Path, calls: list[Any]) -> None:
    run = logged_run(tmp_path / "run", [0.1])
    one = follower(run, MemoryWriter)
    one.catch_up()
    one.catch_up()
    set_metrics(run, [0.1, 0.2])
    one.catch_up()
    assert logged(calls) == [(1, 0.1), (2, 0.2)]


def test_an_incomplete_line_waits(tmp_path: Path, calls: list[Any]) -> None:
    run = logged_run(tmp_path / "run", [0.1])
    with run.metrics_path.open("a") as file:
        file.write('{"step": 2, "reward/')
    one = follower(run, MemoryWriter)
    one.catch_up()
    with run.metrics_path.open("a") as file:
        file.write('mean": 0.2}\n')
    one.catch_up()
    assert logged(calls) == [(1, 0.1), (2, 0.2)]


def test_another_process_goes_on_under_the_same_id(tmp_path: Path, calls: list[Any]) -> None:
    run = logged_run(tmp_path / "run", [0.1, 0.2])
    log_once(run, MemoryWriter)
    first = (run.loggers / "memory.jsonl").read_text().splitlines()[0]
    set_metrics(run, [0.1, 0.2, 0.3])
    log_once(run, MemoryWriter)
    assert logged(calls) == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert (run.loggers / "memory.jsonl").read_text().count("run_id") == 1
    assert '"name": "run"' in first


def test_a_step_trained_again_from_its_rollouts_is_not_logged_twice(tmp_path: Path, calls: list[Any]) -> None:
    run = logged_run(tmp_path / "run", [0.1, 0.2, 0.3])
    log_once(run, MemoryWriter)
    set_metrics(run, [0.1])  # --resume removes the steps after the checkpoint,
    log_once(run, MemoryWriter)
    set_metrics(run, [0.1, 0.2, 0.3, 0.4], seconds=9.0)  # and trains them again; only their times differ
    log_once(run, MemoryWriter)
    assert logged(calls) == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]


def test_steps_that_are_sampled_again_start_another_run_with_the_history(
    tmp_path: Path, calls: list[Any]
) -> None:
    run = logged_run(tmp_path / "run", [0.1, 0.2, 0.3])
    log_once(run, MemoryWriter)
    set_metrics(run, [0.1, 0.7])  # --resume --at 1 samples step 2 again
    log_once(run, MemoryWriter)
    assert ("open", "run-2", 0) in calls
    assert logged(calls)[3:] == [(1, 0.1), (2, 0.7)]


def test_a_living_process_starts_over(tmp_path: Path, calls: list[Any]) -> None:
    run = logged_run(tmp_path / "run", [0.1, 0.2])
    one = follower(run, MemoryWriter)
    one.catch_up()
    set_metrics(run, [0.1, 0.9])
    one.catch_up()
    assert [c[0] for c in calls if c[0] in ("open", "close")] == ["open", "close", "open"]
    assert logged(calls)[2:] == [(1, 0.1), (2, 0.9)]


def test_held_out_results_are_logged_once_their_step_is(tmp_path: Path, calls: list[Any]) -> None:
    run = logged_run(tmp_path / "run", [0.1])
    set_accuracy(run, 0, 0.25)
    set_accuracy(run, 2, 0.5)
    log_once(run, MemoryWriter)
    assert logged(calls, "eval/score") == [(0, 0.25)]
    set_metrics(run, [0.1, 0.2])
    log_once(run, MemoryWriter)
    assert logged(calls, "eval/score") == [(0, 0.25), (2, 0.5)]


def test_two_processes_never_log_one_run_to_one_logger(tmp_path: Path) -> None:
    path = tmp_path / "wandb.jsonl"
    first = open_journal(path)
    assert first is not None
    assert open_journal(path) is None
    first.lock.close()
    assert open_journal(path) is not None


def test_a_damaged_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wandb.jsonl").write_text('{"run_id": "0123456789ab", "name": "n"}\n[1]\n')
    with pytest.raises(DataError, match=r"wandb\.jsonl line 2 is not a line of a logger's journal"):
        open_journal(tmp_path / "wandb.jsonl")


def test_a_logger_leaves_the_rest_of_the_disk_to_the_run(
    tmp_path: Path, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "SPARE_BYTES", 1 << 62)
    with pytest.raises(WriteFailed, match="has only"):
        log_once(logged_run(tmp_path / "run", [0.1]), MemoryWriter)
    assert logged(calls) == []


def test_a_missing_library_is_one_sentence_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(writers.LIBRARIES, "wandb", ("no_such_package",))
    with pytest.raises(ConfigError, match=r"wandb needs the package no_such_package.*`pip install 'wandb"):
        writers.require_libraries(["wandb"])


def test_names_of_loggers_are_checked() -> None:
    assert logger_names("wandb, tensorboard") == ["wandb", "tensorboard"]
    for text in ("", "wand", "wandb,tb"):
        with pytest.raises(ConfigError, match="Choose from tensorboard, wandb, trackio, mlflow, swanlab"):
            logger_names(text)
    with pytest.raises(ConfigError, match="names a logger twice"):
        load_config(None, {"log.to": ["wandb", "wandb"]})


class LocalWriter(MemoryWriter):
    """Would continue from its files."""

    @staticmethod
    def starts_over(offline: bool) -> bool:
        return True

    def __init__(self, run: LoggerRun) -> None:
        super().__init__(run)
        assert list(run.folder.iterdir()) == []
        (run.folder / "state").write_text("mine")


def test_a_logger_never_sees_files_that_came_with_the_run(tmp_path: Path, calls: list[Any]) -> None:
    run = logged_run(tmp_path / "run", [0.1])
    (run.loggers / "memory").mkdir(parents=True)
    (run.loggers / "memory" / "settings").write_text("base_url = http://stranger.invalid")
    log_once(run, LocalWriter)
    log_once(run, LocalWriter)
    assert logged(calls) == [(1, 0.1), (1, 0.1)], "a new database has every step"
    found = {p.relative_to(run.loggers).as_posix() for p in run.loggers.rglob("*") if p.is_file()}
    assert found == {"memory/state", "memory.1/settings", "memory.2/state", "memory.jsonl", "memory.lock"}


@pytest.mark.parametrize("run_id", ["../../../.ssh/x", "abc", "", 7])
def test_an_id_of_another_form_is_refused(tmp_path: Path, run_id: object) -> None:
    """Libraries put it into paths."""
    (tmp_path / "wandb.jsonl").write_text(json.dumps({"run_id": run_id, "name": "n"}) + "\n")
    with pytest.raises(DataError, match="is not a line of a logger's journal"):
        open_journal(tmp_path / "wandb.jsonl")
