"""What takes long says how far it is, and --json silences it."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from skylite.cli.adapters import verify
from skylite.cli.main import app
from skylite.cli.report import report
from skylite.progress_reporting import long_work
from skylite.rollout import replay
from skylite.ui import progress_line
from tests.made_up_runs import write_made_up_run
from tests.unit.simulated_run import run_of
from tests.unit.test_replay import finished_run
from tests.unit.work_cases import parts, recorded_work

FAKE_TRAINER = """
import pathlib, sys
for step in (0, 1):
    (pathlib.Path(sys.argv[1]) / "trainer_steps" / f"step-{step:06d}.json").write_text("{}")
"""


def test_held_out_evaluations_of_a_run_show_their_problems(tmp_path: Path) -> None:
    with recorded_work() as found:
        run_of(tmp_path / "run", 0, 2, eval_every=1)
    assert {part for part in parts(found) if part[0] == "evaluating"} == {("evaluating", 2, 2)}
    assert len(found) >= 2


def test_verify_and_report_count_what_they_read(tmp_path: Path) -> None:
    run = write_made_up_run(tmp_path, "healthy", steps=12)
    with recorded_work() as found:
        with pytest.raises(SystemExit):  # the made-up adapters lack true hashes
            verify(run.root)
        report([run.root, run.root], out=tmp_path / "report.html", completions=10)
    # 12 files of completions, and evaluations of versions 0 and 10; twice.
    assert parts(found) == [("verifying", 13, 13), ("reading the runs", 28, 28)]


def test_a_replay_counts_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished_run(tmp_path / "run")
    same = replay.ReplayResult(step=1, start=0, num_tensors=1, differences={})
    monkeypatch.setattr(
        replay, "trainer_command", lambda root, *_, **__: [sys.executable, "-c", FAKE_TRAINER, str(root)]
    )
    monkeypatch.setattr(replay, "compare", lambda *_: same)
    with recorded_work() as found:
        assert asyncio.run(replay.replay_step(run, 1, {})) == same
    assert parts(found) == [("training again up to step 1", 2, 2)]


@pytest.mark.parametrize("flag", ["--json", "--quiet"])
@pytest.mark.parametrize(
    ("words", "function"),
    [
        (("adapters", "verify", "RUN"), "adapters._published"),
        (("replay", "RUN", "--step", "1"), "replay.allow_programs"),
        (("env", "check", "guess", "--data", "data"), "env.run_check"),
        (("report", "RUN"), "report.marks_of"),
        (("eval", "RUN"), "eval.evaluate"),
        (("export", "RUN"), "export.plan_export"),
        (("doctor",), "doctor.machine_checks"),
    ],
)
def test_json_and_quiet_silence_progress(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], function: str, flag: str
) -> None:
    def slow(*_: object, **__: object) -> None:
        with long_work("waiting"):
            time.sleep(0.1)
        raise SystemExit(0)

    monkeypatch.setattr(progress_line, "FIRST_LINE_S", 0.02)
    monkeypatch.setattr(f"skylite.cli.{function}", slow)
    assert "skylite: waiting: 0 s" in CliRunner().invoke(app, words).stderr
    result = CliRunner().invoke(app, [*words, flag])
    assert (result.exit_code, result.stderr) == (0, "")
