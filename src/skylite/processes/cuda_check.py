"""Whether torch can use the GPUs. torch answers in a child process: skylite's own process never imports it.

`python -m skylite.processes.cuda_check` prints the GPUs that skylite uses, or the reason why it cannot.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from skylite.errors import ConfigError
from skylite.processes.gpus import USE_CPU, VISIBLE, Gpu, cuda_env, describe, visible_gpus, why_no_gpu
from skylite.processes.import_path import NEUTRAL_FOLDER, protected_env

TORCH_TIMEOUT_S = 300.0
"""The first import of torch from a slow disk takes minutes."""
FIRST_DRIVER = {12: 525, 13: 580}
"""CUDA's major version -> the first driver that runs it (CUDA release notes, minor version compatibility)."""
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
    needed = FIRST_DRIVER.get(int(torch.cuda.partition(".")[0]))
    if torch.error and needed is not None and int(first.driver.partition(".")[0]) < needed:
        raise ConfigError(
            f"torch {torch.version} is built for CUDA {torch.cuda}, which driver {first.driver} of "
            f"{first.name} is too old for.",
            f"Install NVIDIA driver {needed} or newer, or a torch for an older CUDA; or {USE_CPU}.",
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
