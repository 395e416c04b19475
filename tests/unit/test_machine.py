"""Detection of cores and of bfloat16 support. GPUs: test_gpus.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skylite.processes.hardware import choose_dtype, cpu_cores, cpu_has_bf16


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
    assert (dtype, "float32" in note) == ("float32", True), "on every CPU, so that runs can be compared"


def test_cpu_affinity_limits_the_cores() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cpu_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
