"""Each logger's library writes its real files, offline; they are read back after a resume and `--at`."""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skylite.config.log import LoggerName
from skylite.loggers.logger_processes import start_logger
from skylite.run.run_dir import RunDir
from tests.unit.logger_cases import logged_run, set_metrics

BLOCK, HEADER = 32768, 7
"""LevelDB's log format, which .wandb files use."""


def need(*packages: str) -> None:
    for package in packages:
        pytest.importorskip(package, reason=f"the package {package} is not installed")


def log_in_child(run: RunDir, name: LoggerName) -> None:
    """`skylite log RUN --to NAME`."""
    process = start_logger(run, name, keep_following=False)
    try:
        process.child.process.wait(500)  # MLflow creates its database in a minute on a busy disk
    finally:
        process.end()
    assert not process.failure(), run.log_path(f"logger-{name}").read_text()


def three_lives(root: Path, name: LoggerName, **log: Any) -> RunDir:
    """Steps 1 and 2; a resume that repeats step 2 and adds step 3; `--at 1`, which samples step 2 again."""
    run = logged_run(root, [0.1, 0.2], **log)
    log_in_child(run, name)
    set_metrics(run, [0.1, 0.2, 0.3], seconds=9.0)
    log_in_child(run, name)
    set_metrics(run, [0.1, 0.7])
    log_in_child(run, name)
    return run


def test_tensorboard_reads_the_curve_that_went_back(tmp_path: Path) -> None:
    need("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = three_lives(tmp_path / "run", "tensorboard")
    events = EventAccumulator(str(run.loggers / "tensorboard")).Reload()
    points = [(e.step, round(e.value, 6)) for e in events.Scalars("reward/mean")]
    assert points == [(1, 0.1), (2, 0.7)]
    assert {"samples/0/text_summary", "samples/0"} & set(events.Tags()["tensors"])
    last = events.Tensors("samples/1")[-1]
    assert (last.step, b"    <b>b2</b>" in last.tensor_proto.string_val[0]) == (2, True)


def test_wandb_keeps_one_run_until_it_goes_back(tmp_path: Path) -> None:
    need("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    run = three_lives(tmp_path / "run", "wandb")
    curves: dict[str, list[Any]] = {}
    for file in sorted((run.loggers / "wandb").glob("offline-run-*/*.wandb")):
        for data in leveldb_records(file.read_bytes()):
            record = Record.FromString(data)
            items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            if "reward/mean" in items:
                curves.setdefault(file.stem, []).append((items["step"], items["reward/mean"]))
    first, second = journal_ids(run, "wandb")
    assert curves == {f"run-{first}": [(1, 0.1), (2, 0.2), (3, 0.3)], f"run-{second}": [(1, 0.1), (2, 0.7)]}
    tables = list((run.loggers / "wandb").rglob("*.table.json"))
    assert any("<b>a2</b>" in table.read_text() for table in tables)


def test_trackio_has_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    three_lives(tmp_path / "run", "trackio")
    with sqlite3.connect(tmp_path / "trackio" / "tests.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    curves: dict[str, list[Any]] = {}
    for name, step, metrics in rows:
        if "reward/mean" in (values := json.loads(metrics)):
            curves.setdefault(name.rpartition("-")[0], []).append((step, values["reward/mean"]))
    assert curves == {"run": [(1, 0.1), (2, 0.2), (3, 0.3)], "run-2": [(1, 0.1), (2, 0.7)]}
    assert any(b"<b>a2</b>" in file.read_bytes() for file in (tmp_path / "trackio").rglob("*.*"))


def test_mlflow_continues_its_run_by_a_tag(tmp_path: Path) -> None:
    need("mlflow", "sqlalchemy", "alembic")
    from mlflow.tracking import MlflowClient

    run = three_lives(tmp_path / "run", "mlflow")
    client = MlflowClient(f"sqlite:///{run.loggers / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    found = {r.info.run_name: r for r in client.search_runs([experiment.experiment_id])}
    curves = {
        name: [(m.step, m.value) for m in client.get_metric_history(r.info.run_id, "reward/mean")]
        for name, r in found.items()
    }
    assert curves == {"run": [(1, 0.1), (2, 0.2), (3, 0.3)], "run-2": [(1, 0.1), (2, 0.7)]}
    assert found["run"].info.status == "FINISHED"
    assert found["run"].data.params["rollout.group_size"] == "4"
    samples = list((run.loggers / "mlflow" / "artifacts").rglob("step-000002.json"))
    assert any("<b>a2</b>" in file.read_text() for file in samples)


def test_swanlab_writes_its_offline_files(tmp_path: Path) -> None:
    need("swanlab")
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    run = three_lives(tmp_path / "run", "swanlab")
    curves: dict[str, list[Any]] = {}
    for file in sorted((run.loggers / "swanlab").rglob("*.swanlab"), key=lambda f: f.stat().st_mtime_ns):
        reader = DataStoreReader()
        reader.open(file)
        for data in reader:
            record = Record.FromString(data)
            if record.scalar.key == "reward/mean":
                point = (record.scalar.step, record.scalar.value.number)
                curves.setdefault(file.stem, []).append(point)
    first, second = journal_ids(run, "swanlab")
    assert curves == {f"run-{first}": [(1, 0.1), (2, 0.2), (3, 0.3)], f"run-{second}": [(1, 0.1), (2, 0.7)]}
    assert any("<b>a2</b>" in f.read_text() for f in (run.loggers / "swanlab").rglob("*.txt"))


def journal_ids(run: RunDir, name: str) -> list[str]:
    lines = map(json.loads, (run.loggers / f"{name}.jsonl").read_text().splitlines())
    return [line["run_id"] for line in lines if "run_id" in line]


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file."""
    at, parts = HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # a complete record, or the last part of one
            yield parts
            parts = b""
