"""`python -m skylite.processes.gpus`, and what make does with its answer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import skylite
from skylite.processes.gpus import main
from tests.unit.gpu_cases import H200, T4, Machine

ROOT = Path(__file__).parents[2]
CHECKED = "-P -m skylite.processes.gpus"


def test_gpus_that_torch_can_use_are_printed(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.lists(H200, T4)
    machine.has_torch()
    main()
    gpus = "GPU 0: NVIDIA H200, GPU 1: Tesla T4"
    assert capsys.readouterr() == (f"{gpus}; driver 580.95.05; torch 2.13.0 for CUDA 13.0\n", "")


@pytest.mark.parametrize(
    ("setting", "answer"), [(None, "no GPU"), ("-1", "no GPU is used: CUDA_VISIBLE_DEVICES=-1 hides all")]
)
def test_a_machine_without_a_usable_gpu_is_no_error(
    machine: Machine, capsys: pytest.CaptureFixture[str], setting: str | None, answer: str
) -> None:
    if setting is not None:
        machine.lists(H200)
        machine.sees(setting)
    main()
    assert capsys.readouterr() == (f"{answer}\n", "")


@pytest.mark.parametrize(
    ("driver", "cuda", "error", "reason"),
    [
        ("580.95.05", None, "", "this Python has a CPU build of torch (2.13.0)"),
        ("570.133.20", "13.0", "too old", "which driver 570.133.20 of NVIDIA H200 is too old for"),
        ("580.95.05", "13.0", "unknown error", "cannot use them: unknown error"),
    ],
)
def test_a_gpu_that_torch_cannot_use_exits_2_with_the_reason(
    machine: Machine,
    capsys: pytest.CaptureFixture[str],
    driver: str,
    cuda: str | None,
    error: str,
    reason: str,
) -> None:
    machine.lists(H200.replace("580.95.05", driver))
    machine.has_torch(cuda=cuda, error=error)
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("skylite: ")
    assert reason in err
    assert "CUDA_VISIBLE_DEVICES=-1" in err


def test_a_broken_nvidia_smi_exits_2_with_its_answer(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.lists(text="Failed to initialize NVML: Driver/library version mismatch\n", code=18)
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "skylite: nvidia-smi failed: Failed to initialize NVML" in capsys.readouterr().err


class Checkout:
    """A folder with the files that set-up reads. Its pip only notes its calls."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "calls"
        binaries = folder / ".venv" / "bin"
        binaries.mkdir(parents=True)
        (folder / "constraints").mkdir()
        (folder / "pyproject.toml").touch()
        for name in ("cpu", "torch", "cpu-hashes", "setup", "peers", "verifiers"):
            (folder / "constraints" / f"{name}.txt").touch()
        note = f'#!/bin/sh\necho "$(basename "$0") $*" >> "{self.log}"\n'
        (binaries / "pip").write_text(note)
        (binaries / "python").write_text(f'{note}exec "{sys.executable}" "$@"\n')
        for program in ("pip", "python"):
            (binaries / program).chmod(0o755)

    def make_setup(self, gpus: str) -> tuple[int, str, list[str]]:
        """Run `make setup` with this number of GPUs. Returns its exit code, errors, and the calls."""
        self.log.write_text("")
        made = ["make", "-f", str(ROOT / "Makefile"), f"GPU={gpus}", "PYTHON=true", "setup"]
        env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
        parts = [env.get("PYTHONPATH", ""), str(Path(skylite.__file__).parents[1])]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, parts))
        done = subprocess.run(made, cwd=self.folder, env=env, capture_output=True, text=True)
        return done.returncode, done.stderr, self.log.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "checkout")


def test_make_repeats_a_failed_check_without_installing_again(checkout: Checkout, machine: Machine) -> None:
    machine.lists(H200)
    machine.has_torch(cuda=None)
    code, errors, calls = checkout.make_setup("1")
    assert (code, calls[-1], len(calls) > 3) == (2, f"python {CHECKED}", True)
    assert "skylite: NVIDIA H200 cannot be used, because this Python has a CPU build of torch" in errors
    code, again, calls = checkout.make_setup("1")
    assert (code, again, calls) == (2, errors, [f"python {CHECKED}"])
    machine.has_torch()
    assert checkout.make_setup("1") == (0, "", [f"python {CHECKED}"])
    assert checkout.make_setup("1") == (0, "", []), "it succeeded"
    (checkout.folder / "pyproject.toml").write_text("changed")
    calls = checkout.make_setup("1")[2]
    assert (calls[0][:3], calls[-1]) == ("pip", f"python {CHECKED}"), "what was installed is checked"


def test_make_checks_nothing_without_a_gpu(checkout: Checkout) -> None:
    code, errors, calls = checkout.make_setup("")
    assert (code, errors, {call.split()[0] for call in calls}) == (0, "", {"pip"})
    assert checkout.make_setup("") == (0, "", [])
