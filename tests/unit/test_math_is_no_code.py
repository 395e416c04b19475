"""No part of a completion or answer runs as code in the rewards that compare formulas."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest

from skylite.errors import DataError
from skylite.rewards.math import math

pytest.importorskip("math_verify")
CALL = "__import__('os').system('touch MARK')"
FORMS = (
    CALL,
    f"The answer is {CALL}",
    f"answer: 1+{CALL}",
    f"1 + {CALL}",
    f"(1)({CALL})",
    f"\\boxed{{{CALL}}}",
    f"\\boxed{{1 + {CALL}}}",
    f"${CALL}$",
    f"$x = {CALL}$",
    f"\\[ \\text{{{CALL}}} \\]",
    f"\\boxed{{\\operatorname{{{CALL}}}}}",
    f"\\boxed{{\\begin{{pmatrix}} {CALL} \\\\ 1 \\end{{pmatrix}}}}",
    f"\\boxed{{\\{{{CALL}, 2\\}}}}",
    f"\\boxed{{f'''{CALL}'''}}",
    f"\\boxed{{x_{{{CALL}}}}}",
    f"\\boxed{{\\int {CALL} dx}}",
)


@pytest.mark.parametrize("answer", ["7", "\\frac{x}{2}", "\\{1, 2\\}", "x = 3"])
def test_a_completion_runs_nothing(answer: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for form in FORMS:
        assert math(form.replace("MARK", str(mark)), answer=answer) in (0.0, 1.0)
        assert not mark.exists(), form


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_of_the_data_runs_nothing(form: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with suppress(DataError):
        math("\\boxed{7}", answer=form.replace("MARK", str(mark)))
    assert not mark.exists()


@pytest.mark.parametrize("text", ["9^9^9^9", "9**9**9**9", "\\boxed{9^{9^{9^{9}}}}", "\\boxed{99999999!}"])
def test_a_number_too_large_to_compute_scores_zero_in_time(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skylite.rewards.math.TIMEOUT_S", 1)
    started = time.process_time()
    assert math(text, answer="7") == 0.0
    assert time.process_time() - started < 4
