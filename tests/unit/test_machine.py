"""Detection of the machine's hardware, on output of real machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skylite.processes.hardware import choose_dtype, cpu_cores, cpu_has_bf16, parse_gpus, visible_gpus

LISTING = "0, GPU-aa11, NVIDIA H200, 9.0\n1, GPU-bb22, Tesla T4, 7.5\n"


def test_nvidia_smi_output_is_parsed() -> None:
    first, second = parse_gpus(LISTING)
    assert (first.name, first.compute_capability) == ("NVIDIA H200", 9.0)
    assert (second.index, second.uuid) == (1, "GPU-bb22")
    assert parse_gpus("") == []


@pytest.mark.parametrize(
    ("setting", "indices"),
    [(None, [0, 1]), ("", []), ("1", [1]), ("1,0", [1, 0]), ("GPU-bb", [1]), ("0,7,1", [0]), ("-1", [])],
)
def test_visible_devices_are_interpreted_as_cuda_does(setting: str | None, indices: list[int]) -> None:
    assert [g.index for g in visible_gpus(parse_gpus(LISTING), setting)] == indices


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
    assert (dtype == "bfloat16") is cpu_has_bf16()
    assert ("float32" in note) is not cpu_has_bf16()


def test_cpu_affinity_limits_the_cores() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cpu_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
