"""Detection of cores and of bfloat16 support. GPUs: test_gpus.py."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from skylite.processes import hardware
from skylite.processes.hardware import (
    c_compiler,
    choose_dtype,
    cpu_cores,
    cpu_has_bf16,
    python_header,
    triton_note,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 avx512f avx512_bf16\n", True),
        ("flags : fpu amx_bf16\n", True),
        ("Features : fp asimd bf16\n", True),
        ("flags : fpu avx2 avx512f\nbugs : avx512_bf16\n", False),
        ("", False),
    ],
)
def test_bf16_support_is_read_from_the_cpu_flags(tmp_path: Path, text: str, expected: bool) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_has_bf16(tmp_path / "cpuinfo") is expected


def test_an_explicit_dtype_is_kept_and_an_automatic_one_explained() -> None:
    assert choose_dtype("float32", "cpu")[0] == "float32"
    assert choose_dtype("bfloat16", "cpu")[0] == "bfloat16"
    dtype, note = choose_dtype("auto", "cpu")
    assert (dtype, "float32" in str(note)) == ("float32", True), "on every CPU, so that runs can be compared"


def test_a_compiler_is_found_as_triton_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert c_compiler() is None
    for name in ("clang", "gcc", "mine"):
        (tmp_path / name).touch(mode=0o755)
        assert c_compiler() == str(tmp_path / ("clang" if name == "clang" else "gcc"))
    monkeypatch.setenv("CC", "mine")
    assert c_compiler() == str(tmp_path / "mine")
    monkeypatch.setenv("CC", "another")
    assert c_compiler() is None


def test_python_h_is_looked_for_where_triton_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_default_scheme", lambda: "posix_local")
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path / scheme)})
    assert python_header() is None
    (tmp_path / "posix_prefix").mkdir()
    (tmp_path / "posix_prefix" / "Python.h").touch()
    assert python_header() == tmp_path / "posix_prefix" / "Python.h"


def test_a_run_on_a_gpu_warns_of_what_triton_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "python_header", lambda: Path("Python.h"))
    monkeypatch.setattr(hardware, "c_compiler", lambda: "gcc")
    assert triton_note("cuda") is None
    monkeypatch.setattr(hardware, "c_compiler", lambda: None)
    assert triton_note("cpu") is None
    note = str(triton_note("cuda"))
    assert note.startswith("warning: there is no C compiler, and Triton compiles")
    assert note.endswith(": `sudo apt-get install gcc`")


def test_cpu_affinity_limits_the_cores() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cpu_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
