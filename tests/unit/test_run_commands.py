"""`skylite runs`, `samples`, `report` and `adapters --json` through the command line, on made-up runs."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from skylite.cli.main import app
from skylite.errors import ConfigError, SkyliteError
from skylite.report.completions import Completion, Filter, _token_lists, repetition
from skylite.report.html import share_out, spread, unique_names
from skylite.run.run_dir import RunDir
from tests.made_up_runs import write_made_up_run
from tests.unit.doc_blocks import PAGES, blocks


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs, a damaged one and a file."""
    folder = tmp_path_factory.mktemp("runs")
    write_made_up_run(folder, "healthy")
    write_made_up_run(folder, "no-signal", steps=12, phase="failed")
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text('{"config": \x1b[31m')
    (folder / "notes.txt").write_text("mine")
    return folder


def said(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    if done.exception is not None:
        raise done.exception
    return done.output


def said_json(*arguments: object) -> Any:
    return json.loads(said(*arguments, "--json"))


def test_runs_lists_results_and_survives_a_damaged_run(made: Path) -> None:
    lines = said("runs", made).splitlines()
    assert len(lines) == 4
    (healthy,) = [line for line in lines if line.startswith("healthy")]
    assert healthy.split()[:3] == ["healthy", "done", "40/40"]
    assert "30.0 -> 65.0 %" in healthy
    (failed,) = [line for line in lines if line.startswith("no-signal")]
    assert failed.split()[1:3] == ["failed", "12/40"]
    assert failed.endswith("no signal")
    (broken,) = [line for line in lines if line.startswith("broken")]
    assert "config.json" in broken
    assert "\x1b" not in "".join(lines)


def test_runs_prints_json(made: Path) -> None:
    found = {run["name"]: run for run in said_json("runs", made)}
    assert found["healthy"]["held_out_last"]["mean"] == 0.65
    assert found["healthy"]["alarms"] == []
    assert found["no-signal"]["alarms"][0]["kind"] == "no signal"
    assert found["broken"]["phase"] == "damaged"
    assert [run["name"] for run in said_json("runs", made / "healthy")] == ["healthy"]


def test_runs_of_an_empty_or_missing_folder(tmp_path: Path) -> None:
    assert "holds no run" in said("runs", tmp_path)
    with pytest.raises(ConfigError, match="is not a folder"):
        said("runs", tmp_path / "none")


def test_runs_in_a_fresh_folder_say_what_makes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert said("runs") == (
        "There is no folder runs here. `skylite train` makes one; for runs elsewhere: skylite runs FOLDER.\n"
    )
    assert said_json("runs") == []
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ConfigError, match="runs is not a folder"):
        said("runs")


def test_samples_shows_the_newest_step_and_filters(made: Path) -> None:
    text = said("samples", made / "healthy", "--limit", 2)
    assert text.count("--- step 40  made-up/train/") == 2
    assert "2 of 64 completions" in text
    best = said_json("samples", made / "healthy", "--step", "3,9", "--best", "--limit", 200)
    assert {c["step"] for c in best} == {3, 9}
    assert len(best) == 128
    rewards = [c["reward"] for c in best]
    assert rewards == sorted(rewards, reverse=True)
    worst = said_json("samples", made / "healthy", "--worst", "--limit", 1)
    assert worst[0]["reward"] == 0
    right = said_json("samples", made / "healthy", "--step", 9, "--min-reward", 0.5, "--limit", 200)
    assert len(right) == sum(rewards[k] == 1 and c["step"] == 9 for k, c in enumerate(best))
    word = best[0]["turns"][0].split()[0]
    assert all(
        word in c["turns"][0] for c in said_json("samples", made / "healthy", "--contains", word, "--step", 3)
    )


def test_samples_follow_a_prompt_over_steps_and_evaluations(made: Path) -> None:
    train = said_json("samples", made / "healthy", "--prompt", "train/12", "--limit", 999)
    assert sorted({c["step"] for c in train}) == list(range(1, 41, 2))
    assert {c["prompt_id"].endswith("train/12") for c in train} == {True}, "train/120 is another prompt"
    assert said_json("samples", made / "healthy", "--prompt", "train/1", "--limit", 999) == [
        c
        for c in said_json("samples", made / "healthy", "--prompt", "train", "--limit", 9999)
        if c["prompt_id"].endswith("/train/1")
    ]
    held_out = said_json("samples", made / "healthy", "--held-out", "--prompt", "test/42", "--limit", 9)
    assert [c["step"] for c in held_out] == [0, 10, 20, 30, 40]
    assert held_out[0]["turns"][0].startswith("version 0 says")
    assert said("samples", made / "healthy", "--prompt", "nothing like it") == "No completion matches.\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "41"], r"no rollouts of step 41 \(stored: 1 to 40\)"),
        (["--held-out", "--step", "5"], r"no held-out evaluation of version 5 \(stored: 0, 10, 20, 30, 40\)"),
        (["--step", "x"], "'x' is not a list of integers"),
        (["--best", "--worst"], "exclude each other"),
    ],
)
def test_samples_explains_a_wrong_flag(made: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        said("samples", made / "healthy", *arguments)


def test_a_damaged_rollout_file_is_an_error_and_a_line_of_the_report(made: Path, tmp_path: Path) -> None:
    run = RunDir(Path(shutil.copytree(made / "no-signal", tmp_path / "run")))
    run.rollout_path(12).write_bytes(b"PAR1 nonsense")
    (run.evals / "before-v000000.json").write_text("[]")
    (run.evals / "before-v000000.parquet").unlink()
    with pytest.raises(SkyliteError, match="not a usable rollout file"):
        said("samples", run.root)
    found = said_json("report", run.root, "--out", tmp_path / "r.html")
    assert any("step-000012.parquet" in line for line in found["runs"][0]["unreadable"])
    assert any("before-v000000.json" in line for line in found["runs"][0]["unreadable"])
    assert (tmp_path / "r.html").stat().st_size > 100_000


def test_report_prints_its_findings(made: Path, tmp_path: Path) -> None:
    text = said("report", made / "healthy", made / "no-signal", "--out", tmp_path / "r.html")
    assert "no-signal: alarm: " in text
    assert "healthy: alarm" not in text


def test_a_report_is_named_after_its_run_and_keeps_that_of_another(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said("report", made / "healthy")
    said("report", made / "no-signal")
    said("report", made / "healthy", made / "no-signal")
    first = Path("report-healthy.html").read_text()
    assert {p.name for p in Path().iterdir()} == {
        "report-healthy.html", "report-no-signal.html", "report-healthy-and-1-more.html",
    }  # fmt: skip
    said("report", made / "healthy")  # again
    shutil.copytree(made / "no-signal", "elsewhere/healthy")
    with pytest.raises(ConfigError, match="is a report of other runs"):
        said("report", "elsewhere/healthy")
    assert "No alarm" in first


def test_without_a_name_the_newest_run_is_taken(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="No run was named"):
        said("samples")
    for age, name in ((200, "no-signal"), (100, "healthy")):
        shutil.copytree(made / name, Path("runs") / name)
        then = time.time() - age
        os.utime(Path("runs") / name / "config.json", (then, then))
    Path("runs/notes").mkdir()
    assert [run["label"] for run in said_json("report")["runs"]] == ["healthy"]
    assert said("watch").splitlines()[-40:-1] == said("watch", "runs/healthy").splitlines()[-40:-1]
    assert said_json("samples") == said_json("samples", "runs/healthy")


def test_report_overwrites_only_its_own_page(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    said("report", made / "no-signal", "--out", out)
    said("report", made / "no-signal", "--out", out, "--completions", 10)
    assert "made-up/train" in out.read_text()
    out.write_text("my notes")
    with pytest.raises(ConfigError, match="is not a page of `skylite report`"):
        said("report", made / "no-signal", "--out", out)
    assert out.read_text() == "my notes"


def test_adapters_list_and_verify_print_json(made: Path) -> None:
    listed = said_json("adapters", "list", made / "no-signal")
    assert [a["version"] for a in listed] == list(range(13))
    assert all(a["damaged"] for a in listed)  # made-up adapters have no manifest
    done = CliRunner().invoke(app, ["adapters", "verify", str(made / "no-signal"), "--json"])
    assert done.exit_code == 1
    assert "manifest.json is missing" in json.loads(done.output)[0]["damage"]


def test_the_commands_of_the_page_run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of docs/how-to/look-at-a-run.md."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "NAME").symlink_to(made / "healthy")
    (tmp_path / "runs" / "OTHER").symlink_to(made / "no-signal")
    (page,) = [path for path in PAGES if path.name == "look-at-a-run.md"]
    lines = [line for block in blocks(page) for line in block.commands]
    assert len(lines) == 10
    for line in lines:
        assert said(*shlex.split(line, comments=True)[1:])
    assert (tmp_path / "report-healthy.html").is_file(), "named after the run, not after the link"
    assert (tmp_path / "both.html").is_file()


def test_repetition_counts_repeated_4_grams() -> None:
    assert repetition([1, 2, 3]) == 0
    assert repetition(list(range(50))) == 0
    assert repetition([1] * 10) == pytest.approx(6 / 7)  # 7 grams, 1 of them new
    assert repetition([1, 2, 3, 4, 5, 1, 2, 3, 4]) == pytest.approx(1 / 6)


def completion(reward: float) -> Completion:
    return Completion(source="training", step=1, prompt_id="p", question="", answer="", turns=("t",),
                      reward=reward, tokens=1, is_truncated=False)  # fmt: skip


def test_token_lists_of_sliced_missing_and_damaged_rows() -> None:
    kind = pa.list_(pa.int32())
    sliced = pa.array([[9], [1, 2], None, [], [3]], kind).slice(1)
    damaged = pa.array([[4, None]], kind)
    *found, with_null = _token_lists(pa.chunked_array([sliced, damaged]))
    assert [ids.tolist() for ids in found] == [[1, 2], [], [], [3]]
    assert len(with_null) == 2


def test_samples_import_no_pandas(made: Path) -> None:
    """pyarrow imports it to convert lists of tokens, which takes longer than the rest of the command."""
    code = "import atexit, sys; from skylite.cli.main import main\n"
    code += "atexit.register(lambda: print('pandas' in sys.modules)); main()"
    words = [sys.executable, "-c", code, "samples", str(made / "healthy"), "--limit", "1"]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.endswith("False\n")


def test_order_puts_nan_last() -> None:
    nan = float("nan")
    all_of = [completion(r) for r in (0.0, nan, 2.0)]
    assert [c.reward for c in Filter(order="best").apply(all_of)][:2] == [2.0, 0.0]
    assert [c.reward for c in Filter(order="worst").apply(all_of)][:2] == [0.0, 2.0]
    assert len(Filter(min_reward=0).apply(all_of)) == 2


def test_completions_are_shared_out_evenly() -> None:
    parts = [[completion(0)] * n for n in (2, 10, 10)]
    assert [len(p) for p in share_out(parts, 12)] == [2, 5, 5]
    assert [len(p) for p in share_out(parts, 100)] == [2, 10, 10]
    assert [len(p) for p in share_out(parts, 0)] == [0, 0, 0]
    assert spread(list(range(9)), 3) == [0, 4, 8]
    assert unique_names(["a", "b", "a"]) == ["a (1)", "b", "a (2)"]
