"""The sandbox: what code in it can do to this machine, to the next call, and to its caller."""

from __future__ import annotations

import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skylite.errors import ChildDied
from skylite.sandbox import seccomp
from skylite.sandbox.confine import landlock_version
from skylite.sandbox.sandbox import CallFailed, Limits, Sandbox

RUNNER = "tests.unit.sandbox_cases:make_runner"
QUICK = Limits(cpu_s=1, wall_s=2.0, memory_bytes=256 << 20, output_bytes=1 << 16)
WITH_LANDLOCK = pytest.mark.skipif(landlock_version() == 0, reason="this kernel has no Landlock")


@pytest.fixture(scope="module", params=[False, True], ids=["fresh", "lasting"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(RUNNER, 1, "two", limits=QUICK, lasting=request.param) as sandbox:
        yield sandbox


def server_pid(sandbox: Sandbox) -> int:
    assert sandbox._process is not None
    return sandbox._process.pid


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


def test_a_value_and_an_exception_come_back(sandbox: Sandbox) -> None:
    assert sandbox.call("evaluate", "{'a': [1, 2.5, None, 'x']}") == {"a": [1, 2.5, None, "x"]}
    assert sandbox.call("arguments") == [1, "two"]
    with pytest.raises(CallFailed, match=r"raised ZeroDivisionError: division by zero") as error:
        sandbox.call("evaluate", "1/0")
    assert error.value.raised == "ZeroDivisionError"
    for name, raised in (("exit_politely", "SystemExit"), ("interrupt", "KeyboardInterrupt")):
        with pytest.raises(CallFailed, match=f"raised {raised}"):
            sandbox.call(name)


def test_a_call_leaves_nothing_to_the_next() -> None:
    with Sandbox(RUNNER) as sandbox:
        assert (sandbox.call("calls"), sandbox.call("calls")) == (["calls"], ["calls"])


def test_files_cannot_be_changed(sandbox: Sandbox, tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("mine")
    before = path.stat()
    kept = (before.st_mode, before.st_size, before.st_mtime_ns)
    assert set(sandbox.call("touch_every_way", str(path)).values()) == {"PermissionError"}
    assert sandbox.call("write_at", str(tmp_path / "new")) == "PermissionError"
    assert (path.read_text(), os.listdir(tmp_path)) == ("mine", ["mine.txt"])
    after = path.stat()
    assert (after.st_mode, after.st_size, after.st_mtime_ns) == kept


@WITH_LANDLOCK
def test_only_named_files_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    for path in (tmp_path / "secret", tmp_path / "open" / "given"):
        path.write_text("x")
    with Sandbox(RUNNER, readable=[tmp_path / "open", tmp_path / "missing"]) as sandbox:
        assert sandbox.call("read_at", str(tmp_path / "secret")) == "PermissionError"
        assert sandbox.call("read_at", str(tmp_path / "open" / "given")) == ""
        assert sandbox.call("read_at", f"/proc/{os.getpid()}/environ") == "PermissionError"
        assert sandbox.call("read_at", os.__file__) == "", "imports still work"


def test_no_network_no_process_and_no_signal(sandbox: Sandbox, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        server.listen()
        ways = sandbox.call("reach_out", str(tmp_path / "socket"), os.getpid())
    assert {name: error for name, error in ways.items() if not error} == {}
    assert sandbox.call("start_thread") == "RuntimeError"


def test_a_lasting_process_serves_until_a_call_fails() -> None:
    with Sandbox(RUNNER, limits=QUICK, lasting=True) as sandbox:
        assert (sandbox.call("calls"), sandbox.call("calls")) == (["calls"], ["calls", "calls"])
        with pytest.raises(CallFailed, match="ended with exit code 3"):
            sandbox.call("leave")
        assert sandbox.call("calls") == ["calls"]


def test_the_environment_holds_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    with Sandbox(RUNNER) as sandbox:
        assert "secret" not in str(sandbox.call("environment"))


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("fill_memory", (), "used more than 268435456 bytes of memory"),
        ("burn", (), "(used more than 1 s of CPU time|took longer than 2 s)"),
        ("ignore_limits", (), "(was killed by SIGKILL|took longer than 2 s)"),
        ("sleep", (), "took longer than 2 s"),
        ("talk", (1 << 20,), "returned more than 65536 bytes"),
        ("leave", (), "ended with exit code 3"),
        ("abort", (), "was killed by SIGABRT"),
        ("forge", ("garbage",), "(answered what is no value|returned more than|ended with exit code 0)"),
        ("forge", ("[" * 60000,), "(answered what is no value|returned more than)"),
    ],
)
def test_limits_and_ends(sandbox: Sandbox, name: str, arguments: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(CallFailed, match=reason):
        sandbox.call(name, *arguments)
    assert sandbox.call("evaluate", "1 + 1") == 2


def test_no_memory_is_held_beside_the_limit(sandbox: Sandbox) -> None:
    count = 10 * QUICK.memory_bytes
    assert {way: error for way, error in sandbox.call("hold_memory", count).items() if not error} == {}


def test_a_server_that_does_not_answer_was_not_killed_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skylite.sandbox.sandbox.GRACE_S", 0.5)
    with Sandbox(RUNNER, what="the test", limits=Limits(wall_s=0.5)) as sandbox:
        sandbox.start()
        os.kill(server_pid(sandbox), signal.SIGSTOP)
        with pytest.raises(ChildDied, match=r"The sandbox of the test did not answer within 1 s\.") as error:
            sandbox.call("evaluate", "1")
        assert "SIGKILL" not in str(error.value)
        assert sandbox.call("evaluate", "1") == 1


def test_prints_do_not_reach_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with Sandbox(RUNNER) as sandbox:
        assert sandbox.call("talk", 3) == "xxx"
    assert capfd.readouterr() == ("", "")


LIMITED = """
import resource
from skylite.sandbox.sandbox import Sandbox
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
print(Sandbox("tests.unit.sandbox_cases:make_runner").call("evaluate", "1 + 1"))
"""


def test_lower_limits_of_the_user_stay() -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    done = subprocess.run([sys.executable, "-c", LIMITED], env=env, capture_output=True, text=True)
    assert done.stdout == "2\n", done.stderr


def test_a_factory_that_fails_is_an_error_with_its_exception() -> None:
    with (
        Sandbox("tests.unit.sandbox_cases:fail_to_load") as sandbox,
        pytest.raises(CallFailed, match="raised LookupError: no such task"),
    ):
        sandbox.start()


def test_a_killed_server_is_an_error_and_the_next_call_starts_a_new_one() -> None:
    with Sandbox(RUNNER, what="the test") as sandbox:
        sandbox.start()
        os.kill(server_pid(sandbox), signal.SIGSTOP)
        threading.Timer(0.2, os.kill, (server_pid(sandbox), signal.SIGKILL)).start()
        with pytest.raises(ChildDied, match="The sandbox of the test was killed by SIGKILL"):
            sandbox.call("evaluate", "1")
        assert sandbox.call("evaluate", "1") == 1


def test_close_ends_a_call_of_another_thread() -> None:
    sandbox, errors = Sandbox(RUNNER), []
    sandbox.start()
    pid = server_pid(sandbox)

    def call() -> None:
        try:
            sandbox.call("sleep")
        except ChildDied as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.2)
    started = time.monotonic()
    sandbox.close()
    thread.join()
    assert time.monotonic() - started < 5
    assert len(errors) == 1
    wait_until_gone(pid)


PARENT = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from skylite.sandbox.sandbox import Sandbox
sandbox = Sandbox("tests.unit.sandbox_cases:make_runner")
sandbox.start()
print(sandbox._process.pid, flush=True)
sandbox.call("sleep")
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_it_ends_with_its_parent_during_a_call(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.3)
        parent.send_signal(number)
        parent.wait(timeout=10)
    wait_until_gone(pid)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with the headers of x86-64")
@pytest.mark.parametrize(
    ("header", "architecture"),
    [("x86_64-linux-gnu/asm/unistd_64.h", seccomp.X86_64), ("asm-generic/unistd.h", seccomp.AARCH64)],
)
def test_system_call_numbers_are_those_of_the_kernel(header: str, architecture: int) -> None:
    path = Path("/usr/include", header)
    if not path.is_file():
        pytest.skip("the kernel's headers are not installed")
    found = dict(re.findall(r"#define\s+__NR(?:3264)?_(\w+)\s+(\d+)", path.read_text()))
    found |= {"newfstatat": found["fstatat"]} if "fstatat" in found else {}  # its name on 64 bits
    names = seccomp.ALLOWED | seccomp.REFUSED
    ours = {name: seccomp.numbers([name], architecture) for name in names}
    assert ours == {name: [int(found[name])] if name in found else [] for name in ours}
