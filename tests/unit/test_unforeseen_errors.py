"""An error that nobody foresaw: the status names the log, one sentence, a nonzero exit code."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from skylite.errors import error_line
from skylite.rollout import run_session
from skylite.run.run_dir import RunDir
from skylite.run.status import Status, read_status, write_status
from tests.unit.bad_inputs import call
from tests.unit.run_cases import begin

ERRORS = [
    TypeError("one of\nours"),
    SystemExit(0),
    SystemExit(None),
    asyncio.CancelledError(),
    RecursionError(),
    ExceptionGroup("two", [KeyError("a"), KeyError("b")]),
]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that was killed in its first step."""
    run = begin(tmp_path)
    status = Status(phase="training", step=1, num_steps=2, adapter_version=0, pids={"skylite": 4_000_000})
    write_status(run.status_path, status)
    return run


def fail_in(where: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a function of run_session raise."""

    async def fails_later(*_: Any, **__: Any) -> None:
        raise error

    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(run_session, where, fails_later if where == "_run" else fails)


@pytest.mark.parametrize("where", ["_run", "roll_back"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: f"{type(e).__name__}{e.args[:1]}")
def test_a_resumed_run_that_fails_unforeseen_is_recorded_as_failed(
    run: RunDir, where: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_in(where, error, monkeypatch)
    reply = call(["train", "--resume", str(run.root)])
    status = read_status(run.status_path)
    assert (reply.code, status.phase, dict(status.pids)) == (1, "failed", {})
    assert type(error).__name__ in reply.output
    assert "Traceback" not in reply.output
    log = run.log_path("skylite")
    assert status.error is not None
    for text in (reply.output, status.error):
        assert f"Its traceback is in {log}." in text
    assert "Traceback" in log.read_text()


def test_a_new_run_that_fails_is_recorded_as_failed(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_in("_run", TypeError("ours"), monkeypatch)
    reply = call(
        ["train", "--recipe", "gsm8k_cpu", "--model", str(tmp_path / "model"),
         "--data", str(tmp_path / "data"), "--run", str(tmp_path / "new"),
         "--set", "data.difficulty=[]", "--set", "eval.limit=0",
         "--set", "rollout.prompts_per_step=2"]
    )  # fmt: skip
    status = read_status(RunDir(tmp_path / "new").status_path)
    assert (reply.code, status.phase, status.num_steps > 1) == (1, "failed", True)
    assert "TypeError: ours" in reply.output


def test_a_refused_resume_changes_no_status(run: RunDir) -> None:
    before = run.status_path.read_bytes()
    assert call(["train", "--resume", str(run.root), "--set", "seed=7"]).code == 2
    assert run.status_path.read_bytes() == before


def test_other_commands_print_one_sentence_and_save_the_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise LookupError("ours\x1b[2J\nmore")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("skylite.cli.adapters._published", fails)
    reply = call(["adapters", "verify", str(tmp_path)])
    saved = tmp_path / "state" / "skylite" / "last-error.log"
    assert reply.code == 1
    assert reply.output.count("\n") == 1
    assert reply.output.isascii()
    assert "\x1b" not in reply.output
    assert "LookupError: ours" in reply.output
    assert str(saved) in reply.output
    assert "Traceback" in saved.read_text()


def test_the_status_stays_json(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.status_path.write_text("{")
    fail_in("_run", ValueError("\ud800"), monkeypatch)
    assert call(["train", "--resume", str(run.root)]).code == 1
    assert json.loads(run.status_path.read_text())["phase"] == "failed"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("\n*****\n  Resource 'words' not found.\n*****", "LookupError: Resource 'words' not found."),
        ("no\nyes", "LookupError: no"),
        ("!?", "LookupError: !?"),
        ("", "LookupError"),
    ],
)
def test_the_line_of_an_error_has_words(text: str, line: str) -> None:
    """nltk draws a box around its errors."""
    assert error_line(LookupError(text)) == line
