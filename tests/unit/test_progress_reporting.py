"""What takes long says how far it is, and --json silences it."""

from __future__ import annotations

import asyncio
import io
import logging
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from skylite.cli.adapters import verify
from skylite.cli.main import app
from skylite.cli.report import report
from skylite.engine.vllm.launcher import VllmLauncher
from skylite.hub.hub_client import download_bar
from skylite.progress_reporting import LongWork, duration, long_work, show_long_work
from skylite.rollout import replay, trainer_process
from skylite.ui import progress_line
from skylite.ui.dashboard import Screen
from skylite.ui.live_panel import panel_lines
from skylite.ui.logs import configure_logging, run_log
from skylite.ui.progress_line import show_progress
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
    command = [sys.executable, "-c", FAKE_TRAINER]
    monkeypatch.setattr(trainer_process, "trainer_command", lambda root, *_, **__: [*command, str(root)])
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


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_LINE_S", "LINE_S", "REDRAW_S"):
        monkeypatch.setattr(progress_line, name, 0.05)
    show_long_work(show_progress)


def work_for(seconds: float) -> None:
    with long_work("evaluating", total=4) as work:
        work.advance()
        time.sleep(seconds)


def test_the_time_left_follows_from_the_parts_that_are_done() -> None:
    work = LongWork("evaluating", 512, clock=(clock := Clock()))
    clock.now = 20.0
    assert work.text() == "evaluating: 0 of 512 (0 %), 20 s"
    work.advance(128)
    assert work.text() == "evaluating: 128 of 512 (25 %), 20 s, about 1 min 0 s left"
    work.advance(384)
    assert work.text() == "evaluating: 512 of 512 (100 %), 20 s"


def test_without_parts_the_time_of_the_last_time_counts() -> None:
    work = LongWork(
        "engine-0 starts", expected_s=50.0, detail=lambda: "loading the model", clock=(clock := Clock())
    )
    clock.now = 20.0
    assert work.text() == "engine-0 starts: loading the model, 20 s, about 30 s left"
    clock.now = 51.0
    assert work.text() == "engine-0 starts: loading the model, 51 s"


def test_a_download_counts_the_bytes_of_its_files() -> None:
    work = LongWork("downloading", in_bytes=True, clock=(clock := Clock()))
    bar_class = download_bar(work)
    bar = bar_class(name="huggingface_hub.snapshot_download", total=0, initial=0)
    for size in (1_000_000, 3_000_000):
        bar.total += size
        bar.refresh()
    bar.update(1_000_000)
    list(bar_class(range(2), desc="Fetching 2 files"))  # its other bars do not count
    clock.now = 2.0
    assert work.text() == "downloading: 1 MB of 4 MB (25 %), 2 s, about 6 s left"


def test_durations_are_words() -> None:
    assert [duration(s) for s in (0.4, 59.6, 130, 11_100)] == ["0 s", "1 min 0 s", "2 min 10 s", "3 h 5 min"]


@pytest.mark.usefixtures("fast")
def test_a_log_gets_plain_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    with run_log(tmp_path / "skylite.log"):
        work_for(0.3)
    line = "evaluating: 1 of 4 (25 %), 0 s"
    assert capsys.readouterr().err.startswith(f"skylite: {line}")
    assert line in (tmp_path / "skylite.log").read_text()


@pytest.mark.usefixtures("fast")
def test_a_terminal_shows_one_line_and_clears_it(monkeypatch: pytest.MonkeyPatch) -> None:
    configure_logging()
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with long_work("evaluating", total=4) as work:
        work.advance()
        time.sleep(0.2)
        logging.getLogger("skylite.test").warning("look")
        time.sleep(0.2)
    text = terminal.getvalue()
    assert "\r\x1b[Kevaluating: 1 of 4 (25 %)" in text
    assert "\r\x1b[Kwarning: look\n" in text
    assert text.count("\n") == 1
    assert text.endswith("\r\x1b[K")


def test_short_work_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    show_long_work(show_progress)
    configure_logging()
    work_for(0.01)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("Triton is installed", ""),
        ("INFO [model.py:733] Resolved architecture: LlamaForCausalLM", "reading the model's settings"),
        ("INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0)", "starting its engine"),
        ("INFO Starting to load model /m...", "loading the model"),
        ("shards: 50% Completed | 1/4 [00:01<00:00]", ""),
        ("Loading safetensors checkpoint shards: 25% Completed | 1/4 [00:01<00:00]",
         "loading weights, file 1 of 4"),
        ("INFO Loading weights took 1.18 seconds", "preparing the weights"),
        ("INFO Using DensePunicaWrapperCPU.", "preparing LoRA"),
        ("INFO Dynamo bytecode transform time: 2.00 s", "compiling (torch.compile)"),
        ("INFO CPU KV cache size: 11,648 tokens", "allocating the KV cache"),
        ("Capturing CUDA graphs (decode, FULL):  40%|####  | 14/35 [00:01<00:02]",
         "capturing CUDA graphs, 14 of 35"),
        ("INFO init engine (profile, create kv cache, warmup model) took 1.13 s", "warming up"),
        ("INFO Starting vLLM server on unix:/tmp/engine-0.sock", "opening its server"),
    ],
)  # fmt: skip
def test_vllms_log_in_words(line: str, words: str) -> None:
    assert VllmLauncher().startup_state(f"nothing\n{line}\rmore of it\n") == words


def test_the_panel_shows_the_long_work_that_a_run_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_line, "REDRAW_S", 0.02)
    show_long_work(progress_line.show_progress)
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=30)
    configure_logging()
    with Screen(3, console) as screen:
        screen.phase("starting", "1 engine(s); trainer")
        with long_work("engine-0 starts", detail=lambda: "loading weights, file 1 of 2"):
            time.sleep(0.2)
            assert (
                panel_lines(screen.state, 90, 20)[0]
                .plain[2:]
                .startswith("starting  engine-0 starts: loading weights, file 1 of 2, 0 s")
            )
        assert "1 engine(s); trainer" in panel_lines(screen.state, 90, 20)[0].plain
