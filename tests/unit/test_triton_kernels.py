"""Runs tests/triton_cases.py under triton's interpreter, compiles the kernels for a Hopper GPU without one,
and checks what is printed where they cannot be used."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skylite.model import fast_path_check
from skylite.model.fast_path_check import enable_shortcuts
from skylite.model.kernel_check import kernel_fault
from skylite.model.policy import load_policy
from skylite.model.process_group import Dist
from tests.cases import PROBE
from tests.decisions import resolved
from tests.small_run import settings

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.mark.slow
def test_the_kernels_are_right_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/triton_cases.py"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_without_triton_the_reason_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "skylite.model.triton_kernels", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    fault = kernel_fault(CPU, torch.bfloat16, [64])
    assert fault is not None
    assert fault.startswith("ModuleNotFoundError: import of triton halted")


def test_where_triton_cannot_compile_the_reason_is_one_line() -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("a GPU can compile")
    fault = kernel_fault(CPU, torch.bfloat16, [64])
    assert fault is not None
    assert "\n" not in fault


def test_a_gpu_without_kernels_keeps_the_torch_forms_and_says_why(
    tiny_llama: Path, tmp_path: Path, dist: Dist, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy(resolved(tiny_llama, tmp_path), settings(), dist)
    on_gpu = replace(policy, device=torch.device("cuda"))
    for fault, used in (("norm of 64 differs by 3.0e-01", False), (None, True)):
        monkeypatch.setattr(fast_path_check, "kernel_fault", lambda *_, fault=fault: fault)
        chosen, (line,) = fast_path_check._with_kernels(on_gpu)
        assert chosen.kernels is used
        assert line == f"Triton kernels: not used; {fault}" or used
    assert fast_path_check._with_kernels(policy) == (policy, [])
    chosen, _ = enable_shortcuts(policy, PROBE)
    assert not chosen.kernels, "a CPU keeps its own forms"


BF16, FLOAT, INT, STRIDE = "*bf16", "*fp32", "i32", "i32:16"
HEAD: dict[str, Any] = {"LOGITS": BF16, "vocab": STRIDE, "inverse_temperature": "fp32", "start": INT}
HEAD |= {"FIRST": "*i64", "TARGETS": "*i64", "NORMALIZERS": FLOAT, "ENTROPIES": FLOAT}


def launches() -> dict[str, tuple[str, int, dict[str, Any]]]:
    """Kernel, warps and arguments of the launches in triton_kernels.py, for Qwen2.5-0.5B and 7B."""
    from skylite.model import triton_kernels as kernels

    made: dict[str, tuple[str, int, dict[str, Any]]] = {}
    for width in (128, 896, 3584):
        _, rows, block, warps = kernels._rows_of(1, width)
        norm: dict[str, Any] = {"num_rows": INT, "width": STRIDE, "eps": "fp32", "offset": "fp32"}
        norm |= {"X": BF16, "W": BF16, "ROWS": rows, "BLOCK": block}
        made[f"norm {width}"] = "_normalize", warps, norm | {"Y": BF16}
        made[f"norm's gradient {width}"] = "_normalize_backward", warps, norm | {"GY": BF16, "GX": BF16}
    for gelu in (False, True):
        gate: dict[str, Any] = {"GATE": BF16, "UP": BF16, "size": STRIDE}
        gate |= {"GELU": gelu, "BLOCK": kernels.GATED_BLOCK}
        made[f"gate, gelu {gelu}"] = "_gate", 8, gate | {"Y": BF16}
        gradients = {"GY": BF16, "GGATE": BF16, "GUP": BF16}
        made[f"gate's gradient, gelu {gelu}"] = "_gate_backward", 8, gate | gradients
    for half in (32, 64):
        rotary: dict[str, Any] = dict.fromkeys(("Q", "K", "COS", "SIN", "RQ", "RK"), BF16)
        rotary |= dict.fromkeys(("num_tokens", "length", "q_programs", "q_heads", "k_heads"), INT)
        rotary |= {f"{x}_{y}_stride": STRIDE for x in "qk" for y in ("batch", "head", "token")}
        rotary |= {"half": STRIDE, "angle_batch_stride": STRIDE, "angle_stride": STRIDE}
        rotary |= {"TRANSPOSED": True, "ROWS": kernels.TILE // 2 // half, "BLOCK": half}
        made[f"rotary {half}"] = "_rotate", 4, rotary
    tile = {"LANES": kernels.LOGITS_LANES, "STEPS": kernels.LOGITS_STEPS}
    made["logprobs"] = "_token_logprobs", 4, HEAD | {"LOGPROBS": FLOAT} | tile
    upstream = {"GLOGPROBS": FLOAT, "GENTROPIES": None, "BLOCK": kernels.LOGITS_BLOCK}
    made["logits' gradient"] = "_logits_gradient", 8, HEAD | upstream
    return made


@pytest.mark.slow
def test_the_kernels_compile_for_hopper_without_spills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No register in memory, hardly any shared memory, and 16 bytes a load of the large tensors."""
    pytest.importorskip("triton")
    from skylite.model import triton_kernels as kernels
    from tests.kernels_sm90 import compiled

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for name, (kernel, warps, arguments) in launches().items():
        made = compiled(getattr(kernels, kernel), warps, **arguments)
        assert made.stack == 0, name
        assert made.registers <= 128, name
        assert made.shared <= 1024, name
        assert any(".v4.b32" in load for load in made.loads), name
        assert "rotary" not in name or made.loads == {"ld.global.v4.b32"}, name
