"""The screen of a run on consoles of given sizes."""

from __future__ import annotations

import io
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from skylite.engine.canary_reading import CanaryReading
from skylite.engine.engine_pool import SyncReport
from skylite.evaluation.confidence_interval import wilson
from skylite.report.read_run import HeldOut, read_facts
from skylite.rollout.sampling import SampledStep
from skylite.rollout.step_metrics import StepTimings, completion_view, step_metrics
from skylite.run.run_dir import RunDir
from skylite.types import Call, Group, Prompt, Trajectory
from skylite.ui.curve import curve, proportional_widths, resample
from skylite.ui.dashboard import Screen, step_line
from skylite.ui.end_message import finished_text, log_findings, stopped_text
from skylite.ui.live_panel import CompletionView, LivePanel, ScreenState, clock_time, seconds_left, wrapped
from skylite.ui.logs import configure_logging
from tests.made_up_runs import write_made_up_run

logger = logging.getLogger("skylite.test")
SIZES = [(80, 24), (120, 40), (60, 16), (200, 60), (40, 10)]
SAMPLE = CompletionView(
    question="Nora has 12 apples. " * 9 + "How many?",
    completion="12 + 7 = 19\n#### 19",
    reward=1.0,
    answer="19",
)
EVALUATION = "greedy accuracy 31.4 % (95 % interval 27.5 to 35.6, 512 problems)"


def step(number: int, reward: float = 0.5) -> dict[str, Any]:
    return {
        "step": number,
        "adapter/version": number,
        "reward/mean": reward,
        "reward/right_frac": reward,
        "reward/partial_frac": 0.0,
        "completion/tokens_mean": 63.21,
        "completion/truncated_frac": 0.02,
        "perf/completion_tokens_per_s": 812.3,
        "time/rollout_s": 6.0,
        "time/train_s": 3.0,
        "time/publish_s": 0.25,
        "time/load_s": 0.25,
        "time/canary_s": 7.5,  # during sampling
        "time/sync_s": 1.0,
        "time/step_s": 10.0,
        "policy/entropy": 0.4123,
        "canary/gap_max": 3.2e-5,
        "mismatch/logprob_diff_mean": 2.1e-6,
    }


def state(num_done: int = 12, num_steps: int = 24, sample: CompletionView | None = SAMPLE) -> ScreenState:
    history = [step(k, k / num_steps) for k in range(1, num_done + 1)]
    return ScreenState(
        num_steps,
        phase="sampling",
        detail="step 13",
        history=history,
        sample=sample,
        evaluations={"before": EVALUATION},
    )


def drawn(shown: ScreenState, width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(LivePanel(shown))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("num_done", [0, 1, 12, 24])
def test_the_panel_fits_every_size(width: int, height: int, num_done: int) -> None:
    lines = drawn(state(num_done), width, height)
    assert len(lines) < height
    assert {cell_len(line) for line in lines} == {width}


def test_a_small_terminal_shows_everything() -> None:
    text = "\n".join(drawn(state(), 80, 24))
    for part in (
        "sampling  step 13",
        "12 of 24 steps",
        "about 2:00 to go",
        "0.500",
        "50.0 % of the completions",
        "812 tokens/s",
        "63.2  first",
        "0.412  first",
        "sample 60 %",
        "train 30 %",
        "sync 10 %",
        "v12",
        "canary gap 3.2e-05",
        EVALUATION,
        "How many?",
        "#### 19",
        "reward 1, answer 19",
    ):
        assert part in text, f"{part!r} is missing in\n{text}"


def test_the_height_stays_when_completions_get_longer() -> None:
    long = CompletionView(question="Q", completion="word " * 2000, reward=0.0, answer="1")
    for width, height in SIZES:
        assert len(drawn(state(), width, height)) == len(drawn(state(sample=long), width, height))


def test_hostile_text_neither_breaks_the_frame_nor_controls_the_terminal() -> None:
    evil = "\x1b[2J\x1b[31m[bold]x[/bold]\r\n\t\u202eabc\x00" + "日本" * 200 + "e\u0301" * 50 + "a" * 500
    lines = drawn(
        state(sample=CompletionView(question=evil, completion=evil, reward=0.0, answer=evil)), 80, 24
    )
    assert {cell_len(line) for line in lines} == {80}
    assert not set("\x1b\r\t\x00\u202e") & set("".join(lines))
    assert "[bold]x[/bold]" in "\n".join(lines)


def test_nan_is_shown() -> None:
    shown = state()
    shown.history = [*shown.history, step(13, math.nan)]
    assert "nan" in "\n".join(drawn(shown, 80, 24))
    shown.history = [step(1, math.nan), step(2, 0.25)]
    assert "first nan  best 0.250" in "\n".join(drawn(shown, 80, 24))


def test_words_wrap_and_long_words_are_cut() -> None:
    assert wrapped("one two three\n\nfour", 7) == ["one two", "three", "four"]
    assert wrapped("abcdefgh ij", 3) == ["abc", "def", "gh", "ij"]
    assert wrapped("日本日本", 4) == ["日本", "日本"]


def test_durations_are_formatted_as_clocks() -> None:
    assert [clock_time(s) for s in (0, 61.9, 3723)] == ["0:00", "1:01", "1:02:03"]


def test_without_a_terminal_there_is_one_line_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    configure_logging()
    with Screen(24, Console(file=out, width=40)) as screen:
        screen.phase("starting", "vLLM")
        screen.phase("sampling", "step 1 of 24")
        screen.step(step(1), SAMPLE)
        screen.evaluation("before", EVALUATION)
        logger.info("a note with [brackets] :smile:")
    lines = out.getvalue().splitlines()
    assert lines[0] == "starting vLLM"
    assert lines[1].startswith("step 1/24  reward 0.500  right 50.0 %")
    assert lines[1].endswith("  v1  about 3 min 50 s left"), "23 steps of 10 s are left"
    assert lines[2:] == [f"evaluation (before): {EVALUATION}", "a note with [brackets] :smile:"]
    assert "\x1b" not in out.getvalue()
    assert capsys.readouterr() == ("", "")


def test_the_time_left_is_that_of_the_last_five_steps() -> None:
    slow, fast = [step(k) | {"time/step_s": 100.0} for k in (1, 2)], [step(k) for k in range(3, 7)]
    assert step_line([*slow, *fast], 8).endswith("  about 56 s left"), "2 steps of (100 + 4 * 10) / 5 s"
    assert step_line([*slow, *fast], 6).endswith("  v6"), "no step is left"
    assert step_line([step(1) | {"time/step_s": math.nan}], 6).endswith("  v1"), "no step has a time"


def test_on_a_terminal_log_lines_stay_above_the_panel() -> None:
    out = io.StringIO()
    configure_logging()
    with Screen(
        24, Console(file=out, width=80, height=24, force_terminal=True, color_system=None), history=[step(1)]
    ) as screen:
        screen.step(step(2), SAMPLE)
        logger.info("a note")
    text = out.getvalue()
    assert text.index("a note") < text.rindex("2 of 24 steps")
    assert "step 2/24  reward" not in text, "the panel shows the step already"


def test_quiet_shows_only_warnings() -> None:
    out = io.StringIO()
    configure_logging(logging.WARNING)
    with Screen(24, Console(file=out, width=80, height=24, force_terminal=True, color_system=None)) as screen:
        screen.phase("starting", "vLLM")
        screen.step(step(1), SAMPLE)
        logger.warning("engine-0 ended")
    assert out.getvalue() == "warning: engine-0 ended\n"


def test_lines_after_the_end_appear_below_the_panel() -> None:
    out = io.StringIO()
    configure_logging()
    with Screen(24, Console(file=out, width=80, height=24, force_terminal=True, color_system=None)) as screen:
        screen.step(step(1), SAMPLE)
        screen.phase("done", "")
        logger.info("where things are")
    assert out.getvalue().rindex("1 of 24 steps") < out.getvalue().index("where things are")


def test_the_panel_finds_every_metric_it_shows() -> None:
    """The trainer's metrics are listed here. `step_metrics` makes the others."""
    update = {
        k: step(1)[k]
        for k in (
            "time/train_s",
            "time/publish_s",
            "time/canary_s",
            "policy/entropy",
            "mismatch/logprob_diff_mean",
        )
    }
    canary = CanaryReading(gap_max=1e-5, gap_mean=1e-6, base_distance=0.1, projection=1.0)
    report = SyncReport(load_s=0.1, canary_s=0.1, canary=canary)
    recorded = step_metrics(
        1, SampledStep(groups=[group()]), update, report, StepTimings(rollout_s=5.0, step_s=9.0)
    )
    shown = ScreenState(1, history=[recorded], sample=completion_view([group()]))
    assert "50.0 % of the completions" in "\n".join(drawn(shown, 80, 24))


def test_the_end_message_gives_the_commands(tmp_path: Path) -> None:
    run, adapters = RunDir(tmp_path / "my run"), tmp_path / "adapters"
    (adapters / "policy-v000007").mkdir(parents=True)
    run.checkpoint_path(7).mkdir(parents=True)
    text = finished_text(
        run,
        adapters,
        [
            HeldOut(version=0, label="before", score=wilson(31, 100), path=run.root),
            HeldOut(version=7, label="after", score=wilson(62, 100), path=run.root),
        ],
    )
    quoted = f"'{run.root}'"
    for part in (
        str(adapters / "policy-v000007"),
        f"skylite eval {quoted}",
        f"skylite serve {quoted}",
        "accuracy 31.0 %",
        "accuracy 62.0 %",
        f"skylite train --resume {quoted} --steps N",
    ):
        assert part in text
    assert "Saved: checkpoint step-000007." in stopped_text(run, adapters)


def test_the_end_of_a_run_names_its_alarms(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, kinds in (("instant-collapse", ["WARNING"]), ("healthy", [])):
        caplog.clear()
        log_findings(read_facts(write_made_up_run(tmp_path, name).root))
        assert [record.levelname for record in caplog.records] == kinds


def test_partial_scores_are_not_called_right() -> None:
    history = [step(1) | {"reward/partial_frac": 0.4}, step(2)]
    for lines in (step_line(history, 4), "\n".join(drawn(replace(state(), history=history), 80, 24))):
        assert "right" not in lines
    assert "right 50.0 %" in step_line([step(2)], 4)


def test_steps_from_stored_completions_say_nothing_about_time() -> None:
    stored = {"rollout/stored": 1.0, "perf/completion_tokens_per_s": math.nan, "time/step_s": 1.0}
    line = step_line([step(1) | stored], 8)
    assert "nan" not in line
    assert "left" not in line
    assert seconds_left([step(1) | stored, step(2)], 8) == 6 * 10.0
    assert "nan" not in "\n".join(drawn(replace(state(), history=[step(1) | stored]), 80, 24))


def test_a_run_that_sampled_nothing_advises_no_resume(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    (run.default_adapters / "policy-v000000").mkdir(parents=True)  # published before the first step
    text = stopped_text(run, run.default_adapters)
    assert "nothing to resume" in text
    assert "--resume" not in text
    assert f"rm -r {run.root}" in text
    run.rollout_path(1).parent.mkdir()
    run.rollout_path(1).write_bytes(b"")
    text = stopped_text(run, run.default_adapters)
    assert "trains on the stored completions, without sampling them again." in text
    assert f"skylite train --resume {run.root}" in text


def test_paths_below_the_working_folder_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a" / "adapters" / "policy-v000001").mkdir(parents=True)
    run = RunDir(tmp_path / "runs" / "a")
    assert "skylite eval runs/a\n" in finished_text(run, run.default_adapters)


def group() -> Group:
    prompt = Prompt(id="p", messages=[{"role": "user", "content": "How many?"}], answer="19", source="s")
    texts = (("nothing", 0.0), ("#### 19", 1.0))
    trajectories = [
        Trajectory(
            calls=(
                Call(
                    prompt_token_ids=[1],
                    completion_token_ids=[2],
                    sampling_logprobs=[-0.5],
                    adapter_version=1,
                    text=text,
                ),
            ),
            reward=reward,
        )
        for text, reward in texts
    ]
    return Group(prompt=prompt, trajectories=tuple(trajectories))


def test_a_curve_rises_with_its_values() -> None:
    assert curve([0.0, 0.5, 1.0], 10, 1) == ["▁▄█"]
    assert curve([0.0, 0.5, 1.0], 10, 2) == ["  █", "▁██"]
    assert curve([-1.0, 3.0], 10, 1) == ["▁█"]
    assert curve([0.01, 0.02, 0.03], 10, 1) == ["▁▄█"], "small rewards have a curve too"
    assert curve([0.01, 0.02], 10, 1, (0.0, 1.0)) == ["▁▁"]
    assert curve([math.nan, 1.0], 10, 1) == [" ▄"], "one value is in the middle"


def test_a_long_series_is_averaged_over_its_full_length() -> None:
    assert resample([0, 1, 2, 3, 4, 5], 3) == [0.5, 2.5, 4.5]
    assert resample([1, 2], 5) == [1, 2]
    assert len(resample(list(range(1000)), 37)) == 37


def test_proportional_widths_sum_to_the_width() -> None:
    assert proportional_widths([1, 1, 1], 10) == [4, 3, 3]
    assert proportional_widths([6, 3, 1], 10) == [6, 3, 1]
    assert proportional_widths([0, 0], 10) == [0, 0]
    assert sum(proportional_widths([0.52, 0.44, 0.02, 0.02], 17)) == 17
