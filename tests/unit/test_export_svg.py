"""The picture of a run, drawn from the files of the run."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from skylite.config.train import Resolved, RunConfig, TrainConfig
from skylite.run.files import write_json
from skylite.run.metrics_file import append_metrics
from skylite.run.rollout_file import write_rollouts
from skylite.run.run_dir import RunDir
from skylite.ui import export_svg
from tests.unit.test_ui import group, step


def test_an_svg_is_drawn_from_a_runs_files(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    resolved = Resolved(
        model_path="m", model_fingerprint="f", dtype="float32", device="cpu", lora_sync_path="a"
    )
    config = RunConfig(skylite_version="1", config=TrainConfig(num_steps=2), resolved=resolved)
    write_json(run.config_path, config.model_dump(mode="json"))
    for number in (1, 2):
        append_metrics(run.metrics_path, step(number, number / 4))
    write_rollouts(run.rollout_path(2), [group()])
    for label, answer in (("before-v000000", ""), ("after-v000002", "19")):
        rows = [{"reward": 1.0, "answer": answer}, {"reward": 0.0, "answer": ""}]
        run.evals.mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), run.evals / f"{label}.parquet")
    export_svg.main([str(run.root), str(tmp_path / "run.svg")])
    svg = (tmp_path / "run.svg").read_text()
    words = svg.replace("&#160;", " ")
    held_out = ("greedy accuracy 50.0 %",)
    for part in ("2 of 2 steps", "####", "first 0.250", "--rank 32", *held_out):
        assert part in words
