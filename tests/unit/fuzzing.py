"""Run commands on generated bad inputs and count the outcomes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings

from skylite.errors import SkyliteError
from tests.unit.bad_inputs import (
    call,
    snapshot,
)

FACTOR = float(os.environ.get("FUZZ_FACTOR", "1"))
"""Multiplies the number of inputs."""
SECONDS = 20
"""Limit for one input."""
counts: Counter[str] = Counter()
"""Number of inputs by outcome."""


def generated(number: int) -> Callable[[Any], Any]:
    """Settings for `number` inputs, the same in every run unless FACTOR changes their number."""
    quiet = [
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
    ]
    return settings(
        max_examples=int(number * FACTOR),
        derandomize=FACTOR == 1,
        deadline=timedelta(seconds=SECONDS),
        database=None,
        suppress_health_check=quiet,
    )


def refused(args: list[str], root: Path) -> str:
    """Run a command that must accept its input or refuse it in one sentence. The disk must not change."""
    before = snapshot(root)
    reply = call(args)
    count(reply.code, reply.output)
    assert snapshot(root) == before, (args, reply)
    return reply.output


def count(code: int, output: str) -> None:
    assert "Traceback" not in output, output
    assert code in (0, 2), output
    assert code == 0 or output.strip(), "no reason was given"
    counts["refused" if code else "accepted"] += 1


def accepted_or_refused(work: Callable[[], Any]) -> None:
    """Run a function that must accept its input or raise a SkyliteError."""
    try:
        work()
    except SkyliteError as error:
        count(error.exit_code, str(error))
    else:
        count(0, "")
