"""GPUs that skylite and `make setup` use or refuse; a stub nvidia-smi and a stub torch play the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

import skylite
from skylite.errors import ConfigError
from skylite.notes import Note
from skylite.processes import gpus
from skylite.processes.gpus import ask_torch, cuda_env, main, visible_gpus, why_no_gpu
from skylite.processes.hardware import choose_device, choose_dtype
from tests.unit.gpu_cases import H200, T4, Machine

ROOT = Path(__file__).parents[2]
CHECKED = "-P -m skylite.processes.gpus"


def test_a_machine_without_gpus_uses_the_cpu(machine: Machine) -> None:
    assert (choose_device(), why_no_gpu()) == ("cpu", None)


def test_a_gpu_that_torch_can_use_is_used(machine: Machine) -> None:
    machine.lists(H200, T4)
    machine.has_torch()
    assert choose_device() == "cuda"
    first, second = visible_gpus()
    assert (first.name, first.compute_capability, first.total_bytes) == ("NVIDIA H200", 9.0, 143771 << 20)
    assert (second.index, second.uuid, second.driver, second.mig) == (1, "GPU-1a5e-11", "580.95.05", False)


@pytest.mark.parametrize(
    ("setting", "indices"),
    [
        ("1", [1]),
        ("1,0", [1, 0]),
        (" 0 , 1 ", [0, 1]),
        ("GPU-1a", [1]),
        ("GPU-0a5e-11,1", [0, 1]),
        ("0,-1,1", [0]),
    ],
)
def test_visible_devices_select_gpus(machine: Machine, setting: str, indices: list[int]) -> None:
    machine.lists(H200, H200)
    machine.sees(setting)
    assert [g.index for g in visible_gpus()] == indices


@pytest.mark.parametrize("setting", ["", " ", "-1", "-1,0"])
def test_hidden_gpus_mean_the_cpu_and_a_note(machine: Machine, setting: str) -> None:
    machine.lists(H200)
    machine.sees(setting)
    assert choose_device() == "cpu"
    assert f"CUDA_VISIBLE_DEVICES={setting} hides all" in str(why_no_gpu())


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("2", "names '2', which is no GPU of this machine"),
        ("0,7,1", "names '7', which is no GPU of this machine"),
        ("GPU-", "names 'GPU-', more than once"),
        ("GPU-ff", "names 'GPU-ff', which is no GPU"),
        ("0,0", "names '0', more than once"),
        ("0,", "names '', which is no GPU"),
        ("MIG-c7-11", "engines do not support MIG"),
        ("all", "names 'all', which is no GPU"),
    ],
)
def test_a_setting_that_cuda_would_misread_is_refused(machine: Machine, setting: str, reason: str) -> None:
    machine.lists(H200, H200)
    machine.sees(setting)
    with pytest.raises(ConfigError) as error:
        visible_gpus()
    assert reason in str(error.value)
    assert f"CUDA_VISIBLE_DEVICES={setting}" in error.value.what
    assert "set CUDA_VISIBLE_DEVICES=-1" in error.value.hint


def test_a_named_gpu_on_a_machine_without_any_gives_a_warning(machine: Machine) -> None:
    machine.sees("0")
    assert choose_device() == "cpu"
    assert str(why_no_gpu()).startswith(
        "warning: CUDA_VISIBLE_DEVICES=0 names a GPU, but this machine has none"
    )


def test_a_gpu_in_mig_mode_is_refused_unless_another_is_chosen(machine: Machine) -> None:
    machine.lists(H200.replace("Disabled", "Enabled"), H200)
    with pytest.raises(ConfigError, match=r"GPU 0 .* is divided by MIG"):
        visible_gpus()
    machine.sees("1")
    assert [g.index for g in visible_gpus()] == [1]


@pytest.mark.parametrize(("text", "code"), [("No devices were found\n", 6), ("", 0)])
def test_a_driver_without_gpus_means_the_cpu_and_a_note(machine: Machine, text: str, code: int) -> None:
    machine.lists(text=text, code=code)
    assert choose_device() == "cpu"
    assert str(why_no_gpu()) == "no GPU is used: nvidia-smi lists none"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", 9),
        ("Failed to initialize NVML: Driver/library version mismatch\n", 18),
        ('Field "compute_cap" is not a valid field to query.\n', 2),
        ("0, GPU-1, [Unknown Error], [Unknown Error]\n", 0),
        ("Unable to determine the device handle for GPU 0000:01:00.0: Unknown Error\n", 0),
    ],
)
def test_a_failing_nvidia_smi_is_no_reason_to_use_the_cpu(machine: Machine, text: str, code: int) -> None:
    machine.lists(text=text, code=code)
    with pytest.raises(ConfigError, match="nvidia-smi failed: ") as error:
        choose_device()
    assert text.strip().rstrip(".") in error.value.what


def test_a_driver_without_nvidia_smi_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "DRIVER_DEVICE", ROOT)
    with pytest.raises(ConfigError, match="but no nvidia-smi"):
        choose_device()


@pytest.mark.parametrize(
    ("card", "cuda", "error", "reason"),
    [
        (H200, None, "", r"NVIDIA H200 cannot be used.* CPU build of torch \(2.13.0\)"),
        (H200, "13.0", "CUDA unknown error", "driver 580.95.05.* cannot use them: CUDA unknown error"),
        (
            "Tesla V100-SXM2-16GB, 7.0, 16384, 580.95.05, [N/A]", "13.0", "",
            "compute capability 7.0, and torch 2.13.0 has code for 7.5",
        ),
    ],
)  # fmt: skip
def test_a_gpu_that_torch_cannot_use_is_refused(
    machine: Machine,
    capsys: pytest.CaptureFixture[str],
    card: str,
    cuda: str | None,
    error: str,
    reason: str,
) -> None:
    machine.lists(card)
    machine.has_torch(cuda=cuda, error=error)
    with pytest.raises(ConfigError, match=f"{reason}.*CUDA_VISIBLE_DEVICES=-1"):
        choose_device()
    with pytest.raises(SystemExit, match="2"):
        main()
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err[:9]) == ("", 1, "skylite: ")


@pytest.mark.parametrize("setting", ["auto", "bfloat16", "float32"])
def test_no_type_can_be_used_below_8(
    machine: Machine, setting: Literal["auto", "bfloat16", "float32"]
) -> None:
    machine.lists(H200, T4)
    with pytest.raises(ConfigError) as error:
        choose_dtype(setting, "cuda")
    assert "T4 has compute capability 7.5, and bfloat16 needs 8.0 or newer. Engines'" in error.value.what
    assert error.value.hint.startswith(
        "Choose a GPU of compute capability 8.0 or newer with CUDA_VISIBLE_DEVI"
    )
    assert error.value.hint.endswith(", or set CUDA_VISIBLE_DEVICES=-1 to train on the CPU.")


def test_a_gpu_computes_in_bfloat16_only(machine: Machine) -> None:
    machine.lists(H200, T4)
    machine.sees("0")
    note = "dtype bfloat16: this GPU computes it natively"
    assert choose_dtype("auto", "cuda") == ("bfloat16", Note(note))
    assert choose_dtype("bfloat16", "cuda") == ("bfloat16", None)
    with pytest.raises(
        ConfigError, match=r"float32 cannot be used on a GPU: .* Use model.dtype=bfloat16, or"
    ):
        choose_dtype("float32", "cuda")


def test_a_base_model_without_lora_may_compute_in_float32(machine: Machine) -> None:
    machine.lists(T4)
    assert choose_dtype("float32", "cuda", lora=False) == ("float32", None)
    dtype, note = choose_dtype("auto", "cuda", lora=False)
    assert (dtype, "Tesla T4 has compute capability 7.5" in str(note)) == ("float32", True)
    with pytest.raises(ConfigError, match=r"model.dtype=bfloat16 .* Use model.dtype=float32"):
        choose_dtype("bfloat16", "cuda", lora=False)


def test_torch_of_this_machine_answers() -> None:
    """The child's program, with the real torch."""
    answer = ask_torch(sys.executable, os.environ.get("PYTHONPATH", ""), ())
    assert answer.version[0].isdigit()
    assert (answer.cuda is None) == answer.version.endswith("+cpu")


def test_children_see_their_gpus_by_nvidia_smis_numbers() -> None:
    assert cuda_env([2, 0]) == {"CUDA_VISIBLE_DEVICES": "2,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert cuda_env([]) == {}


@pytest.mark.parametrize(
    ("listing", "setting", "counted"),
    [
        ("GPU 0: NVIDIA H200 (UUID: GPU-3f)\n  MIG 1g.18gb Device 0: (UUID: MIG-1)\n", None, "1"),
        ("GPU 0: NVIDIA H200 (UUID: GPU-3f)\nGPU 1: NVIDIA H200 (UUID: GPU-4f)\n", "1", "2"),
        ("GPU 0: NVIDIA H200 (UUID: GPU-3f)\n", "", ""),
        ("GPU 0: NVIDIA H200 (UUID: GPU-3f)\n", "-1", ""),
        ("0 GPUs\n", None, ""),
        ("No devices were found\n", None, ""),
        ("Unable to determine the device handle for GPU 0000:01:00.0: Unknown Error\n", None, ""),
    ],
)
def test_make_counts_gpus_only(machine: Machine, listing: str, setting: str | None, counted: str) -> None:
    machine.lists(text=listing)
    if setting is not None:
        machine.sees(setting)
    made = ["make", "-f", str(ROOT / "Makefile"), "--eval", "count: ; @echo '[$(GPU)]'", "count"]
    # The tests themselves run under make, whose flags would make this one print the folder too.
    env = {name: text for name, text in os.environ.items() if name not in {"MAKEFLAGS", "MAKELEVEL"}}
    answer = subprocess.run(made, env=env, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == f"[{counted}]"


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


class Checkout:
    """A folder with the files that set-up reads. Its pip only notes its calls."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "calls"
        binaries = folder / ".venv" / "bin"
        binaries.mkdir(parents=True)
        (folder / "constraints").mkdir()
        (folder / "pyproject.toml").touch()
        for name in ("cpu", "torch", "cpu-hashes", "setup", "peers", "verifiers", "tinker"):
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
