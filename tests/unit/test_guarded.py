"""A user's code that ends its process is no success of `skylite prepare`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from skylite.processes.guarded import GuardFailed
from skylite.user_functions import ProcessExit, user_code

START = "import sys\nfrom skylite.entry_point import main\nmain()\n"
DATA_PREP = """
from pathlib import Path
NAME, SYSTEM, FEW_SHOT, REWARD = "mine", "", [], "math"
{code}
def load_rows(split, source):
    from skylite.data.raw_rows import generated_table
    return generated_table(({{"q": f"{{i}} + 1?", "a": str(i + 1)}} for i in range(40)), "generated", split)
def to_prompt(row, prompt_id):
    from skylite.types import Prompt
    {inside}
    turns = [{{"role": "user", "content": row.text("q")}}]
    return Prompt(id=prompt_id, messages=turns, answer=row.text("a"), source=NAME)
def reference(row):
    return row.text("a")
"""
ENDS = {
    "ctypes in a thread": (
        "import ctypes, threading\nthreading.Thread(target=lambda: ctypes.CDLL(None)._exit(0)).start()",
        "import time; time.sleep(1)",
    ),
    "posix": ("import posix", "posix._exit(0)"),
    "os.execv": ("import os", "os.execv('/bin/true', ['true'])"),
    "killed": ("import os", "os.kill(os.getpid(), 9)"),
}


def prepare(tmp_path: Path, code: str, inside: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "mine.py").write_text(DATA_PREP.format(code=code, inside=inside))
    (tmp_path / "script").write_text(START)
    words = [sys.executable, "script", "prepare", "./mine.py", "--out", "out"]
    return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("end", ENDS)
def test_a_data_prep_file_that_ends_the_process_is_an_error(tmp_path: Path, end: str) -> None:
    done = prepare(tmp_path, *ENDS[end])
    assert done.returncode == 2, done.stderr
    assert "before it finished" in done.stderr
    assert not (tmp_path / "out").exists()


def test_what_can_be_refused_in_python_ends_nothing(tmp_path: Path) -> None:
    thread = "import os, threading\nthreading.Thread(target=lambda: os._exit(0)).start()"
    done = prepare(tmp_path, thread, "import time; time.sleep(0.01)")
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "test.parquet", "train.parquet", "validation.parquet",
    ]  # fmt: skip


def test_a_replaced_sys_exit_hides_no_error(tmp_path: Path) -> None:
    done = prepare(tmp_path, "import sys\nsys.exit = lambda *_: None", "raise ValueError('bad row')")
    assert done.returncode == 2, done.stderr
    assert "bad row" in done.stderr


def test_a_reward_that_ends_the_process_makes_no_dry_run_ready(tmp_path: Path, tiny_llama: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"q": "{i} + 1?", "a": "{i + 1}"}}\n' for i in range(40)))
    (tmp_path / "ends.py").write_text("import posix\ndef reward(completion): posix._exit(0)\n")
    (tmp_path / "script").write_text(START)

    def skylite(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "script", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)

    columns = ["--question", "q", "--answer", "a", "--reward", "math", "--out", "data"]
    assert skylite("prepare", "rows.jsonl", *columns).returncode == 0
    words = ["train", "--model", str(tiny_llama), "--data", "data", "--reward", "ends.py:reward", "--dry-run"]
    done = skylite(*words)
    assert done.returncode == 2, done.stderr
    assert "before it finished" in done.stderr


def test_code_and_output_of_the_child_are_those_of_the_command(tmp_path: Path) -> None:
    assert in_process("return 0") == (0, "")
    assert in_process("return 7") == (7, "")


def in_process(body: str) -> tuple[int, str]:
    text = (
        "from skylite.processes.guarded import run_guarded\nimport os, signal, sys, time\n"
        f"def work():\n    {body}\nraise SystemExit(run_guarded(work, 'it'))\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_a_signal_for_the_guard_reaches_the_child() -> None:
    text = (
        "from skylite.processes.guarded import run_guarded\nimport signal, sys, time\n"
        "def work():\n"
        "    signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "    try:\n        print('ready', flush=True)\n        time.sleep(60)\n"
        "    except SystemExit:\n        return 5\n"
        "raise SystemExit(run_guarded(work, 'it'))\n"
    )
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 5


def test_a_thread_of_a_users_code_cannot_end_skylite() -> None:
    found: list[BaseException] = []

    def end() -> None:
        try:
            os._exit(0)
        except ProcessExit as error:
            found.append(error)

    with user_code():
        thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert len(found) == 1


def test_the_guard_waits_for_no_grandchild() -> None:
    """What the code leaves behind may hold the guard's pipe."""
    body = (
        "[os.set_inheritable(int(n), True) for n in os.listdir('/proc/self/fd') if int(n) > 2"
        " and os.path.exists(f'/proc/self/fd/{n}')]; "
        "os.spawnl(os.P_NOWAIT, '/bin/sleep', 'sleep', '3'); os._exit(0)"
    )
    code, text = in_process(body)
    assert code == 1
    assert GuardFailed.__name__ in text
