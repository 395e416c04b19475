"""Forks of the tests: answers, deaths, hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.forks import in_a_fork


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise OSError("no good files")


@pytest.mark.parametrize(("work", "text"), [(lambda: {"a": 1}, '{"a": 1}'), (die, ""), (fail, "")])
def test_a_fork_answers_or_dies(work: Callable[[], object], text: str) -> None:
    assert in_a_fork(work, 60) == text


def test_a_fork_that_hangs_is_killed() -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="within 1 s"):
        in_a_fork(lambda: time.sleep(60), 1.0)
    assert time.monotonic() - started < 30
