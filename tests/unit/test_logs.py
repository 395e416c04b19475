"""Where log records go: the terminal by level, and the log file of the run."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

import pytest

from skylite.config.train import TrainConfig
from skylite.data.prompts import PromptFileInfo, write_rows
from skylite.errors import RunFailed
from skylite.rollout.plan import RunPlan
from skylite.rollout.session import TimeLimit
from skylite.ui.logs import configure_logging, run_log
from tests.unit.bad_inputs import call
from tests.unit.data_cases import prompt
from tests.unit.run_cases import make_model

logger = logging.getLogger("skylite.test")
STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"


def log_some() -> None:
    logger.debug("a detail")
    logger.info("a choice")
    logger.warning("a risk")


def test_the_terminal_shows_info_and_names_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    log_some()
    assert capsys.readouterr() == ("", "skylite: a choice\nskylite: warning: a risk\n")


def test_verbose_shows_debug_with_time_and_logger(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(logging.DEBUG)
    log_some()
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in lines] == [
        "skylite.test: a detail",
        "skylite.test: a choice",
        "skylite.test: warning: a risk",
    ]


def test_the_requested_output_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(info_on_stdout=True)
    log_some()
    assert capsys.readouterr() == ("a choice\n", "skylite: warning: a risk\n")


def test_a_line_appears_once_if_a_library_configures_the_root_logger(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging()
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    try:
        log_some()
    finally:
        logging.getLogger().removeHandler(handler)
    assert capsys.readouterr().err.count("a choice") == 1


@pytest.mark.parametrize("level", [logging.WARNING, logging.INFO, logging.DEBUG])
def test_the_runs_log_file_has_every_line_from_info_up_with_its_time(tmp_path: Path, level: int) -> None:
    configure_logging(level)
    logger.info("before the run folder exists")
    for _ in range(2):  # the second time is a resume, which appends to the file
        with run_log(tmp_path / "logs" / "skylite.log"):
            log_some()
    lines = (tmp_path / "logs" / "skylite.log").read_text().splitlines()
    assert [re.sub(f"^{STAMP} ", "", line) for line in lines] == [
        "INFO skylite.test: before the run folder exists",
        *["INFO skylite.test: a choice", "WARNING skylite.test: a risk"] * 2,
    ]


def test_an_error_that_ends_the_run_is_its_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging()
    with pytest.raises(RunFailed), run_log(tmp_path / "skylite.log"):
        raise RunFailed("engine-0 ended.", "Its log is there.")
    assert (
        (tmp_path / "skylite.log").read_text().endswith("ERROR skylite: engine-0 ended. Its log is there.\n")
    )
    with pytest.raises(ZeroDivisionError), run_log(tmp_path / "skylite.log"):
        print(1 / 0)
    assert (tmp_path / "skylite.log").read_text().endswith("  ZeroDivisionError: division by zero\n")
    assert capsys.readouterr() == ("", ""), "the command prints the error itself"


def test_text_from_outside_cannot_forge_lines_or_drive_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging()
    with run_log(tmp_path / "skylite.log"):
        logger.info("data: \x1b[2Jevil\r\u202e\n2026-01-01 00:00:00,000 ERROR skylite: forged \udc80")
    first, second = (tmp_path / "skylite.log").read_text().splitlines()
    assert first.endswith("data:  [2Jevil  ")
    assert second.startswith("  2026"), "what is not the first line of a message is indented"
    assert not set("\x1b\r\u202e") & set(capsys.readouterr().err)


def test_a_failed_log_write_is_reported_once_and_the_run_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").write_text("a file, not a folder")
    configure_logging()
    with run_log(tmp_path / "logs" / "skylite.log"):
        log_some()
    output = capsys.readouterr().err
    assert output.count("could not be written") == 1
    assert f"skylite: warning: {tmp_path / 'logs'}" in output
    assert output.endswith("skylite: a choice\nskylite: warning: a risk\n")


@pytest.fixture
def train(tmp_path: Path) -> list[str]:
    """Arguments of `skylite train` with a model and data that are checked but not loaded."""
    model = make_model(tmp_path / "model")
    info = PromptFileInfo(
        dataset="t", source_kind="generated", source="t", source_sha256="0", count=9, seed=0, split="train",
        reward="math", system="", few_shot=[],
    )  # fmt: skip
    write_rows(tmp_path / "data" / "train.parquet", [prompt(id=f"t/{i}") for i in range(9)], info)
    for split in ("validation", "test"):
        shutil.copyfile(tmp_path / "data" / "train.parquet", tmp_path / "data" / f"{split}.parquet")
    (tmp_path / "recipe.toml").write_text("")
    return [
        "train", "--recipe", str(tmp_path / "recipe.toml"), "--model", str(model), "--set", "optim.lr=1e-7",
        "--run", str(tmp_path / "run"), "--data", str(tmp_path / "data"),
    ]  # fmt: skip


@pytest.mark.parametrize("flag", ["--quiet", "-q"])
@pytest.mark.parametrize("is_first", [True, False], ids=["before the command", "after it"])
def test_quiet_on_the_command_line(train: list[str], flag: str, is_first: bool) -> None:
    reply = call([flag, *train, "--dry-run"] if is_first else [*train, "--dry-run", flag])
    assert reply.code == 0
    head, brace, settings = reply.output.partition("{")
    assert head == "skylite: warning: optim.lr=1e-07 is under 5e-06; LoRA hardly learns at such rates\n"
    assert TrainConfig.model_validate_json(brace + settings).num_steps > 0
    assert "skylite: data: t (generated: t)" in call([*train, "--dry-run"]).output


@pytest.mark.parametrize("flag", ["--verbose", "-v"])
def test_verbose_on_the_command_line(train: list[str], flag: str) -> None:
    for arguments in ([flag, *train], [*train, flag], ["--quiet", *train, flag]):
        output = call([*arguments, "--dry-run"]).output
        said = r"^\d\d:\d\d:\d\d skylite\.notes: data: t "
        assert re.search(said, output, re.MULTILINE)


def test_a_run_and_its_resume_share_one_log_file_and_a_dry_run_writes_none(
    train: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run_session(plan: RunPlan, *, resume: bool, limit: TimeLimit | None) -> bool:
        logger.info(f"the session of step {plan.first_step} begins, resume {resume}")
        return True

    monkeypatch.setattr("skylite.rollout.run_session.run_session", run_session)
    assert call([*train, "--dry-run"]).code == 0
    assert not (tmp_path / "run").exists()
    assert call([*train, "--quiet"]).code == 0
    assert call(["train", "--resume", str(tmp_path / "run")]).code == 0
    text = (tmp_path / "run" / "logs" / "skylite.log").read_text()
    for line in (
        "INFO skylite.notes: data: t (generated: t)",
        "WARNING skylite.notes: optim.lr=1e-07",
        "INFO skylite.test: the session of step 1 begins, resume False",
        f"INFO skylite.rollout.resume: resuming {tmp_path / 'run'} after step 0",
        "INFO skylite.test: the session of step 1 begins, resume True",
    ):
        assert text.count(line) == 1, line
