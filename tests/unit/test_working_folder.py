"""Python files in the working folder run in no process of skylite, unless the user names them."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

import skylite
from skylite.engine.vllm.launcher import VllmLauncher
from skylite.processes.child import ProcessSpec, kill, poll, start
from skylite.processes.child_env import absolute_paths, child_env
from skylite.processes.gpus import ask_torch
from skylite.processes.import_path import SEARCH_PATHS, protect_imports, protected_env
from skylite.rewards.worker_pool import RewardPool
from tests.unit.data_cases import prompt
from tests.unit.engine_cases import SPEC

SHADOWED = (
    "vllm", "torch", "transformers", "peft", "pyarrow", "numpy", "pydantic", "math_verify", "reasoning_gym",
    "skylite", "safetensors", "huggingface_hub", "httpx", "rich", "psutil", "tokenizers", "json", "pickle",
    "multiprocessing", "socket", "selectors", "signal", "tempfile", "concurrent", "random", "string",
    "pathlib", "typing", "logging", "collections", "re", "__future__", "typer", "sitecustomize",
    "usercustomize",
)  # fmt: skip
CONSOLE_SCRIPT = (
    "import sys\nfrom skylite.entry_point import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
)
FIND = (
    "import subprocess, sys\n"
    "from skylite.processes.import_path import protect_imports\n"
    "protect_imports()\n"
    "subprocess.run(['planted'])\n"
)
SCORE = """
import asyncio, sys
from skylite.processes.import_path import protect_imports
from skylite.rewards.worker_pool import RewardPool
from skylite.types import Prompt
if __name__ == "__main__":
    protect_imports()
    pool = RewardPool(["math"])
    asked = Prompt(id="1", messages=[{"role": "user", "content": "?"}], answer="7", source="t")
    print(asyncio.run(pool.score([(asked, "7")]))[0].reward)
    pool.close()
"""


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder whose Python files have the names of packages and leave a trace when they run."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in SHADOWED:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n")
    info = folder / "evil-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nevil = vllm:register\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    monkeypatch.chdir(folder)
    return folder


def assert_nothing_ran(folder: Path) -> None:
    trace = folder.parent / "ran"
    assert not trace.exists(), trace.read_text()


def run_script(folder: Path, text: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script in another folder, as pip's console scripts are."""
    script = folder.parent / "bin" / "script"
    script.parent.mkdir(exist_ok=True)
    script.write_text(text)
    return subprocess.run(
        [sys.executable, str(script), *args],
        cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "json.tool", "--help"],
        ["-c", "import json"],
        ["-m", "skylite.hub.bundled_smollm2", "none", "none"],
    ],
)
def test_a_child_imports_nothing_from_the_working_folder(hostile: Path, words: list[str]) -> None:
    spec = ProcessSpec(name="child", argv=[sys.executable, *words], env={}, log_path=hostile.parent / "log")
    child = start(spec)
    try:
        deadline = time.monotonic() + 120
        while poll(child) is None and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        kill(child)
    assert_nothing_ran(hostile)


def test_the_question_to_torch_imports_nothing_from_it(hostile: Path) -> None:
    assert ask_torch(sys.executable, os.environ.get("PYTHONPATH", ""), (7,)).version
    assert_nothing_ran(hostile)


def test_commands_and_their_children_import_nothing_from_it(hostile: Path, tiny_llama: Path) -> None:
    rows = "".join(json.dumps({"q": f"{i} + 1?", "a": str(i + 1)}) + "\n" for i in range(60))
    (hostile / "rows.jsonl").write_text(rows)
    columns = ["--question", "q", "--answer", "a", "--reward", "math", "--out", "data"]
    done = run_script(hostile, CONSOLE_SCRIPT, "prepare", "rows.jsonl", *columns)
    assert done.returncode == 0, done.stderr
    flags = [
        "--model",
        str(tiny_llama),
        "--data",
        "data",
        "--set",
        "data.difficulty=[]",
        "--set",
        "eval.limit=0",
    ]
    done = run_script(hostile, CONSOLE_SCRIPT, "train", "--recipe", "gsm8k_cpu", *flags, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert_nothing_ran(hostile)


def test_reward_workers_import_nothing_from_it(hostile: Path) -> None:
    done = run_script(hostile, SCORE)
    assert done.stdout == "1.0\n", done.stderr
    assert_nothing_ran(hostile)


@pytest.mark.parametrize("path", [":{0}", "{0}:", ".:{0}", "{0}::"])
def test_an_empty_part_of_pythonpath_does_not_mean_the_working_folder_in_a_child(
    hostile: Path, path: str
) -> None:
    """`export PYTHONPATH=$PYTHONPATH:/lib` makes one. Python has read it before skylite's first line runs."""
    (hostile / "only_here.py").touch()
    code = "import subprocess, sys; from skylite.processes.import_path import protect_imports\n"
    code += "protect_imports(); subprocess.run([sys.executable, '-c', 'import only_here'])"
    for name in SHADOWED:
        (hostile / f"{name}.py").unlink()
    done = run_script(hostile, code, PYTHONPATH=path.format(os.environ.get("PYTHONPATH", "/absolute")))
    assert "No module named 'only_here'" in done.stderr


@pytest.mark.parametrize("path", [":{0}", "{0}:", "../folder:{0}", "{0}:./"])
def test_the_first_process_imports_nothing_from_it_through_pythonpath(hostile: Path, path: str) -> None:
    """Except the three below, which Python imports before the first line of skylite runs."""
    for name in ("skylite", "sitecustomize", "usercustomize"):
        (hostile / f"{name}.py").unlink()
    absolute = os.environ.get("PYTHONPATH", str(Path(skylite.__file__).parents[1]))
    done = run_script(hostile, CONSOLE_SCRIPT, "eval", "nowhere", PYTHONPATH=path.format(absolute))
    assert done.returncode == 2, done.stderr
    assert "nowhere is not a skylite run" in done.stderr
    assert_nothing_ran(hostile)


def test_every_child_inherits_the_protection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", "relative", *sys.path])
    monkeypatch.setenv("PYTHONPATH", "/absolute")
    monkeypatch.setenv("PYTHONSAFEPATH", "")  # to delete what is not set would leave nothing to restore
    protect_imports()
    assert all(os.path.isabs(p) for p in sys.path)
    env = child_env(VllmLauncher().environment(SPEC), str(tmp_path))
    assert (env["PYTHONSAFEPATH"], env["PYTHONPATH"]) == ("1", "/absolute")


def test_a_child_works_in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries obey files of the working folder, such as .env and matplotlibrc."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HF_HOME", "cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code = "import os; print(os.getcwd(), os.environ['TMPDIR'], os.environ['PWD'], os.environ['HF_HOME'])"
    child = start(ProcessSpec(name="c", argv=[sys.executable, "-c", code], env={}, log_path=Path("log")))
    try:
        child.process.wait(60)
    finally:
        kill(child)
    folder, temporary, pwd, cache = (tmp_path / "here" / "log").read_text().split()
    assert folder == temporary == pwd == str(child.folder.path)
    assert cache == str(tmp_path / "here" / "cache")


@pytest.mark.parametrize(
    ("name", "value", "is_path"),
    [
        ("HF_HOME", "cache", True),
        ("TRACKIO_DIR", "a/b", True),
        ("SSL_CERT_FILE", "./ca.pem", True),
        ("HF_HUB_CACHE", "~/cache", False),
        ("VLLM_DISABLE_COMPILE_CACHE", "1", False),
        ("X_CACHE", "redis", False),
        ("PATH", "a:b", False),
        ("HF_HOME", "/cache", False),
        ("MODEL", "a/b", False),
    ],
)
def test_paths_in_the_environment_become_absolute(name: str, value: str, is_path: bool) -> None:
    assert absolute_paths({name: value}) == {name: os.path.abspath(value) if is_path else value}


def test_reward_workers_work_in_a_folder_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "reward.py"
    text = "import os\nfrom pathlib import Path\n" + (
        "def reward(completion):\n"
        "    Path(completion).write_text(os.getcwd())\n"
        "    return 1.0\n"
    )  # fmt: skip
    program.write_text(text)
    monkeypatch.chdir(tmp_path)
    pool = RewardPool([f"{program}:reward"], timeout_s=100.0)
    try:
        asyncio.run(pool.score([(prompt(), str(tmp_path / "where"))]))
        folder = Path((tmp_path / "where").read_text())
        assert folder != tmp_path
        assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0
    finally:
        pool.close()
    assert not folder.exists()


@pytest.mark.parametrize("path", [":{0}", "{0}:", ".:{0}", "{0}::/bin", "bin:{0}", ""])
def test_a_program_in_the_working_folder_does_not_run(tmp_path: Path, path: str) -> None:
    for folder in (tmp_path, tmp_path / "bin"):
        folder.mkdir(exist_ok=True)
        (folder / "planted").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
        (folder / "planted").chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-P", "-c", FIND],
        env={**os.environ, "PATH": path.format("/usr/bin")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "No such file or directory: 'planted'" in done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", SEARCH_PATHS)
def test_only_absolute_parts_stay(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, kept in ((f":{os.defpath}::x:./y:", os.defpath), ("", None), (":", None), ("lib", None)):
        assert protected_env({name: value, "A": ":"}).get(name) == (kept.strip(":") if kept else None)
    monkeypatch.setenv(name, f":{os.environ.get(name) or '/nowhere'}:")
    code = f"import os; print(os.environ[{name!r}])"
    child = start(
        ProcessSpec(name="child", argv=[sys.executable, "-c", code], env={}, log_path=tmp_path / "log")
    )
    while poll(child) is None:
        pass
    kill(child)
    assert (tmp_path / "log").read_text().strip() == os.environ[name].strip(":")
