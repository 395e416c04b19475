"""GPUs as nvidia-smi lists them and CUDA_VISIBLE_DEVICES selects them, and whether torch can use them.

torch answers in a child process: skylite's own process never imports it. `python -m skylite.processes.gpus`
prints the GPUs that skylite uses, or the reason why it cannot.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from skylite.errors import ConfigError
from skylite.notes import Note, warning
from skylite.processes.import_path import NEUTRAL_FOLDER, protected_env

SMI = "nvidia-smi"
VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER_DEVICE = Path("/dev/nvidiactl")
"""Exists when an NVIDIA driver is loaded."""
SMI_TIMEOUT_S = 30.0
"""A cold driver takes several seconds to answer."""
SMI_FIELDS = ("index", "uuid", "name", "compute_cap", "memory.total", "driver_version", "mig.mode.current")
USE_CPU = f"set {VISIBLE}=-1 to train on the CPU"
TORCH_TIMEOUT_S = 300.0
"""The first import of torch from a slow disk takes minutes."""
ASK_TORCH = """
import json, torch
error = ""
try:
    torch.cuda.init()
except Exception as problem:
    error = str(problem) or type(problem).__name__
answer = {"version": torch.__version__, "cuda": torch.version.cuda, "error": error}
if not error:
    answer |= {"count": torch.cuda.device_count(), "archs": torch.cuda.get_arch_list()}
print(json.dumps(answer))
"""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as listed by nvidia-smi."""

    index: int
    """Its number in nvidia-smi, which is CUDA's number in PCI order (`cuda_env`)."""
    uuid: str
    name: str
    compute_capability: float
    total_bytes: int | None
    """None: nvidia-smi does not know it (GPUs that share the machine's memory)."""
    driver: str
    mig: bool
    """Whether the GPU is divided into MIG devices."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with memory on a GPU."""

    pid: int
    name: str
    used_bytes: int | None
    """None: the driver does not tell."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """What a GPU holds now."""

    used_bytes: int
    free_bytes: int | None
    """Less than total - used where the driver reserves memory. None: nvidia-smi does not know it."""
    processes: list[GpuProcess]
    """Those that this container may see."""


def visible_gpus() -> list[Gpu]:
    """GPUs that this process may use, in the order of CUDA_VISIBLE_DEVICES. Empty on a machine without GPUs.

    Raises ConfigError if nvidia-smi fails, or if CUDA_VISIBLE_DEVICES names what cannot be used.
    """
    setting = os.environ.get(VISIBLE)
    if hides_all(setting):
        return []
    found = list_gpus()
    chosen = select_gpus(found, setting) if setting is not None and found else found
    if divided := next((g for g in chosen if g.mig), None):
        raise ConfigError(
            f"GPU {divided.index} ({divided.name}) is divided by MIG, and engines do not support its parts.",
            f"Choose another GPU with {VISIBLE}, or switch MIG off (nvidia-smi -i {divided.index} -mig 0).",
        )
    return chosen


def list_gpus() -> list[Gpu]:
    """All GPUs of this machine. Raises ConfigError if nvidia-smi fails or is missing next to a driver."""
    path = shutil.which(SMI)
    if path is not None:
        return parse_gpus(_ask_smi_once(path))
    if DRIVER_DEVICE.exists():
        raise ConfigError(
            f"This machine has an NVIDIA driver ({DRIVER_DEVICE}), but no nvidia-smi to ask about its GPUs.",
            f"Put nvidia-smi on PATH (containers: NVIDIA_DRIVER_CAPABILITIES=compute,utility), or {USE_CPU}.",
        )
    return []


def parse_gpus(listing: str) -> list[Gpu]:
    """Parse nvidia-smi's answer to SMI_FIELDS. Raises ConfigError for a line of another form."""
    return [_parse_gpu(line) for line in listing.splitlines() if line.strip()]


def hides_all(setting: str | None) -> bool:
    """Whether a value of CUDA_VISIBLE_DEVICES hides every GPU, as an empty one and -1 do."""
    return setting is not None and (not setting.strip() or setting.strip().startswith("-"))


def select_gpus(found: Sequence[Gpu], setting: str) -> list[Gpu]:
    """GPUs that CUDA_VISIBLE_DEVICES (`setting`) names, by number or UUID, in its order.

    Like CUDA, ignores everything after -1. Raises ConfigError for a name that is not one of `found`. CUDA
    would silently ignore it and all that follow.
    """
    chosen: list[Gpu] = []
    for name in (part.strip() for part in setting.split(",")):
        if name.startswith("-"):
            break
        if name.startswith("MIG-"):
            raise ConfigError(
                f"{VISIBLE}={setting} names a part of a GPU ({name}), and engines do not support MIG.",
                f"Name a complete GPU, or {USE_CPU}.",
            )
        named = [g for g in found if name == str(g.index) or _is_uuid(name, g.uuid)]
        if len(named) != 1 or named[0] in chosen:
            why = "more than once" if named else "which is no GPU of this machine"
            raise ConfigError(
                f"{VISIBLE}={setting} names {name!r}, {why} ({describe(found)}).",
                f"Name each GPU once, by its number or UUID in `nvidia-smi -L`, or {USE_CPU}.",
            )
        chosen += named
    return chosen


def describe(gpus: Sequence[Gpu]) -> str:
    """Such as `GPU 0: NVIDIA H200, GPU 1: NVIDIA H200`."""
    return ", ".join(f"GPU {g.index}: {g.name}" for g in gpus)


def why_no_gpu() -> Note | None:
    """Why this run uses no GPU although something names one; None for a machine without GPUs."""
    setting = os.environ.get(VISIBLE)
    if hides_all(setting):
        return Note(f"no GPU is used: {VISIBLE}={setting} hides all")
    if setting is not None:
        return warning(f"{VISIBLE}={setting} names a GPU, but this machine has none; this run uses the CPU")
    return None if shutil.which(SMI) is None else Note("no GPU is used: nvidia-smi lists none")


def memory_in_use(gpu: Gpu) -> GpuUse:
    """What is in use and free on the GPU now."""
    path = shutil.which(SMI)
    if path is None or gpu.total_bytes is None:
        return GpuUse(0, None, [])
    one = ["-i", gpu.uuid, "--format=csv,noheader,nounits"]
    used, _, free = _ask_smi(path, ["--query-gpu=memory.used,memory.free", *one]).partition(",")
    listing = _ask_smi(path, ["--query-compute-apps=pid,used_memory,process_name", *one])
    rows = [[cell.strip() for cell in line.split(",", 2)] for line in listing.splitlines()]
    processes = [
        GpuProcess(int(row[0]), row[2], _mebibytes(row[1]))
        for row in rows
        if len(row) == 3 and row[0].isdigit()
    ]
    used_bytes, free_bytes = _mebibytes(used) or 0, _mebibytes(free)
    return GpuUse(used_bytes, gpu.total_bytes - used_bytes if free_bytes is None else free_bytes, processes)


def cuda_env(gpus: Sequence[int]) -> dict[str, str]:
    """Environment that makes exactly these GPUs visible, by nvidia-smi's numbers; empty for no GPU.

    CUDA's own order is fastest first, so without the second variable its numbers may name other GPUs.
    """
    return {VISIBLE: ",".join(map(str, gpus)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if gpus else {}


@dataclass(frozen=True, slots=True)
class TorchCuda:
    """What torch says about the GPUs."""

    version: str
    cuda: str | None
    """CUDA version that torch was built for; None: a CPU build."""
    error: str = ""
    """Why torch cannot use the GPUs; empty if it can."""
    count: int = 0
    archs: tuple[str, ...] = ()
    """GPU architectures that torch has code for, such as sm_90."""


def check_cuda(gpus: Sequence[Gpu]) -> TorchCuda:
    """Raise ConfigError if torch cannot use these GPUs; return what it says about them."""
    torch = ask_torch(sys.executable, os.environ.get("PYTHONPATH", ""), tuple(g.index for g in gpus))
    first = gpus[0]
    if torch.cuda is None:
        raise ConfigError(
            f"{first.name} cannot be used, because this Python has a CPU build of torch ({torch.version}).",
            f"`make clean setup` installs the CUDA build; or {USE_CPU}.",
        )
    if torch.error or torch.count != len(gpus):
        why = torch.error.strip().splitlines()[0] if torch.error else f"it finds {torch.count} GPU(s)"
        raise ConfigError(
            f"nvidia-smi lists {describe(gpus)} (driver {first.driver}), but torch {torch.version} for CUDA "
            f"{torch.cuda} cannot use them: {why.rstrip('.')}.",
            f'Repair the driver until `python -c "import torch; torch.cuda.init()"` succeeds, or {USE_CPU}.',
        )
    oldest = min((int(a.removeprefix("sm_")) / 10 for a in torch.archs if a[3:].isdigit()), default=0.0)
    if old := next((g for g in gpus if g.compute_capability < oldest), None):
        raise ConfigError(
            f"{old.name} has compute capability {old.compute_capability}, and torch {torch.version} has code "
            f"for {oldest} and newer only.",
            f"Install a torch for an older CUDA, or choose another GPU with {VISIBLE}; or {USE_CPU}.",
        )
    return torch


@functools.cache
def ask_torch(python: str, path: str, gpus: tuple[int, ...]) -> TorchCuda:
    """What torch in `python` with PYTHONPATH `path` says about these GPUs. Imports torch in a child once."""
    env = protected_env({**os.environ, **cuda_env(gpus)})
    try:
        done = subprocess.run(
            [python, "-c", ASK_TORCH], env=env, cwd=NEUTRAL_FOLDER, capture_output=True, text=True,
            timeout=TORCH_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"torch was not imported within {TORCH_TIMEOUT_S:g} s.",
            "Check the disk of this Python's packages.",
        ) from None
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ConfigError(f"torch cannot be imported: {last[0]}.", "Install it again: `make clean setup`.")
    answer = json.loads(done.stdout.splitlines()[-1])
    return TorchCuda(**{**answer, "archs": tuple(answer.get("archs", ()))})


@functools.cache
def _ask_smi_once(path: str) -> str:
    return _ask_smi(path, [f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"])


def _ask_smi(path: str, arguments: list[str]) -> str:
    """nvidia-smi's answer; empty if it finds no GPU. Raises ConfigError if it fails."""
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=SMI_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise _smi_failed(f"no answer within {SMI_TIMEOUT_S:g} s") from None
    text = (done.stdout.strip() or done.stderr.strip()).strip()
    if "no devices were found" in text.lower():
        return ""
    if done.returncode != 0:
        raise _smi_failed(text.splitlines()[0] if text else f"exit code {done.returncode}")
    return done.stdout


def _smi_failed(reason: str) -> ConfigError:
    return ConfigError(
        f"nvidia-smi failed: {reason.rstrip('.')}.",
        f"Repair the driver until nvidia-smi lists the GPUs, or {USE_CPU}.",
    )


def _parse_gpu(line: str) -> Gpu:
    try:
        index, uuid, name, capability, total, driver, mig = (cell.strip() for cell in line.split(","))
        return Gpu(int(index), uuid, name, float(capability), _mebibytes(total), driver, mig == "Enabled")
    except ValueError:
        raise _smi_failed(f"it lists {line.strip()!r}") from None


def _mebibytes(text: str) -> int | None:
    return int(text) << 20 if text.strip().isdigit() else None


def _is_uuid(name: str, uuid: str) -> bool:
    return name.startswith("GPU-") and uuid.startswith(name)


def main() -> None:
    """Print the GPUs, or the reason why they cannot be used, which exits 2."""
    try:
        gpus = visible_gpus()
        torch = check_cuda(gpus) if gpus else None
    except ConfigError as error:
        sys.exit(_print_error(error))
    if torch is None:
        print(why_no_gpu() or "no GPU")
    else:
        print(f"{describe(gpus)}; driver {gpus[0].driver}; torch {torch.version} for CUDA {torch.cuda}")


def _print_error(error: ConfigError) -> int:
    print(f"skylite: {error}", file=sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    main()
