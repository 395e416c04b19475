"""Each logger's library writes its real files, offline; they are read back after a resume and `--at`."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from skylite.config.loading import read_run_config
from skylite.config.train import LoggerName
from skylite.loggers.logger_processes import start_logger
from skylite.loggers.writers import LIBRARIES
from skylite.processes.child import ProcessSpec, kill, start
from skylite.run.own_folders import require_own_folders, require_own_place
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
    for file in sorted(run.loggers.glob("wandb*/wandb/offline-run-*/*.wandb")):
        for data in leveldb_records(file.read_bytes()):
            record = Record.FromString(data)
            items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            if "reward/mean" in items:
                curves.setdefault(file.stem, []).append((items["step"], items["reward/mean"]))
    first, second = journal_ids(run, "wandb")
    assert curves == {f"run-{first}": [(1, 0.1), (2, 0.2), (3, 0.3)], f"run-{second}": [(1, 0.1), (2, 0.7)]}
    tables = list(run.loggers.rglob("*.table.json"))
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


def mlflow_run(database: Path) -> tuple[Any, list[tuple[int, float]]]:
    """The only run in a database, and its rewards."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{database}")
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    return found, [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, "reward/mean")]


def test_each_start_of_mlflow_makes_a_database_with_every_step(tmp_path: Path) -> None:
    """The second life finds a database that names another place for files, as a stranger's may."""
    need("mlflow", "sqlalchemy", "alembic")
    run, precious = logged_run(tmp_path / "run", [0.1, 0.2]), tmp_path / "precious"
    precious.mkdir()
    log_in_child(run, "mlflow")
    with sqlite3.connect(run.loggers / "mlflow" / "mlflow.db") as database:
        database.execute("update experiments set artifact_location = ?", (precious.as_uri(),))
        database.execute("update runs set artifact_uri = ?", ((precious / "run").as_uri(),))
    set_metrics(run, [0.1, 0.7, 0.3])
    log_in_child(run, "mlflow")
    found, curve = mlflow_run(run.loggers / "mlflow" / "mlflow.db")
    assert curve == [(1, 0.1), (2, 0.7), (3, 0.3)]
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    assert found.data.params["rollout.group_size"] == "4"
    samples = list((run.loggers / "mlflow" / "artifacts").rglob("step-000002.json"))
    assert any("<b>a2</b>" in file.read_text() for file in samples)
    assert list(precious.iterdir()) == []
    assert mlflow_run(run.loggers / "mlflow.1" / "mlflow.db")[1] == [(1, 0.1), (2, 0.2)]


def test_swanlab_writes_its_offline_files(tmp_path: Path) -> None:
    need("swanlab")
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    run = three_lives(tmp_path / "run", "swanlab")
    curves: dict[str, list[Any]] = {}
    for file in sorted(run.loggers.rglob("*.swanlab"), key=lambda f: f.stat().st_mtime_ns):
        reader = DataStoreReader()
        reader.open(file)
        for data in reader:
            record = Record.FromString(data)
            if record.scalar.key == "reward/mean":
                point = (record.scalar.step, record.scalar.value.number)
                curves.setdefault(file.stem, []).append(point)
    first, second = journal_ids(run, "swanlab")
    assert curves == {f"run-{first}": [(1, 0.1), (2, 0.2), (3, 0.3)], f"run-{second}": [(1, 0.1), (2, 0.7)]}
    assert any("<b>a2</b>" in f.read_text() for f in run.loggers.rglob("*.txt"))


@pytest.mark.parametrize("name", get_args(LoggerName))
def test_a_logged_run_can_be_resumed_and_logged_again(tmp_path: Path, name: LoggerName) -> None:
    """Whatever files the library leaves. Its process may also be killed before it tidies up."""
    need(*LIBRARIES[name])
    run = logged_run(tmp_path / "run", [0.1])
    process = start_logger(run, name, keep_following=True)
    try:
        deadline = time.monotonic() + 500
        while not logged_steps(run, name) and time.monotonic() < deadline:
            assert not process.failure()
            time.sleep(0.1)
    finally:
        process.end()
    set_metrics(run, [0.1, 0.2])
    log_in_child(run, name)
    require_own_folders(run, read_run_config(run.config_path))
    require_own_place(run.root, run.logs, run.loggers)
    assert logged_steps(run, name) == [1, 2]
    print(*sorted(f"{p.relative_to(run.root)} -> {os.readlink(p)}" for p in links_below(run.root)), sep="\n")


def links_below(folder: Path) -> list[Path]:
    return [
        Path(where, n) for where, ds, fs in os.walk(folder) for n in (*ds, *fs) if Path(where, n).is_symlink()
    ]


SERVERS = {
    "wandb": "import wandb; print(wandb.setup().settings.base_url)",
    "swanlab": "from swanlab.sdk.internal.settings import Settings; print(Settings().api_host)",
}
"""Logger -> a program that prints where it sends API keys."""


@pytest.mark.parametrize("name", SERVERS)
def test_files_of_the_working_folder_choose_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    need(name)
    stranger = "http://stranger.invalid"
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text(f"[default]\nbase_url = {stranger}\n")
    (tmp_path / "swanlab.yaml").write_text(f"api_host: {stranger}\n")
    (tmp_path / ".env").write_text(f"SWANLAB_API_HOST={stranger}\nWANDB_BASE_URL={stranger}\n")
    monkeypatch.chdir(tmp_path)
    program = [sys.executable, "-c", SERVERS[name]]
    direct = subprocess.run(program, capture_output=True, text=True, check=True).stdout.strip()
    assert direct == stranger, "the library obeys these files"
    child = start(ProcessSpec(name=name, argv=program, env={}, log_path=tmp_path / "log"))
    try:
        assert child.process.wait(100) == 0
    finally:
        kill(child)
    assert "stranger" not in (tmp_path / "log").read_text()


def journal(run: RunDir, name: str) -> list[dict[str, Any]]:
    path = run.loggers / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def journal_ids(run: RunDir, name: str) -> list[str]:
    return [line["run_id"] for line in journal(run, name) if "run_id" in line]


def logged_steps(run: RunDir, name: str) -> list[int]:
    return [line["step"] for line in journal(run, name) if "step" in line]


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
