"""A sandbox whose process serves several calls: for how long, and what a bad call leaves to the next."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from skylite.sandbox.forked_workers import GROWTH_BYTES
from skylite.sandbox.sandbox import CallFailed, Limits, Sandbox

RUNNER = "tests.unit.sandbox_cases:make_runner"
QUICK = Limits(cpu_s=1, wall_s=2.0, memory_bytes=512 << 20, output_bytes=1 << 16)


@pytest.fixture
def kept() -> Iterator[Sandbox]:
    """Its process lasts longer than the test."""
    with Sandbox(RUNNER, limits=QUICK, copy_life_s=60.0) as sandbox:
        yield sandbox


def copies_of(sandbox: Sandbox) -> list[str]:
    assert sandbox._process is not None
    pid = sandbox._process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [child for child in children if not counts_threads(child)]


def counts_threads(pid: str) -> bool:
    """Whether it is the process that counts the threads of the calls (sandbox/count_threads.py)."""
    with suppress(OSError):
        return any("seccomp" in os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir())
    return False


def test_one_process_serves_until_its_time_is_over_and_ends_then() -> None:
    with Sandbox(RUNNER, copy_life_s=0.5) as sandbox:
        assert sandbox.call("calls") == ["calls"]
        (first,) = copies_of(sandbox)
        assert sandbox.call("calls") == ["calls", "calls"]
        assert copies_of(sandbox) == [first]
        deadline = time.monotonic() + 10
        while copies_of(sandbox):
            assert time.monotonic() < deadline, "no request came, and the process is still there"
            time.sleep(0.02)
        assert sandbox.call("calls") == ["calls"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("burn", ()),
        ("sleep", ()),
        ("fill_memory", ()),
        ("talk", (1 << 20,)),
        ("leave", ()),
        ("forge", ("x",)),
    ],
)
def test_a_call_that_fails_ends_the_process(kept: Sandbox, name: str, arguments: tuple[Any, ...]) -> None:
    assert kept.call("calls") == ["calls"]
    with pytest.raises(CallFailed):
        kept.call(name, *arguments)
    assert kept.call("calls") == ["calls"]


def test_a_call_can_ask_for_a_process_that_has_not_served(kept: Sandbox) -> None:
    kept.call("calls")
    assert kept.call("calls", fresh=True) == ["calls"]
    assert kept.call("calls") == ["calls", "calls"]


def test_the_server_prepares_only_after_a_call_that_may_share_its_process() -> None:
    with Sandbox("tests.unit.sandbox_cases:Prepared", limits=QUICK) as sandbox:
        assert [sandbox.call(fresh=True) for _ in range(2)] == [False, False]
        assert [sandbox.call() for _ in range(2)] == [False, True]
        assert sandbox.call(fresh=True)


def test_a_failure_that_an_earlier_call_caused_is_not_seen(kept: Sandbox) -> None:
    kept.call("poison")
    assert kept.call("fail_if_poisoned") == "fine"


def test_a_process_that_has_grown_serves_no_further_call(kept: Sandbox) -> None:
    kept.call("grow", GROWTH_BYTES // 8)
    assert kept.call("calls") == ["grow", "calls"]
    kept.call("grow", 2 * GROWTH_BYTES)
    assert kept.call("calls") == ["calls"]


def test_cpu_time_of_earlier_calls_takes_none_from_the_next(kept: Sandbox) -> None:
    work = "sum(i for i in range(6_000_000))"
    started = os.times()
    eval(work)
    seconds = os.times().user - started.user
    for _ in range(int(2 * QUICK.cpu_s / seconds) + 1):
        kept.call("evaluate", work)


def test_a_process_that_does_not_read_is_replaced(kept: Sandbox) -> None:
    kept.call("stop_reading")
    assert kept.call("evaluate", f"len({'x' * (1 << 20)!r})") == 1 << 20


def test_an_answer_before_its_call_is_not_taken(kept: Sandbox) -> None:
    kept.call("chatter")
    time.sleep(0.5)
    assert kept.call("evaluate", "1 + 1") == 2


def test_a_killed_process_is_replaced(kept: Sandbox) -> None:
    kept.start()
    kept.call("calls")
    (first,) = copies_of(kept)
    os.kill(int(first), 9)
    assert kept.call("calls") == ["calls"]
