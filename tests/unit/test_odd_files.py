"""Files of a stranger that are none, too large, or hold numbers that overflow. No command hangs or dies."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skylite.cli import watch as watch_command
from skylite.data.raw_rows import read_table
from skylite.errors import DataError
from skylite.run import parquet_file
from skylite.run.parquet_file import read_parquet
from skylite.run.rollout_file import read_rollouts
from skylite.run.run_dir import RunDir
from skylite.untrusted_files import NotAFile, open_to_append, read_bytes, read_text, regular
from tests.engines import write_random_adapter
from tests.rows import random_samples
from tests.small_run import make_run, settings
from tests.unit.bad_inputs import call

COMMANDS = (
    ["runs", "RUNS"],
    ["watch", "RUN"],
    ["samples", "RUN"],
    ["report", "RUN", "--out", "page.html"],
    ["adapters", "list", "RUN"],
    ["adapters", "verify", "RUN"],
    ["adapters", "gc", "RUN"],
    ["train", "--resume", "RUN", "--dry-run"],
    ["replay", "RUN", "--step", "2"],
    ["export", "RUN"],
    ["eval", "RUN"],
    ["log", "RUN", "--to", "tensorboard"],
)


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> NoReturn:
        raise AssertionError("it hangs")

    old = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


@pytest.fixture
def run(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watch_command, "SILENT_S", 0.0)
    config = settings(eval={"limit": 2})
    run = make_run(
        tmp_path / "runs" / "run", tiny_llama, config, {1: random_samples(1), 2: random_samples(2)}
    )
    for version in (0, 1):
        write_random_adapter(run.default_adapters / f"policy-v{version:06d}", tiny_llama)
    run.metrics_path.write_text('{"step": 1, "reward/mean": 0.5, "time/step_s": 1.0}\n')
    run.status_path.write_text(
        json.dumps(
            {
                "phase": "done", "step": 1, "num_steps": 2, "adapter_version": 1, "pids": {}, "restarts": {},
                "error": None, "updated_at": "2026-01-01T00:00:00+00:00",
            }
        )
    )  # fmt: skip
    run.events_path.write_text("{}\n")
    run.trainer_steps.mkdir(exist_ok=True)
    run.trainer_step_path(1).write_text("{}")
    run.evals.mkdir(exist_ok=True)
    (run.evals / "before-v000000.json").write_text(
        '{"version": 0, "split": "test", "limit": 2, "accuracy": 0.5}'
    )
    run.checkpoint_path(1).mkdir(parents=True)
    (run.checkpoint_path(1) / "manifest.json").write_text("{}")
    return run


FILES = (
    "config.json", "status.json", "metrics.jsonl", "events.jsonl", "machine.json", "canary.json",
    "micro_batch.json", ".skylite.lock", "stop", "logs/skylite.log", "logs/trainer-error.json",
    "rollouts/step-000001.parquet", "trainer_steps/step-000001.json", "evals/before-v000000.json",
    "evals/before-v000000.parquet", "checkpoints/step-000001/manifest.json",
    "adapters/policy-v000001/manifest.json", "adapters/policy-v000001/adapter_config.json",
    "adapters/policy-v000001/adapter_model.safetensors", "loggers/tensorboard.jsonl",
    "loggers/tensorboard.lock",
)  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_no_command_waits_for_a_pipe_in_place_of_a_file(run: RunDir, name: str) -> None:
    path = run.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    for words in COMMANDS:
        given = [w.replace("RUNS", str(run.root.parent)).replace("RUN", str(run.root)) for w in words]
        with at_most(30):
            reply = call(given)
        assert reply.code in (0, 1, 2), (words, reply.output)
        assert "Unforeseen" not in reply.output, (words, reply.output)


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "socket"))
    with at_most(10):
        for path in (tmp_path / "pipe", tmp_path / "socket", Path("/dev/zero")):
            for read in (read_bytes, read_text, regular, read_parquet, open_to_append):
                with pytest.raises(OSError, match=r"not a file|No such device"):
                    read(path)
        with pytest.raises(NotAFile):
            read_bytes(tmp_path / "pipe")
        with pytest.raises(IsADirectoryError):
            read_bytes(tmp_path)
    server.close()


def test_data_that_is_a_pipe_is_one_sentence(tmp_path: Path) -> None:
    for suffix in ("jsonl", "json", "csv", "parquet"):
        os.mkfifo(tmp_path / f"rows.{suffix}")
        with at_most(10), pytest.raises(DataError, match="is not a file"):
            read_table(tmp_path / f"rows.{suffix}")


def write_bomb(path: Path, value_bytes: int, rows: int) -> None:
    """One long value, in every row."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), ["x" * value_bytes])
    pq.write_table(
        pa.table({"question": column}),
        path,
        compression="zstd",
        dictionary_pagesize_limit=1 << 30,
        store_schema=False,
    )


def test_a_small_file_with_gigabytes_is_refused_before_it_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_file, "MOST_BYTES", 64 << 20)
    monkeypatch.setattr(parquet_file, "BATCH_BYTES", 16 << 20)
    write_bomb(tmp_path / "rows.parquet", 1 << 20, 5000)
    assert (tmp_path / "rows.parquet").stat().st_size < 24_000
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(DataError, match="holds more than 64 MiB, which is the most that skylite reads"):
        read_table(tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="not a usable rollout file"):
        read_rollouts(tmp_path / "rows.parquet")
    assert pa.default_memory_pool().max_memory() - before < 200 << 20
    pq.write_table(pa.table({"n": pa.array([7] * 20_000_000, pa.int64())}), tmp_path / "numbers.parquet")
    assert (tmp_path / "numbers.parquet").stat().st_size < 100_000
    with pytest.raises(ValueError, match="holds more than"):
        read_parquet(tmp_path / "numbers.parquet")


def test_a_file_of_many_groups_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"a": [str(i) for i in range(1000)], "b": [[i] for i in range(1000)], "c": range(1000)})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=300)
    assert read_parquet(tmp_path / "t.parquet").equals(table)
    assert read_parquet(tmp_path / "t.parquet", ["c", "a"]).equals(table.select(["c", "a"]))
    monkeypatch.setattr(parquet_file, "BATCH_BYTES", 1)
    assert read_parquet(tmp_path / "t.parquet").equals(table)
    pq.write_table(table.slice(0, 0), tmp_path / "empty.parquet")
    assert read_parquet(tmp_path / "empty.parquet").num_rows == 0
    with pytest.raises(KeyError, match="no column 'z'"):
        read_parquet(tmp_path / "t.parquet", ["z"])


HUGE = ("1e299", "-1e299", "1.7e308", "1" + "0" * 290, "null", "true", '"text"', "1e-320")


@pytest.mark.parametrize("value", HUGE)
def test_a_run_with_odd_numbers_ends_no_command_over_many_runs(run: RunDir, value: str) -> None:
    keys = ("reward/mean", "time/step_s", "kl", "grad/norm", "completion/mean_tokens", "eval/accuracy")
    numbers = ", ".join(f'"{key}": {value}' for key in keys)
    run.metrics_path.write_text("".join(f'{{"step": {k}, {numbers}}}\n' for k in (1, 2)))
    status = json.loads(run.status_path.read_text())
    for change in ({}, {"step": 10**290, "num_steps": 10**290}, {"updated_at": "9999-12-31T23:59:59+00:00"}):
        run.status_path.write_text(json.dumps(status | change))
        other = run.root.parent / "z-good"
        if not other.exists():
            other.mkdir()
            for name in ("config.json", "status.json"):
                (other / name).write_bytes((run.root / name).read_bytes())
        for words in (["runs", str(run.root.parent)], ["watch", str(run.root)], ["samples", str(run.root)],
                      ["report", str(run.root), str(other), "--out", "page.html"]):  # fmt: skip
            reply = call(words)
            assert reply.code in (0, 2), (words, reply.output)
        assert "z-good" in call(["runs", str(run.root.parent)]).output
